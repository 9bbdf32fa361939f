"""Updates of the heads of many weights, in Triton: copied with their norms, interpolated and scaled by a launch each.

A table on the device says where every weight lies and how; a map says which numbers of which head each program takes.
Both are made once, so a CUDA graph can hold the launches. Not measured on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import triton  # pyright: ignore[reportMissingImports]  # not on every system
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

_BLOCK = 4096  # numbers a program takes: 16 for each of 256 threads, four loads of 16 bytes in float32
_BLOCK_APART = 1024  # where every number has an address of its own, which takes registers
_WARPS = 8
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_FIELDS = tl.constexpr(8)  # of a weight in the table: where it lies, steps by head, outer and inner, inner numbers,
# numbers of a head, its first head among all, its first number in a copy of all


@triton.jit
def _place(weights, plan, TYPE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """The head that this program works for, where its numbers lie, where in a copy of all heads, and which exist."""
    own = plan + tl.program_id(0).to(tl.int64) * 3
    row = weights + tl.load(own).to(tl.int64) * _FIELDS
    head, e = tl.load(own + 1), tl.load(own + 2) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(row + 5)
    if EVEN:
        size = tl.multiple_of(size, 16)
    kind = tl.pointer_type(TYPE)  # pyright: ignore[reportArgumentType]  # a dtype where it is compiled
    x = tl.load(row).to(kind) + head * tl.load(row + 1)
    if EVEN:  # dense and aligned heads: 16 bytes at a time
        x = tl.multiple_of(x, 16) + e
    else:
        inner = tl.load(row + 4).to(tl.int32)  # division in 64 bits takes many times as long
        x = x + (e // inner) * tl.load(row + 2) + (e % inner) * tl.load(row + 3)
    old = tl.load(row + 7) + head * size
    if EVEN:
        old = tl.multiple_of(old, 16)
    return tl.load(row + 6) + head, x, old + e, e < size


@triton.jit
def _copy(
    weights, plan, old, sums, TYPE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, SUMS: tl.constexpr
):  # fmt: skip
    _, x, at, ok = _place(weights, plan, TYPE, BLOCK, EVEN)
    w = tl.load(x, mask=ok, other=0.0)
    tl.store(old + at, w, mask=ok)
    if SUMS:
        wide = w.to(tl.float32)
        tl.store(sums + tl.program_id(0), tl.sum(wide * wide, 0))


@triton.jit
def _norms(sums, starts, norms, BLOCK: tl.constexpr):
    """The root of the sum of each head's sums, in an order that only the shapes decide."""
    head = tl.program_id(0)
    at, stop = tl.load(starts + head), tl.load(starts + head + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(at, stop, BLOCK):
        i = first + tl.arange(0, BLOCK)
        total += tl.load(sums + i, mask=i < stop, other=0.0)
    tl.store(norms + head, tl.sqrt_rn(tl.sum(total, 0)))


@triton.jit
def _move(
    weights, plan, old, factors, keeps,
    TYPE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    head, x, at, ok = _place(weights, plan, TYPE, BLOCK, EVEN)
    f = tl.load(factors + head)
    if f != 1.0:
        w = tl.load(x, mask=ok, other=0.0).to(tl.float32)
        was = tl.load(old + at, mask=ok, other=0.0).to(tl.float32)
        if KEEPS:
            was = was * tl.load(keeps + head)
        w = tl.where(f < 0.5, was + f * (w - was), w - (w - was) * (1.0 - f))  # as torch.lerp
        tl.store(x, w.to(TYPE), mask=ok)


@triton.jit
def _scale(weights, plan, factors, TYPE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    head, x, _, ok = _place(weights, plan, TYPE, BLOCK, EVEN)
    f = tl.load(factors + head)
    if f != 1.0:
        w = tl.load(x, mask=ok, other=0.0).to(tl.float32)
        tl.store(x, (w * f).to(TYPE), mask=ok)


@final
class HeadTable:
    """The views [n r m] of weights of one device and dtype, and what the kernels need to know of them. Factors and
    norms are rows [all n], float32, view after view. The table holds while the weights' storage does.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        like = views[0]
        self._dtype, self._device = like.dtype, like.device
        even = all(_even(view) for view in views)
        block = _BLOCK if even else _BLOCK_APART
        fields, plans, heads, numbers = [], [], 0, 0
        for i, view in enumerate(views):
            n, size = len(view), view[0].numel()
            fields.append([view.data_ptr(), *_steps(view), size, heads, numbers])
            each = torch.arange(triton.cdiv(size, block))
            plans.append(torch.cartesian_prod(torch.tensor([i]), torch.arange(n), each))
            heads, numbers = heads + n, numbers + n * size
        plan = torch.cat(plans)
        starts = torch.cat([(plan[:, 2] == 0).nonzero().flatten(), torch.tensor([len(plan)])])
        self._heads, self._numbers, self._programs = heads, numbers, len(plan)
        self._fields = torch.tensor(fields, device=like.device)
        self._plan, self._starts = (x.to(like.device, torch.int32) for x in (plan, starts))
        self._how = {"TYPE": _TYPES[like.dtype], "BLOCK": block, "EVEN": even, "num_warps": _WARPS}

    def copy(self) -> Tensor:
        """Returns all numbers of all heads, in an order of its own."""
        return self._copy(None)

    def copy_and_norms(self) -> tuple[Tensor, Tensor]:
        """Returns the same, and ‖W^h‖_F [all n]: two launches, the weights read once."""
        sums = torch.empty(self._programs, dtype=torch.float32, device=self._device)
        norms = torch.empty(self._heads, dtype=torch.float32, device=self._device)
        old = self._copy(sums)
        kernel: Any = _norms
        with torch.cuda.device_of(old):
            kernel[(self._heads,)](sums, self._starts, norms, BLOCK=256, num_warps=1)
        return old, norms

    def _copy(self, sums: Tensor | None) -> Tensor:
        old = torch.empty(self._numbers, dtype=self._dtype, device=self._device)
        self._run(_copy, [old, old if sums is None else sums], {"SUMS": sums is not None})
        return old

    def move(self, old: Tensor, factors: Tensor, keeps: Tensor | None) -> None:
        """Does w ← old + f · (w - old), `old` a copy times `keeps` if given; heads at factor 1 are not touched."""
        self._run(_move, [old, factors, factors if keeps is None else keeps], {"KEEPS": keeps is not None})

    def scale(self, factors: Tensor) -> None:
        """Does w ← f · w; heads at factor 1 are not touched."""
        self._run(_scale, [factors], {})

    def _run(self, kernel: Any, tensors: Sequence[Tensor], flags: dict[str, bool]) -> None:
        with torch.cuda.device_of(self._fields):
            kernel[(self._programs,)](self._fields, self._plan, *tensors, **self._how, **flags)


def _steps(view: Tensor) -> tuple[int, int, int, int]:
    """Steps from head to head, outer and inner, and inner numbers; those of a dense head are all inner."""
    (r, m), (by_head, by_row, by_column) = view.shape[1:], view.stride()
    outer, inner, n = (by_row, by_column, m) if by_row >= by_column else (by_column, by_row, r)
    other = r * m // n
    if other == 1 or outer == n * inner:
        return by_head, 0, inner, r * m
    return by_head, outer, inner, n


def _even(view: Tensor) -> bool:
    """Returns whether every head is dense and begins at a multiple of 16 bytes, and has a multiple of 16 numbers."""
    _, _, inner, n = _steps(view)
    places = (view.data_ptr(), view.stride(0) * view.element_size())
    return inner == 1 and n == view[0].numel() and n % 16 == 0 and all(p % 16 == 0 for p in places)
