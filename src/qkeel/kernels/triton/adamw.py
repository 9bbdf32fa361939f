"""AdamW with a rate per line of a weight, as one Triton pass."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton  # pyright: ignore[reportMissingImports]  # not on every system
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd.graph import increment_version

from qkeel.kernels.native.operators import AdamOptions, AdamTensors
from qkeel.kernels.triton.heads import sent
from qkeel.kernels.triton.norm_rope import TritonObject
from qkeel.patching.modes import add_to_all

_FIELDS = tl.constexpr(11)  # of a weight's row in the table: addresses of weight, gradient, mean, variance, maximum,
# step, rates and squares; number of lines, numbers per line, stride of lines (of numbers if lines are adjacent)
# Lines per program and numbers of each line per iteration, for separate and for adjacent lines.
_TILE = {False: (4, 512), True: (64, 32)}
_WARPS = 8
# Weight decay: none, in the gradient, decoupled and scaled with the step, decoupled at full size.
_NONE, _COUPLED, _SCALED, _PLAIN = (tl.constexpr(i) for i in range(4))


@triton.jit
def _tensor(row, field, EVEN):
    """Returns the address of a tensor that belongs to a weight."""
    start = tl.load(row + field).to(tl.pointer_type(tl.float32))
    if EVEN:
        start = tl.multiple_of(start, 16)
    return start


@triton.jit
def _towards(a, b, c):
    """Returns a + c · (b - a) computed from the nearer end, like torch.lerp: exactly b at c = 1."""
    return tl.where(c == 1.0, b, tl.where(c < 0.5, a + c * (b - a), b - (b - a) * (1.0 - c)))


@triton.jit
def _sizes(row, lr, log1, log2):
    """Returns the step size and the root of the variance's bias correction, both for this step."""
    t = tl.load(_tensor(row, 5, False)).to(tl.float64) + 1.0
    # float32 would lose digits of 1 - βᵗ in the first steps.
    return (lr / (1.0 - tl.exp(t * log1))).to(tl.float32), tl.sqrt(1.0 - tl.exp(t * log2)).to(tl.float32)


@triton.jit
def _gradient(row, at, ok, mine, unscale, EVEN: tl.constexpr, UP: tl.constexpr, UNSCALE: tl.constexpr):
    start = _tensor(row, 1, EVEN)
    g = tl.load(start + at, mask=ok, other=0.0)
    if UNSCALE:
        g = tl.math.div_rn(g, tl.load(unscale) + tl.zeros_like(g))
        tl.store(start + at, g, mask=mine)
    if UP:
        g = -g
    return g


@triton.jit
def _stepped(
    w, g, row, at, ok, mine, rate, size, root, drop, coupled, toward, beta2, grown, small,
    EVEN: tl.constexpr, DECAY: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Returns the new weights of some lines and updates their state."""
    mean, variance = _tensor(row, 2, EVEN), _tensor(row, 3, EVEN)
    m = tl.load(mean + at, mask=ok, other=0.0)
    v = tl.load(variance + at, mask=ok, other=0.0)
    if DECAY == _COUPLED:
        g += w * coupled
    kept = w
    if DECAY >= _SCALED:
        kept = tl.fma(tl.zeros_like(w) - drop, w, w)
    m = m + toward * (g - m)
    v = beta2 * v + (grown * g) * g
    tl.store(mean + at, m, mask=mine)
    tl.store(variance + at, v, mask=mine)
    if TOP:
        maximum = _tensor(row, 4, EVEN)
        top = tl.load(maximum + at, mask=ok, other=0.0)
        v = tl.where((v > top) | (v != v), v, top)
        tl.store(maximum + at, v, mask=mine)
    now = kept - tl.math.div_rn(size * m, tl.math.div_rn(tl.math.sqrt_rn(v), root + tl.zeros_like(w)) + small)
    return _towards(kept if DECAY == _PLAIN else w, now, rate)


@triton.jit
def _lines(
    table, plan, unscale, found, lr, drop, coupled, toward, beta2, grown, small, log1, log2,
    LINES: tl.constexpr, OTHERS: tl.constexpr, ACROSS: tl.constexpr, EVEN: tl.constexpr, STEP: tl.constexpr,
    DECAY: tl.constexpr, TOP: tl.constexpr, UP: tl.constexpr, UNSCALE: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Steps some lines of a weight and sums the squares of the result; STEP=False only sums."""
    own = plan + tl.program_id(0).to(tl.int64) * 2
    row = table + tl.load(own).to(tl.int64) * _FIELDS
    lines, others, lead = tl.load(row + 8).to(tl.int32), tl.load(row + 9).to(tl.int32), tl.load(row + 10)
    if EVEN:  # aligned to 16 bytes
        lead = tl.multiple_of(lead, 16)
        lines, others = tl.multiple_of(lines, 16 if ACROSS else 1), tl.multiple_of(others, 1 if ACROSS else 16)
    i = tl.load(own + 1) * LINES + tl.arange(0, LINES)
    weight, squares = _tensor(row, 0, EVEN), tl.zeros([LINES, OTHERS], tl.float32)
    size, root = _sizes(row, lr, log1, log2) if STEP else (0.0, 0.0)
    rate = tl.load(_tensor(row, 6, False) + i, mask=i < lines, other=0.0)[:, None] if STEP else 0.0
    for first in range(0, others, OTHERS):
        j = first + tl.arange(0, OTHERS)
        ok = (i < lines)[:, None] & (j < others)[None, :]
        at = i[:, None] + j.to(tl.int64)[None, :] * lead if ACROSS else i.to(tl.int64)[:, None] * lead + j[None, :]
        w = tl.load(weight + at, mask=ok, other=0.0)
        if STEP:
            mine = ok
            if SKIPS:
                mine = ok & (tl.zeros([LINES, OTHERS], tl.float32) + tl.load(found) != 1.0)
            g = _gradient(row, at, ok, mine, unscale, EVEN, UP, UNSCALE)
            now = _stepped(
                w, g, row, at, ok, mine, rate, size, root, drop, coupled, toward, beta2, grown, small, EVEN, DECAY, TOP
            )
            tl.store(weight + at, now, mask=mine)
            w = tl.where(mine, now, w)
        squares += w * w
    sums = tl.load(row + 7).to(tl.pointer_type(tl.float64))
    tl.store(sums + i, tl.sum(squares.to(tl.float64), 1), mask=i < lines)


def adam_lines(tensors: AdamTensors, options: AdamOptions) -> None:
    """Like `kernels.native.operators.adam_lines`, for CUDA tensors; the step count may be on the device.

    If a GradScaler skips the step, weights and state stay unchanged, and the squares are still summed.
    """
    t, o = tensors, options
    drop = o.lr * o.decay
    how = {
        "DECAY": (_PLAIN if o.plain else _SCALED).value if o.decoupled else (_COUPLED if o.decay else _NONE).value,
        "TOP": bool(t.maxima),
        "UP": o.maximize,
        "UNSCALE": t.grad_scale is not None,
        "SKIPS": t.found_inf is not None,
    }
    numbers = (o.lr, drop, o.decay, 1 - o.beta1, o.beta2, 1 - o.beta2, o.eps, _log(o.beta1), _log(o.beta2))
    given = (t.weights, t.gradients, t.means, t.variances, t.maxima or t.weights, t.steps, t.rates, t.squares)
    nothing = t.steps[0]  # placeholder for a tensor that the kernel does not read
    read = [nothing if x is None else x for x in (t.grad_scale, t.found_inf)]
    _launch(list(zip(*given, strict=True)), t.axes, (*read, *numbers), {**how, "STEP": True})
    add_to_all(list(t.steps), 1.0 if t.found_inf is None else 1.0 - t.found_inf.reshape(()))
    unscaled = t.gradients if how["UNSCALE"] else ()
    increment_version([*t.weights, *t.means, *t.variances, *t.maxima, *t.squares, *unscaled])


def sum_lines(weights: Sequence[Tensor], squares: Sequence[Tensor], axes: Sequence[int]) -> None:
    """Writes the sums of squares of each line of weights, bit for bit as `adam_lines` leaves them."""
    how = {"STEP": False, "DECAY": _NONE.value, **dict.fromkeys(("TOP", "UP", "UNSCALE", "SKIPS"), False)}
    rows = [(*(w,) * 7, x) for w, x in zip(weights, squares)]
    _launch(rows, axes, (weights[0], weights[0], *(1.0,) * 9), how)
    increment_version([*squares])


def _launch(
    rows: Sequence[tuple[Tensor, ...]], axes: Sequence[int], given: Sequence[Tensor | float], how: dict[str, object]
) -> None:
    """Launches once for weights with separate lines, and once for weights with adjacent lines."""
    kinds: dict[bool, list[tuple[int, ...]]] = {}
    for tensors, axis in zip(rows, axes):
        lines, others, across = _lie(tensors[0], axis)
        places = *(x.data_ptr() for x in tensors), lines, others, lines if across else others
        kinds.setdefault(across, []).append(places)
    for across, fields in kinds.items():
        table = sent(torch.tensor(fields), rows[0][0].device)
        lines, others = _TILE[across]
        plan = _plan(tuple(-(-n // lines) for *_, n, _, _ in fields), table.device)
        # Addresses of the weight and of the tensors with its layout.
        even = all(lead % 16 == 0 and not any(p % 16 for p in where[:5]) for *where, _, _, lead in fields)
        kernel: TritonObject = _lines
        shape = {"LINES": lines, "OTHERS": others, "ACROSS": across, "EVEN": even, "num_warps": _WARPS}
        with torch.cuda.device_of(table):
            kernel[(len(plan),)](table, plan, *given, **shape, **how)


@functools.lru_cache(maxsize=8)
def _plan(programs: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the weight and the block of lines that each program handles."""
    parts = [torch.stack([torch.full((n,), i), torch.arange(n)], 1) for i, n in enumerate(programs)]
    return sent(torch.cat(parts).int(), device)


def _lie(weight: Tensor, axis: int) -> tuple[int, int, bool]:
    """Returns the number of lines, the numbers per line, and whether lines are adjacent in memory, for a dense matrix
    or vector."""
    if weight.ndim == 1:
        return len(weight), 1, True
    return weight.shape[axis], weight.shape[1 - axis], (axis == 1) == weight.is_contiguous()


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
