"""Batches without sequences or tokens are skipped and counted; of one token a sequence, attention has no choice."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from tests.attention import Attention, written
from tests.contract.watch.small import batch, small
from tests.quick import quick
from torch import nn

import qkeel


class TorchAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


MODELS: dict[str, Any] = {
    "sdpa": small,
    "torch's": TorchAttention,
    "written": lambda: Attention(written),
    "own": lambda: nn.Sequential(qkeel.nn.Attention(8, 2)),
}
EMPTY = {"no sequences": (0, 5), "no tokens": (2, 0)}


def trained(make, shapes, watch, **how):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = qkeel.watch(model, optimizer, **how) if watch else None
        for i, (b, t) in enumerate(shapes):
            model(batch(i, b, t)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, monitor, [str(w.message) for w in caught]


# In the middle of training and, of no sequences, before anything is seen; at the end where all is known one will do.
@pytest.mark.parametrize(
    ("name", "empty", "where"),
    quick(
        itertools.product(MODELS, EMPTY, (2, 0, 4)),
        lambda case: (
            case[2] == 2
            or case[1:] == ("no sequences", 0)
            or case == ("sdpa", "no tokens", 4)
        ),
    ),
)
def test_an_empty_batch_is_counted_and_the_steps_around_it_are_measured(
    name, empty, where
):
    make, shape = MODELS[name], EMPTY[empty]
    shapes = [(2, 4)] * 5
    shapes[where] = shape
    model, monitor, said = trained(make, shapes, True)
    plain, *_ = trained(make, shapes, False)
    assert said == []
    assert monitor.active
    assert monitor.empty_passes == 1
    assert monitor.history.steps.tolist() == [i for i in range(5) if i != where]
    monitor.remove()
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
