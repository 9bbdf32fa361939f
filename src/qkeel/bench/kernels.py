"""Every kernel that takes a call, timed on it; the fastest first makes the table that "auto" reads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor

from qkeel.bench.measure import Row, gpu_ms, interleave, processor_ms
from qkeel.kernels.choice.question import HEAD_DIMS, TOKENS, Form, Statistics
from qkeel.kernels.choice.stored import Orders
from qkeel.ops import KERNELS, attention
from qkeel.registry import lookup
from qkeel.spec import AttentionSpec, ReRope, Rope, Softcap
from qkeel.spec.call import make_call

SPECS: dict[Form, AttentionSpec] = {
    "folded": AttentionSpec(position=Rope()),
    "masked": AttentionSpec(position=Rope()),
    "capped": AttentionSpec(position=Rope(), cap=Softcap(50.0)),
    "distance": AttentionSpec(position=ReRope(window=256)),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CACHED = 1024  # keys that one query sees in decoding
AT_ONCE = 1024  # tokens of a batch of short sequences


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    dtypes: tuple[str, ...] = tuple(DTYPES)
    head_dims: tuple[int, ...] = HEAD_DIMS
    forms: tuple[Form, ...] = tuple(SPECS)
    statistics: tuple[Statistics, ...] = ("none", "exact")
    heads: int = 8
    rounds: int = 7
    shrink: int = 1  # tokens are divided by it: numbers without meaning, to see that it runs


SIZES = {
    "full": Size(),
    "quick": Size(dtypes=("float32",), head_dims=(64,), forms=("folded", "masked"), rounds=5),
    "toy": Size(dtypes=("float32",), head_dims=(64,), heads=1, rounds=1, shrink=64),
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A call of the grid; the fields of choice.Question, and the number of query tokens."""

    device: str
    dtype: str
    head_dim: int
    form: Form
    gradient: bool
    statistics: Statistics
    tokens: int

    def add(self, orders: Orders, kernels: tuple[str, ...]) -> None:
        """Note an order of kernels, the fastest first."""
        asked = (self.device, DTYPES[self.dtype], self.head_dim, self.form, self.gradient, self.statistics)
        orders.setdefault(asked, {})[self.tokens] = kernels


def grid(size: Size, device: str) -> Iterator[Cell]:
    """Every call to measure. One query token is decoding: no gradient."""
    for dtype, head_dim, form, statistics in itertools.product(
        size.dtypes, size.head_dims, size.forms, size.statistics
    ):
        for gradient, tokens in itertools.product((False, True), TOKENS):
            if not (gradient and tokens == 1):
                yield Cell(
                    device=device,
                    dtype=dtype,
                    head_dim=head_dim,
                    form=form,
                    gradient=gradient,
                    statistics=statistics,
                    tokens=tokens,
                )


def measure(cell: Cell, size: Size) -> list[Row]:
    """Rows of all kernels that take the call, the first of the table KERNELS as base; [] if only one does."""
    tensors = _tensors(cell, size)
    mask = None
    if cell.form == "masked":
        mask = torch.ones(tensors[0].shape[0], tensors[1].shape[2], dtype=torch.bool, device=cell.device)
        mask[:, 0] = False  # as a padded batch has it
    call = make_call(SPECS[cell.form], *tensors, mask=mask)
    names = [name for name, kernel in KERNELS.items() if kernel.supports(call) is None]
    if len(names) < 2:
        return []
    cases = {name: _case(cell, tensors, mask, name) for name in names}
    clock = processor_ms if cell.device == "cpu" else gpu_ms
    calls = max(1, 16 // cell.tokens) if size.shrink == 1 else 1
    return interleave(cases, names[0], size.rounds, calls, warmup=1, clock=clock)


def fastest_first(rows: list[Row]) -> tuple[str, ...]:
    """Names by the median ratio."""
    return tuple(row.name for row in sorted(rows, key=lambda row: row.ratio))


def _tensors(cell: Cell, size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as projections make them: heads beside each other in memory."""
    tokens = max(1, cell.tokens // size.shrink)
    keys = CACHED // size.shrink if cell.tokens == 1 else tokens
    batch = 1 if cell.tokens == 1 else max(1, AT_ONCE // size.shrink // tokens)
    dtype = lookup("dtype", DTYPES, cell.dtype)
    rng = torch.Generator().manual_seed(0)

    def one(t: int) -> Tensor:
        x = torch.randn(batch, t, size.heads, cell.head_dim, generator=rng).to(cell.device, dtype)
        return x.transpose(1, 2).requires_grad_(cell.gradient)

    return one(tokens), one(keys), one(keys)


def _case(cell: Cell, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, name: str) -> Callable[[], Any]:
    """The whole call as a user makes it, with its backward pass if asked."""
    spec, above = SPECS[cell.form], torch.randn_like(tensors[0])

    def forward() -> Tensor:
        if cell.statistics == "exact":
            return attention(*tensors, spec=spec, mask=mask, impl=name, stats=True)[0]
        return attention(*tensors, spec=spec, mask=mask, impl=name)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), tensors, above)

    return both if cell.gradient else forward
