"""What a function mode cannot see breaks nothing: scripts and vmap; attention called by its operator is seen."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.attention import Joint
from torch import Tensor, nn
from torch.testing import assert_close

from qkeel import find_sites
from qkeel.capture.calls import statistics
from qkeel.capture.intercept import CaptureMode

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:There is a performance drop because we have not yet implemented"
    ),
]

B, H, T, D = 2, 4, 6, 8
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(q, k, v):
    hidden = torch.ones(q.size(-2), k.size(-2)).tril() == 0
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    return torch.matmul(
        torch.softmax(scores.masked_fill(hidden, -float("inf")), dim=-1), v
    )


# torch.jit.script takes an argument without a type for a tensor.
def masked_softmax(scores: Tensor, scale: float):
    hidden = torch.ones(scores.size(-2), scores.size(-1)).tril() == 0
    return torch.softmax((scores * scale).masked_fill(hidden, -float("inf")), dim=-1)


def softmax_in_a_script():
    softmax = torch.jit.script(masked_softmax)
    return lambda q, k, v: softmax(q @ k.mT, D**-0.5) @ v


def heads_one_by_one(q, k, v):
    return torch.func.vmap(attention, in_dims=1, out_dims=1)(q, k, v)


# How to make it, and whether a function mode does not see it.
WAYS = {
    "script": (lambda: torch.jit.script(attention), True),
    "script of the softmax alone": (softmax_in_a_script, True),
    "vmap over heads": (lambda: heads_one_by_one, True),
    "overload": (
        lambda: (
            lambda q, k, v: torch.ops.aten.scaled_dot_product_attention.default(
                q, k, v, None, 0.0, True
            )
        ),
        False,
    ),
    "plain": (lambda: attention, False),
}
every_way = pytest.mark.parametrize("name", WAYS)


def seen(model, x):
    found = []
    with (
        torch.no_grad(),
        CaptureMode(model, lambda captured: found.append(statistics(captured.call))),
    ):
        out = model(x)
    return out, found


@every_way
def test_the_output_is_the_same_and_statistics_are_the_plain_ones_or_none(
    name,
):
    make, is_hidden = WAYS[name]
    model = Joint(make(), H * D, H)
    x = torch.randn(B, T, H * D)
    with torch.no_grad():
        expected = model(x)
    out, found = seen(model, x)
    assert torch.equal(out, expected)
    assert len(found) == (0 if is_hidden else 1)
    model.attend = attention
    _, (plain,) = seen(model, x)
    for stats in found:
        assert_close(stats.max_logit, plain.max_logit, rtol=1e-5, atol=1e-5)
        assert_close(stats.entropy, plain.entropy, rtol=1e-5, atol=1e-5)
        assert torch.equal(stats.n_pairs, plain.n_pairs)


def test_a_product_with_a_view_of_a_weight_makes_no_scores():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(H, D, D))

        def forward(self, x):
            q = torch.bmm(
                x, self.w.mT
            )  # tagged, q @ k would be no product of two activations
            return torch.softmax(q @ x.mT, dim=-1) @ x

    (site,) = find_sites(Experts(), torch.randn(H, T, D))
    assert site.head_dim == D
