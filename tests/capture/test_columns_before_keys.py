"""Columns that are no keys, as sinks, may stand before the keys as well as after them."""

import pytest
import torch
from tests.attention import from_heads, to_heads
from torch import nn
from torch.testing import assert_close

import qkeel


class Sinks(nn.Module):
    """Written-out attention with a learned column of scores at one end."""

    def __init__(self, first):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.sink, self.first = nn.Parameter(torch.randn(2, 1, 1)), first

    def logits(self, x):
        q, k = (to_heads(f(x), 2, 4) for f in (self.q, self.k))
        return q @ k.mT / 2

    def forward(self, x):
        z = self.logits(x)
        columns = [z, self.sink.expand(len(x), 2, x.shape[1], 1)]
        weights = torch.cat(columns[::-1] if self.first else columns, -1).softmax(-1)
        weights = weights[..., 1:] if self.first else weights[..., :-1]
        v = to_heads(self.v(x), 2, 4)
        return from_heads(weights @ v)


@pytest.mark.parametrize("first", [True, False])
def test_the_logits_are_those_of_the_keys(first):
    torch.manual_seed(0)
    model, x = Sinks(first).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    with qkeel.watch(model) as monitor:
        for _ in range(3):
            model(x).sum().backward()
            (stats,) = monitor.read().values()
            z = model.logits(x).detach()
            assert_close(stats.max_logit, z.amax((0, 2, 3)))
            assert_close(stats.min_logit, z.amin((0, 2, 3)))
            assert stats.n_queries.tolist() == [15, 15]
