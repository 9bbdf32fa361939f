"""Names and options of remedies on small models: applied, run, taken away again, or refused."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.hostile import numbers, texts
from tests.fuzz.hunt import Hunt

import qkeel
from qkeel.nn import MLA, Attention, Decoder, DecoderConfig
from qkeel.remedies.apply import REMEDIES

_OPTIONS = [
    "tau",
    "cap",
    "threshold",
    "over",
    "gain",
    "factor",
    "eps",
    "alpha",
    "ratio",
    "rate",
    "p",
    "decay",
    "weight",
]


def inputs() -> SearchStrategy[tuple[str, str, bool, dict[str, Any], int | None]]:
    """A model, a remedy, whether there is an optimizer, options, the training length."""
    name = st.one_of(
        st.sampled_from(sorted(REMEDIES)),
        st.lists(st.sampled_from(sorted(REMEDIES)), min_size=2, max_size=2).map("+".join),
    )
    value = st.one_of(numbers(), texts(), st.booleans(), st.sampled_from(["head", "layer", "dim", "scalar", "none"]))
    options = st.dictionaries(st.sampled_from(_OPTIONS), value, max_size=2)
    length = st.one_of(st.none(), st.integers(-1, 64))
    return st.tuples(st.sampled_from(["attention", "mla", "decoder", "linear"]), name, st.booleans(), options, length)


def _model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "attention":
        return Attention(16, 4, 2)
    if kind == "mla":
        return MLA(16, 2)
    return (
        Decoder(DecoderConfig(vocab_size=11, d_model=16, n_heads=2, n_layers=1))
        if kind == "decoder"
        else torch.nn.Linear(4, 4)
    )


def check(case: tuple[str, str, bool, dict[str, Any], int | None]) -> None:
    """Trains one step under the remedy; afterwards the model is bit for bit what it would be without."""
    kind, name, stepped, options, length = case
    model = _model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if stepped else None
    x = torch.zeros(1, 5, dtype=torch.long) if kind == "decoder" else torch.linspace(-1, 1, 80).view(1, 5, 16)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    handle = qkeel.apply(name, model, optimizer, train_length=length, **options)
    try:
        if kind != "linear":
            model(x).square().mean().backward()
        if optimizer is None:
            model.zero_grad()
    finally:
        handle.remove()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)


HUNT = Hunt(inputs=inputs, check=check)
