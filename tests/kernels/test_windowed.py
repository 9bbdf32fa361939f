"""ReRoPE in three triangles is ReRoPE in one matrix: outputs and gradients, at every length around the window."""

import re

import pytest
import torch

from qkeel import attention
from qkeel.errors import RefusedError
from qkeel.ops import KERNELS, choose
from qkeel.spec import (
    AttentionSpec,
    LeakyReRope,
    LogN,
    ReRope,
    RMSNorm,
    Rope,
    Sink,
    Softcap,
)
from qkeel.spec.call import make_call


@pytest.mark.parametrize(
    ("window", "t"), [(1, 6), (2, 3), (3, 7), (3, 9), (4, 17), (8, 9), (5, 5), (16, 50)]
)
@pytest.mark.parametrize("leak", [None, 3.0, 1 / 16])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_outputs_and_gradients_are_those_of_the_whole_matrix(window, t, leak, groups):
    position = (
        ReRope(window=window)
        if leak is None
        else LeakyReRope(window=window, factor=leak)
    )
    spec = AttentionSpec(norm=RMSNorm(), position=position, scale=LogN(train_length=4))
    q, k, v = (
        torch.randn(2, h, t, 8, dtype=torch.float64, requires_grad=True)
        for h in (4, groups, groups)
    )
    found, whole = (
        attention(q, k, v, spec=spec, impl=impl) for impl in ("windowed", "chunked")
    )
    assert torch.allclose(found, whole, rtol=0, atol=1e-13)
    for ours, theirs in zip(
        *(torch.autograd.grad(x.cos().sum(), (q, k, v)) for x in (found, whole))
    ):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


class Mine(ReRope):
    """A subclass, of which nothing is known but that it is a position."""

    __slots__ = ()

    def formula(self):
        return "a position of its own"


def test_it_is_chosen_where_it_can_and_says_why_where_it_cannot():
    q = torch.randn(1, 2, 12, 8)
    spec, mine = (
        AttentionSpec(position=ReRope(window=4)),
        AttentionSpec(position=Mine(window=4)),
    )
    assert choose(make_call(spec, q, q, q), "auto") is KERNELS["windowed"]
    assert choose(make_call(spec, q, q, q, dropout=0.1), "auto") is KERNELS["chunked"]
    assert choose(make_call(spec, q[:, :, :1], q, q), "auto") is KERNELS["chunked"]
    capped = AttentionSpec(position=ReRope(window=4), cap=Softcap(5.0))
    sink = AttentionSpec(position=ReRope(window=4), normalizer=Sink(learned=False))
    for other, options in (
        (AttentionSpec(position=Rope()), {}),
        (mine, {}),
        (capped, {}),
        (sink, {}),
        (spec, {"causal": False}),
        (spec, {"mask": torch.ones(12, 12, dtype=torch.bool)}),
        (spec, {"dropout": 0.5}),
    ):
        words = f"not for {other.position.formula()}"
        with pytest.raises(RefusedError, match=re.escape(words)):
            attention(q, q, q, spec=other, impl="windowed", **options)
