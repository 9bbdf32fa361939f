"""What every compiled operator keeps to: shapes, threads, memory, torch's own checks of operators."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, rand, randn
from torch.utils._pytree import tree_leaves, tree_map

from qkeel.kernels.native import build, operators

OPS = torch.ops.qkeel_native
Arguments = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator and calls of it.

    `make(n)` returns the arguments of several calls with n tokens, rows or the like. `tracked`: places of tensors that get
    a gradient. `slow`: torch's checks and those of memory take seconds.
    """

    make: Callable[[int], list[Arguments]]
    tracked: tuple[int, ...] = ()
    slow: bool = True


def qkv(n):
    """Queries of 4 heads, keys and values of 2."""
    return randn(2, 4, n, 16), randn(2, 2, n, 16), randn(2, 2, n, 16)


def attention(n):
    pairs, bias = rand(2, 4, n, n) < 0.7, randn(1, 4, 1, n)
    half = [x.bfloat16() for x in qkv(n)]
    return [
        (*qkv(n), None, None, 0.25, True, 0, 0.0, True),
        (*qkv(n), pairs, rand(4), 0.25, False, 3, 5.0, True),
        (*half, bias, None, 0.25, True, 0, 0.0, True),
    ]


def backward(n):
    def call(q, k, v, *rest):
        out, lse, *_ = OPS.attention(q, k, v, *rest)
        return torch.randn_like(out), q, k, v, out, lse, *rest[:-1]

    return [call(*given) for given in attention(n)]


def decode(n):
    """The last tokens of a sequence; the second call is one of latents with a factor per head and key."""
    _, k, v = qkv(s := 10 * n)
    held = randn(2, 1, s, 24)
    return [
        (randn(2, 4, 2, 16), k, v, rand(2, 1, 1, s) < 0.9, None, 0.3, 0.0, True, 4),
        (
            randn(2, 24, 2, 24),
            held,
            held[..., :16],
            None,
            rand(2, 24, s),
            0.3,
            2.0,
            True,
            0,
        ),
    ]


def rows(n):
    q, k, _ = qkv(n)
    ends = torch.zeros(1, n, dtype=torch.int64), torch.arange(1, n + 1)[None]
    scale = torch.tensor(0.3).expand(2, 4, n)
    masks = (None, rand(2, 1, n, n) < 0.8, randn(1, 4, 1, n), randn(2, 1, n, n).half())
    return [
        (q, k, scale, *ends, masks[0]),
        *((q, k, scale, None, None, mask) for mask in masks[1:]),
    ]


def norm_rope(n):
    x, gain, table = (
        randn(2, 4, n, 16),
        rand(16) + 0.5,
        (rand(1, 1, n, 8), rand(1, 1, n, 8)),
    )
    return [
        (x, gain, *table, 1, 1e-6, False),
        (
            x.transpose(1, 2).contiguous().transpose(1, 2),
            rand(4, 16) + 0.5,
            *table,
            3,
            1e-6,
            True,
        ),
        (x, None, *table, 0, 0.0, False),
    ]


def norm_rope_backward(n):
    found = []
    for x, gain, cos, sin, kind, eps, keep in norm_rope(n)[:2]:
        y, inverse = OPS.norm_rope(x, gain, cos, sin, kind, eps, keep)
        found.append(
            (
                torch.randn_like(y),
                x if keep else y,
                inverse,
                gain,
                cos,
                sin,
                kind,
                eps,
                keep,
            )
        )
    return found


OPERATORS = {
    "attention": Operator(make=attention, tracked=(0, 1, 2), slow=False),
    "attention_backward": Operator(make=backward, tracked=(1, 2, 3)),
    "decode": Operator(make=decode, slow=False),
    "logit_rows": Operator(make=lambda n: [(*given, 5.0, 1.0) for given in rows(n)]),
    "logit_extremes": Operator(make=lambda n: [(*given, 5.0) for given in rows(n)]),
    "norm_rope": Operator(make=norm_rope, tracked=(0, 1)),
    "norm_rope_two": Operator(
        make=lambda n: [
            (x, x[:, :2] + 1, gain, None, *table, 1, 0, 1e-6)
            for x, gain, *table, _, _, _ in norm_rope(n)[:1]
        ]
    ),
    "norm_rope_backward": Operator(make=norm_rope_backward),
    "gain_spread": Operator(make=lambda n: [(rand(n) + 0.5,)]),
}
# By the place of an argument: changes that are a call too, or may be. Fewer queries, heads that share keys otherwise,
# ends beyond the keys, a mask that broadcasts or is left out, a gain of another dtype or of all heads.


quick_first = [
    name if not row.slow else pytest.param(name, marks=pytest.mark.slow)
    for name, row in OPERATORS.items()
]


@pytest.fixture(autouse=True)
def _loaded(library):
    assert operators.ready()


def copied(given):
    """The same numbers in other memory, each tensor as it lies."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, given)


def run(name, given):
    """All tensors that an operator returns."""
    return [
        x
        for x in tree_leaves(getattr(OPS, name)(*copied(given)))
        if isinstance(x, Tensor)
    ]


def test_every_operator_has_a_row():
    defined = {
        n
        for path in build.FOLDER.rglob("*.cpp")
        for n in re.findall(r'm\.def\("(\w+)\(', path.read_text())
    }
    assert defined == set(OPERATORS) == {*operators.SHAPES, "gain_spread"}


@pytest.mark.parametrize("name", OPERATORS)
def test_threads_change_no_bit(name):
    # Of as many numbers as pairs of tokens.
    squares = name.startswith(("attention", "logit_"))
    for given in OPERATORS[name].make(300 if squares else 4000):
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            one = run(name, given)
            for threads in (2, 8):
                torch.set_num_threads(threads)
                assert all(map(torch.equal, one, run(name, given))), (
                    f"{threads} threads"
                )
        finally:
            torch.set_num_threads(before)


def overwrite(tensors):
    for x in tensors:
        x.fill_(torch.nan if x.is_floating_point() else -1)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_number_is_written(name):
    for n in (1, 33, 61):
        for given in OPERATORS[name].make(n):
            overwrite(run(name, given))  # the next results lie where these lay
            for x in run(name, given):
                assert not (x.isnan() if x.is_floating_point() else x == -1).any(), n


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
@pytest.mark.parametrize("name", quick_first)
def test_torch_accepts_the_operator(name):
    row, operator = OPERATORS[name], getattr(OPS, name).default
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    for i, given in enumerate(row.make(5)[:2]):
        own = copied(given)
        for place in row.tracked if i == 0 else ():
            own[place].requires_grad_()
        # A number of the host has no shape to tell, and a second derivative is an error.
        some = (
            2
            if name == "gain_spread"
            else 3
            if name.endswith("_backward") and row.tracked
            else 4
        )
        torch.library.opcheck(operator, own, test_utils=tests[:some])
