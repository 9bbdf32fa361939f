"""The kinds of attention that remedies are put to, and which remedies refuse them."""

from __future__ import annotations

import dataclasses
import functools

import torch

from qkeel import apply
from qkeel.errors import QkeelError
from qkeel.nn import Decoder, DecoderConfig

KINDS = ("MHA", "GQA", "MLA", "GAU")


def model_of(kind: str) -> torch.nn.Module:
    """A small decoder with that kind of attention."""
    config = DecoderConfig(
        vocab_size=7, d_model=32, n_layers=1, n_kv_heads=2 if kind == "GQA" else None
    )
    own = {"attention": kind.lower()} if kind in ("MLA", "GAU") else {}
    heads = {"n_heads": 1, "head_dim": 32} if kind == "GAU" else {}
    return Decoder(dataclasses.replace(config, **own, **heads))


@functools.cache
def refusal_of(name: str, kind: str) -> str:
    """Why a remedy cannot be applied to that kind of attention; empty if it can."""
    model = model_of(kind)
    try:
        apply(
            model, name, torch.optim.AdamW(model.parameters()), train_length=16
        ).remove()
    except QkeelError as error:
        return str(error)
    return ""
