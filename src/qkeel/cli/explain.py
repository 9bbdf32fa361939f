"""`qkeel presets`, `qkeel remedies`: names, each with its line; `qkeel explain`: the formula and source of one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qkeel.cli.exits import OK
from qkeel.errors import unknown
from qkeel.lab.config import ModelConfig
from qkeel.lab.model.build_model import attention_spec, build_decoder
from qkeel.lab.model.run_remedies import rules
from qkeel.registry import parse
from qkeel.remedies import ALIASES, REMEDIES, apply, canonical, note
from qkeel.remedies import parse as remedies_of
from qkeel.remedies.apply import remedies
from qkeel.sites import find_sites
from qkeel.spec import PRESETS, presets

_LENGTH = 512  # tokens; for the remedies whose starting scale depends on the training length


def list_presets() -> int:
    """List the published attention recipes."""
    return _print(presets())


def list_remedies() -> int:
    """List the remedies."""
    return _print(remedies())


def _print(names: Mapping[str, str]) -> int:
    width = max(map(len, names))
    for name, line in names.items():
        print(f"{name:<{width}}  {line}")
    return OK


def explain_command(name: str, /) -> int:
    """Print the formula that a preset or remedy puts in force, and its source.

    Args:
        name: A preset or remedy with options, like gemma2:cap=30 or lalr:tau=0.1.
    """
    print(explain(name))
    return OK


def explain(text: str) -> str:
    """Returns the line, the source and the formula of a preset, or of remedies on the baseline.

    A remedy of steps, the loss or a block has a rule; attention's formula is printed where one of them changes it.
    """
    terms = parse(text)
    names = [term.name for term in terms]
    if len(names) == 1 and names[0] in PRESETS:
        row = PRESETS[names[0]]
        given = text.partition(":")[2]
        line = f"{names[0]} with {given}; as published: {row.line}" if given else row.line
        return f"{text}: {line}\nsource: {row.source}\n\n{attention_spec(text).explain()}"
    for name in names:
        if name not in REMEDIES and name not in ALIASES:
            raise unknown("preset or remedy", name, {*PRESETS, *REMEDIES, *ALIASES})
    about, found = note(text), rules(text)
    if len(found) < len(remedies_of(text)):
        found.append(_formula(text))
    elif found:
        found.append("what attention computes stays the model's own")
    return "\n".join([f"{canonical(text)}: {about.line}", f"source: {about.source}", "", *found])


def _formula(text: str) -> str:
    decoder = build_decoder(ModelConfig(d_model=8, n_layers=1, n_heads=2), vocab_size=2)
    apply(text, decoder, torch.optim.AdamW(decoder.parameters()), train_length=_LENGTH)
    return find_sites(decoder)[0].spec.explain()
