"""Every kernel that computes a call, timed on it: a grid of calls, one of each kind that kernels differ on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Literal, final

import torch
from torch import Tensor

from qkeel.bench.measure import Row, gpu_ms, interleave, processor_ms
from qkeel.kernels.choose import KERNELS
from qkeel.ops import attention
from qkeel.registry import lookup
from qkeel.spec import AttentionSpec, ReRope, Rope, Softcap
from qkeel.spec.call import make_call

# What lies between q·k and the weights. "folded": nothing but the scale and causality; "masked": a mask; "capped": a
# cap; "distance": a position that does not fold into q and k.
Form = Literal["folded", "masked", "capped", "distance"]
Statistics = Literal["none", "exact"]
HEAD_DIMS = (64, 128)
TOKENS = (1, 128, 512, 2048)  # query tokens
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
    """The amount of work that is measured."""

    dtypes: tuple[str, ...] = tuple(DTYPES)
    head_dims: tuple[int, ...] = HEAD_DIMS
    forms: tuple[Form, ...] = tuple(SPECS)
    statistics: tuple[Statistics, ...] = ("none", "exact")
    heads: int = 8
    rounds: int = 7
    shrink: int = 1  # tokens are divided by it, which only shows that everything runs


SIZES = {
    "full": Size(),
    "quick": Size(dtypes=("float32",), head_dims=(64,), forms=("folded", "masked"), rounds=5),
    "toy": Size(dtypes=("float32",), head_dims=(64,), heads=1, rounds=1, shrink=64),
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One call of the grid."""

    device: str
    dtype: str
    head_dim: int
    form: Form
    gradient: bool
    statistics: Statistics
    tokens: int


def grid(size: Size, device: str) -> Iterator[Cell]:
    """Yields every call to measure. One query token is decoding, which has no gradient."""
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
                    tokens=max(1, tokens // size.shrink),
                )


def measure(cell: Cell, size: Size) -> list[Row]:
    """Returns the times of all kernels that support the call, relative to the first; [] if only one does."""
    tensors = _tensors(cell, size)
    mask = None
    if cell.form == "masked":
        mask = torch.ones(tensors[0].shape[0], tensors[1].shape[2], dtype=torch.bool, device=cell.device)
        mask[:, 0] = False  # a padded batch
    call = make_call(SPECS[cell.form], *tensors, mask=mask)
    names = [name for name, kernel in KERNELS.items() if kernel.supports(call) is None]
    if len(names) < 2:
        return []
    cases = {name: _case(cell, tensors, mask, name) for name in names}
    clock = processor_ms if cell.device == "cpu" else gpu_ms
    calls = max(1, 16 // cell.tokens) if size.shrink == 1 else 1
    return interleave(cases, names[0], size.rounds, calls, warmup=1, clock=clock)


def fastest_first(rows: list[Row]) -> tuple[str, ...]:
    """Returns the names of the kernels by their median ratio."""
    return tuple(row.name for row in sorted(rows, key=lambda row: row.ratio))


def _tensors(cell: Cell, size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v as projections lay them out: the heads of a token next to each other in memory."""
    tokens = cell.tokens
    keys = CACHED // size.shrink if tokens == 1 else tokens
    batch = 1 if tokens == 1 else max(1, AT_ONCE // size.shrink // tokens)
    dtype = lookup("dtype", DTYPES, cell.dtype)
    rng = torch.Generator().manual_seed(0)

    def one(t: int) -> Tensor:
        x = torch.randn(batch, t, size.heads, cell.head_dim, generator=rng).to(cell.device, dtype)
        return x.transpose(1, 2).requires_grad_(cell.gradient)

    return one(tokens), one(keys), one(keys)


def _case(cell: Cell, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, name: str) -> Callable[[], object]:
    """Returns the whole call as a user makes it, with its backward pass if the cell has a gradient."""
    spec, above = SPECS[cell.form], torch.randn_like(tensors[0])

    def forward() -> Tensor:
        if cell.statistics == "exact":
            return attention(*tensors, spec=spec, mask=mask, impl=name, stats=True)[0]
        return attention(*tensors, spec=spec, mask=mask, impl=name)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), tensors, above)

    return both if cell.gradient else forward
