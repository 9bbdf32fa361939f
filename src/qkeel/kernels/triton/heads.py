"""Measures, copies, interpolates and scales the heads of many weights in place, with one Triton launch each.

A table on the device describes the layout of every weight; a map assigns the elements of heads to programs. Both are
built once, so a CUDA graph can contain the launches. They have not been timed on a GPU yet.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, final

import torch
import triton  # pyright: ignore[reportMissingImports]  # not on every system
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd.graph import increment_version

_BLOCK = 4096  # numbers per program: 16 for each of 256 threads, four 16-byte loads in float32
_BLOCK_APART = 1024  # if every number needs its own address, which takes registers
_WARPS = 8
_DEPTH = 32  # columns per step of a product
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_FIELDS = tl.constexpr(
    11
)  # of a weight's row: address; head, outer and inner strides; inner numbers; numbers of a head;
# index of its first head; offset in a copy of all heads; row and column strides; columns
# Layout of a table's weights: dense, aligned rows, or such columns; else 0.
_ROWS = tl.constexpr(1)
_COLUMNS = tl.constexpr(2)


@triton.jit
def _place(weights, plan, TYPE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Returns this program's head, the offsets of its numbers, their offsets in a copy, and which of them exist."""
    own = plan + tl.program_id(0).to(tl.int64) * 3
    row = weights + tl.load(own).to(tl.int64) * _FIELDS
    head, e = tl.load(own + 1), tl.load(own + 2) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(row + 5)
    if EVEN:
        size = tl.multiple_of(size, 16)
    kind = tl.pointer_type(TYPE)  # pyright: ignore[reportArgumentType]  # TYPE is a dtype when compiled
    x = tl.load(row).to(kind) + head * tl.load(row + 1)
    if EVEN:  # dense and aligned heads: 16-byte loads
        x = tl.multiple_of(x, 16) + e
    else:
        inner = tl.load(row + 4).to(tl.int32)  # 64-bit division takes many times as long
        x = x + (e // inner) * tl.load(row + 2) + (e % inner) * tl.load(row + 3)
    old = tl.load(row + 7) + head * size
    if EVEN:
        old = tl.multiple_of(old, 16)
    return tl.load(row + 6) + head, x, old + e, e < size


@triton.jit
def _copy(
    weights, plan, old, sums,
    TYPE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, COPY: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    _, x, at, ok = _place(weights, plan, TYPE, BLOCK, EVEN)
    w = tl.load(x, mask=ok, other=0.0)
    if COPY:
        tl.store(old + at, w, mask=ok)
    if SUMS:
        wide = w.to(tl.float32)
        tl.store(sums + tl.program_id(0), tl.sum(wide * wide, 0))


@triton.jit
def _norms(sums, starts, norms, BLOCK: tl.constexpr):
    """Computes the root of each head's sum, in an order that only shapes determine."""
    head = tl.program_id(0)
    at, stop = tl.load(starts + head), tl.load(starts + head + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(at, stop, BLOCK):
        i = first + tl.arange(0, BLOCK)
        total += tl.load(sums + i, mask=i < stop, other=0.0)
    tl.store(norms + head, tl.sqrt_rn(tl.sum(total, 0)))


@triton.jit
def _grams(
    weights, plan, starts, grams, first,
    TYPE: tl.constexpr, LIE: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Computes W Wᵀ for one head: a tile on or below the diagonal, and its mirror image."""
    i, j = tl.program_id(1) * TILE + tl.arange(0, TILE), tl.program_id(2) * TILE + tl.arange(0, TILE)
    if tl.program_id(2) <= tl.program_id(1):
        own = plan + tl.load(starts + first + tl.program_id(0)).to(tl.int64) * 3
        row = weights + tl.load(own).to(tl.int64) * _FIELDS
        kind = tl.pointer_type(TYPE)  # pyright: ignore[reportArgumentType]  # TYPE is a dtype when compiled
        x = tl.load(row).to(kind) + tl.load(own + 1) * tl.load(row + 1)
        by_row, by_column, columns = tl.load(row + 8), tl.load(row + 9), tl.load(row + 10).to(tl.int32)
        if LIE == _ROWS:
            by_row, by_column, columns = tl.multiple_of(by_row, 16), 1, tl.multiple_of(columns, 16)
            x = tl.multiple_of(x, 16)
        if LIE == _COLUMNS:
            x, by_row, by_column = tl.multiple_of(x, 16), 1, tl.multiple_of(by_column, 16)
        product = tl.zeros([TILE, TILE], tl.float32)
        for c in range(0, columns, DEPTH):
            m = (c + tl.arange(0, DEPTH))[None, :]
            at, inside = x + m * by_column, m < columns
            a = tl.load(at + i[:, None] * by_row, mask=(i < R)[:, None] & inside, other=0.0)
            b = tl.load(at + j[:, None] * by_row, mask=(j < R)[:, None] & inside, other=0.0)
            product = tl.dot(a, tl.trans(b), product, input_precision="tf32x3")
        inside = (i < R)[:, None] & (j < R)[None, :]
        at = grams + tl.program_id(0).to(tl.int64) * R * R
        tl.store(at + i[:, None] * R + j[None, :], product, mask=inside)
        if tl.program_id(2) < tl.program_id(1):
            tl.store(at + j[None, :] * R + i[:, None], product, mask=inside)


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
        w = tl.where(f < 0.5, was + f * (w - was), w - (w - was) * (1.0 - f))  # like torch.lerp
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
    """Views [n r m] of weights that share a device and dtype, with the tables that the kernels need.

    Factors and norms are vectors [all n] in float32, ordered by view. The table is valid while the weights keep their
    storage.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        like, self._views = views[0], list(views)
        self._dtype, self._device = like.dtype, like.device
        even = all(map(_even, views))
        block = _BLOCK if even else _BLOCK_APART
        fields, heads, numbers = [], 0, 0
        for view in views:
            n, size = len(view), view[0].numel()
            by_head, *steps = _steps(view)
            places = view.data_ptr(), by_head, *steps, size, heads, numbers, *view.stride()[1:], view.shape[2]
            fields.append(places)
            heads, numbers = heads + n, numbers + n * size
        self._heads, self._numbers = heads, numbers
        self._fields = sent(torch.tensor(fields), like.device)
        self._plan, self._starts = _plan(tuple((len(v), v[0].numel()) for v in views), block, like.device)
        self._programs = len(self._plan)
        self._lie = next((lie for lie, dim in ((1, 2), (2, 1)) if all(_dense(view, dim) for view in views)), 0)
        self._how = {"TYPE": _TYPES[like.dtype], "BLOCK": block, "EVEN": even, "num_warps": _WARPS}

    def copy(self) -> Tensor:
        """Returns a copy of all elements of all heads, in an internal order."""
        old = torch.empty(self._numbers, dtype=self._dtype, device=self._device)
        self._run(_copy, [old, old], {"COPY": True, "SUMS": False})
        return old

    def copy_and_norms(self) -> tuple[Tensor, Tensor]:
        """Returns the copy and ‖W^h‖_F [all n], in two launches that read the weights once."""
        old = torch.empty(self._numbers, dtype=self._dtype, device=self._device)
        return old, self.norms(old)

    def norms(self, old: Tensor | None = None) -> Tensor:
        """Returns ‖W^h‖_F [all n] in two launches; also copies all elements to `old`, if given."""
        sums, norms = (torch.empty(n, dtype=torch.float32, device=self._device) for n in (self._programs, self._heads))
        self._run(_copy, [sums if old is None else old, sums], {"COPY": old is not None, "SUMS": True})
        self._launch(_norms, (self._heads,), [sums, self._starts, norms], {"BLOCK": 256, "num_warps": 1})
        return norms

    def grams(self, first: int, n: int, r: int) -> Tensor:
        """Returns W Wᵀ [n r r], in float32, of n heads of r rows from head `first` on, in one launch.

        Products of float32 weights use three TF32 products; sums are in float32.
        """
        grams = torch.empty((n, r, r), dtype=torch.float32, device=self._device)
        tile = min(64, max(16, triton.next_power_of_2(r)))
        how = {"TYPE": self._how["TYPE"], "LIE": self._lie, "R": r, "TILE": tile, "DEPTH": _DEPTH}
        tiles = triton.cdiv(r, tile)
        self._launch(_grams, (n, tiles, tiles), [self._fields, self._plan, self._starts, grams, first], how)
        return grams

    def move(self, old: Tensor, factors: Tensor, keeps: Tensor | None) -> None:
        """Updates w ← old + f · (w - old), with `old` a copy, times `keeps` if given; factor 1 leaves a head
        untouched."""
        self._run(_move, [old, factors, factors if keeps is None else keeps], {"KEEPS": keeps is not None})
        increment_version(self._views)  # torch does not notice a kernel's writes

    def scale(self, factors: Tensor) -> None:
        """Updates w ← f · w; factor 1 leaves a head untouched."""
        self._run(_scale, [factors], {})
        increment_version(self._views)

    def _run(self, kernel: Any, tensors: Sequence[Tensor], flags: dict[str, bool]) -> None:
        self._launch(kernel, (self._programs,), [self._fields, self._plan, *tensors], {**self._how, **flags})

    def _launch(
        self, kernel: Any, programs: tuple[int, ...], given: Sequence[Tensor | int], how: dict[str, object]
    ) -> None:
        with torch.cuda.device_of(self._fields):
            kernel[programs](*given, **how)


@functools.lru_cache(maxsize=8)
def _plan(sizes: tuple[tuple[int, int], ...], block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the weight, head and block that each program handles, and each head's first program plus the total number
    of programs, for weights with the given numbers of heads and of elements per head."""
    parts = [(torch.tensor([i]), torch.arange(n), torch.arange(-(-size // block))) for i, (n, size) in enumerate(sizes)]
    plan = torch.cat([torch.cartesian_prod(*part) for part in parts])
    starts = torch.cat([(plan[:, 2] == 0).nonzero().flatten(), torch.tensor([len(plan)])])
    return sent(plan.int(), device), sent(starts.int(), device)


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Copies the tensor to the device without waiting."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _steps(view: Tensor) -> tuple[int, int, int, int]:
    """Returns the head, outer and inner strides and the number of inner elements; a dense head has only inner
    elements."""
    (r, m), (by_head, by_row, by_column) = view.shape[1:], view.stride()
    outer, inner, n = (by_row, by_column, m) if by_row >= by_column else (by_column, by_row, r)
    other = r * m // n
    if other == 1 or outer == n * inner:
        return by_head, 0, inner, r * m
    return by_head, outer, inner, n


def _even(view: Tensor) -> bool:
    """True if every head is dense, aligned to 16 bytes, and has a multiple of 16 numbers."""
    _, _, inner, n = _steps(view)
    places = (view.data_ptr(), view.stride(0) * view.element_size())
    return inner == 1 and n == view[0].numel() and n % 16 == 0 and all(p % 16 == 0 for p in places)


def _dense(view: Tensor, dim: int) -> bool:
    """True if numbers along a dimension are adjacent, in lines whose lengths and offsets are multiples of 16."""
    steps = (view.stride(other) for other in range(3) if other != dim and view.shape[other] > 1)
    return view.stride(dim) == 1 and view.data_ptr() % 16 == 0 and all(n % 16 == 0 for n in (view.shape[dim], *steps))
