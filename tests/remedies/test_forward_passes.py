"""How often the model is run for a remedy: twice to find its attention, and at most twice more."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from tests.quick import quick

from qkeel import apply
from qkeel.nn import Decoder, DecoderConfig
from qkeel.remedies.apply import REMEDIES
from qkeel.sites.search import ModelTrace

SEARCH, MORE = 2, 2


def own():
    return Decoder(DecoderConfig(vocab_size=32, d_model=32, n_heads=4, n_layers=3))


def llama():
    from tests.contract.watch import families

    return families.llama(num_hidden_layers=3)


def tokens():
    return torch.randint(0, 32, (2, 80), generator=torch.Generator().manual_seed(0))


def counted(model, act):
    """How many passes of the model an action makes."""
    passes: list[None] = []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(None))
    try:
        act()
    finally:
        hook.remove()
    return len(passes)


@pytest.mark.parametrize(
    ("build", "name"),
    quick(
        itertools.product((own, llama), REMEDIES),
        lambda case: case[1] in [*REMEDIES][:: 2 if case[0] is llama else 5],
    ),
)
def test_no_remedy_runs_the_model_more_than_twice_besides(build, name):
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    handles = []

    def applied():
        handles.append(apply(model, name, optimizer, batch=tokens(), train_length=64))

    assert counted(model, applied) <= SEARCH + MORE
    handles[0].remove()


@pytest.mark.parametrize(
    "name", ["qk_norm", "softcap", "output_gate", "qk_clip", "sigma_reparam"]
)
def test_a_remedy_that_was_applied_keeps_no_tensor_of_the_pass_that_showed_the_attention(
    name,
):
    model = llama()
    with apply(
        model,
        name,
        torch.optim.AdamW(model.parameters()),
        batch=tokens(),
        train_length=64,
    ):
        gc.collect()
        assert not [x for x in gc.get_objects() if isinstance(x, ModelTrace)]
