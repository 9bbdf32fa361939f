"""Norm, gain and rotation of q or k in one pass over GPU memory, and its derivative, as Triton kernels.

The same operator as in C++ (`kernels.norm_rope`): storage float32, bfloat16 or float16, arithmetic in float32. A
program handles some heads of some tokens. Tile sizes are estimated, not tuned.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # not on every system
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from triton.language import constexpr  # pyright: ignore[reportMissingImports]

from qkeel.kernels.native.operators import backward_shapes, same_shape
from qkeel.kernels.norm_rope import operator as norm_rope

L2 = constexpr(norm_rope.L2)
LAYER = constexpr(norm_rope.LAYER)
# Rows of a tile by half the head size: 1024 pairs, 8 for each of 128 threads, so that 16-bit data loads 16 bytes each.
_ROWS = {8: 64, 16: 64, 32: 32, 64: 16, 128: 8, 256: 4, 512: 2}
# In backward with a shared gain: several for each of 132 processors.
_PROGRAMS = 2048
# With a gain per head, so that partial sums stay small next to q and k.
_PROGRAMS_BY_HEAD = 256


@triton.jit
def _rows(pid, heads, times, outer, blocks, HEADS: constexpr, TOKENS: constexpr):
    """Returns sequence, head and time of each row of tile `pid`, and which rows exist."""
    row = tl.arange(0, HEADS * TOKENS)
    token = pid // blocks * TOKENS + row // HEADS
    head = pid % blocks * HEADS + row % HEADS
    return (
        # Offsets into long caches exceed 32 bits.
        (token // times).to(tl.int64),
        head.to(tl.int64),
        (token % times).to(tl.int64),
        (token < outer) & (head < heads),
    )


@triton.jit
def _pieces(
    p,
    at,
    ok,
    D: constexpr,
    HALF: constexpr,
    WIDE: constexpr,
    TAIL: constexpr,
    STEP: constexpr,
):
    """Loads the two numbers of each pair and the unrotated rest of the rows from `at` on, in float32; absent numbers
    are 0.

    At STEP 1 pairs are x_i and x_{i+half}, at STEP 2 x_2i and x_{2i+1}.
    """
    i, j, row = (
        tl.arange(0, WIDE)[None, :],
        tl.arange(0, TAIL)[None, :],
        (p + at)[:, None],
    )
    pair, tail_mask = ok[:, None] & (i < HALF), ok[:, None] & (j < D - 2 * HALF)
    a = tl.load(row + STEP * i, mask=pair, other=0.0).to(tl.float32)
    b = tl.load(row + STEP * i + (HALF if STEP == 1 else 1), mask=pair, other=0.0).to(
        tl.float32
    )
    c = tl.load(row + 2 * HALF + j, mask=tail_mask, other=0.0).to(tl.float32)
    return a, b, c


@triton.jit
def _store(
    p,
    at,
    ok,
    a,
    b,
    c,
    D: constexpr,
    HALF: constexpr,
    WIDE: constexpr,
    TAIL: constexpr,
    STEP: constexpr,
):
    """Stores three pieces at the locations from which `_pieces` loads them."""
    i, j, row = (
        tl.arange(0, WIDE)[None, :],
        tl.arange(0, TAIL)[None, :],
        (p + at)[:, None],
    )
    pair, tail_mask = ok[:, None] & (i < HALF), ok[:, None] & (j < D - 2 * HALF)
    kind = p.dtype.element_ty
    tl.store(row + STEP * i, a.to(kind), mask=pair)
    tl.store(row + STEP * i + (HALF if STEP == 1 else 1), b.to(kind), mask=pair)
    tl.store(row + 2 * HALF + j, c.to(kind), mask=tail_mask)


@triton.jit
def _gains(
    gain,
    head,
    ok,
    gain_h,
    gain_d,
    D: constexpr,
    HALF: constexpr,
    WIDE: constexpr,
    TAIL: constexpr,
    STEP: constexpr,
):
    """Returns the gain of each number of the rows, however it is shared; 1 if there is no gain."""
    i, j, row = (
        tl.arange(0, WIDE)[None, :],
        tl.arange(0, TAIL)[None, :],
        (gain + head * gain_h)[:, None],
    )
    pair, tail_mask = ok[:, None] & (i < HALF), ok[:, None] & (j < D - 2 * HALF)
    a = tl.load(row + STEP * i * gain_d, mask=pair, other=1.0).to(tl.float32)
    b = tl.load(
        row + (STEP * i + (HALF if STEP == 1 else 1)) * gain_d, mask=pair, other=1.0
    ).to(tl.float32)
    c = tl.load(row + (2 * HALF + j) * gain_d, mask=tail_mask, other=1.0).to(tl.float32)
    return a, b, c


@triton.jit
def _angles(cos, sin, at, ok, HALF: constexpr, WIDE: constexpr):
    i = tl.arange(0, WIDE)[None, :]
    inside = ok[:, None] & (i < HALF)
    c = tl.load(cos + at[:, None] + i, mask=inside, other=1.0)
    s = tl.load(sin + at[:, None] + i, mask=inside, other=0.0)
    return c, s


@triton.jit
def _turn(a, b, c, s):
    return a * c - b * s, b * c + a * s


@triton.jit
def _total(a, b, c, WHOLE: constexpr):
    """Returns the sum of each row; with WHOLE the sum over all heads of a token, which make up the tile."""
    total = tl.sum(a, 1) + tl.sum(b, 1) + tl.sum(c, 1)
    return tl.zeros([total.shape[0]], tl.float32) + tl.sum(total, 0) if WHOLE else total


@triton.jit
def _centred(
    a,
    b,
    c,
    ok,
    n,
    D: constexpr,
    HALF: constexpr,
    WIDE: constexpr,
    TAIL: constexpr,
    WHOLE: constexpr,
):
    """Returns the pieces minus the mean of the n numbers that are normed together; absent numbers stay 0."""
    mean = (_total(a, b, c, WHOLE) / n)[:, None]
    pair = ok[:, None] & (tl.arange(0, WIDE)[None, :] < HALF)
    tail_mask = ok[:, None] & (tl.arange(0, TAIL)[None, :] < D - 2 * HALF)
    return (
        tl.where(pair, a - mean, 0.0),
        tl.where(pair, b - mean, 0.0),
        tl.where(tail_mask, c - mean, 0.0),
    )


@triton.jit
def _inverse(a, b, c, ok, eps, n, KIND: constexpr, WHOLE: constexpr):
    """Returns 1 / size of the n numbers that are normed together, or 1 for absent rows; NaN stays NaN."""
    squares = _total(a * a, b * b, c * c, WHOLE)
    if KIND == L2:
        # Rounded as on a CPU, for which the fast instructions are a few units off.
        size = tl.maximum(tl.sqrt_rn(squares), eps, propagate_nan=tl.PropagateNan.ALL)
    else:
        size = tl.sqrt_rn(squares / n + eps)
    return tl.div_rn(tl.full(size.shape, 1.0, tl.float32), tl.where(ok, size, 1.0))


@triton.jit
def forward(
    x,
    y,
    inverse,
    gain,
    cos,
    sin,
    eps,
    heads,
    times,
    outer,
    blocks,
    x_b,
    x_h,
    x_t,
    y_b,
    y_h,
    y_t,
    gain_h,
    gain_d,
    cos_b,
    cos_t,
    D: constexpr,
    HALF: constexpr,
    WIDE: constexpr,
    TAIL: constexpr,
    HEADS: constexpr,
    TOKENS: constexpr,
    STEP: constexpr,
    KIND: constexpr,
    GAIN: constexpr,
    TURN: constexpr,
    INVERSES: constexpr,
    WHOLE: constexpr,
):
    n, head, time, ok = _rows(
        tl.program_id(0), heads, times, outer, blocks, HEADS, TOKENS
    )
    a, b, c = _pieces(
        x, n * x_b + head * x_h + time * x_t, ok, D, HALF, WIDE, TAIL, STEP
    )
    if KIND == LAYER:
        a, b, c = _centred(
            a, b, c, ok, D * heads if WHOLE else D, D, HALF, WIDE, TAIL, WHOLE
        )
    if KIND != 0:
        k = _inverse(a, b, c, ok, eps, D * heads if WHOLE else D, KIND, WHOLE)
        if INVERSES:
            tl.store(inverse + (n * times + time) * heads + head, k, mask=ok)
        a, b, c = a * k[:, None], b * k[:, None], c * k[:, None]
    if GAIN:
        ga, gb, gc = _gains(gain, head, ok, gain_h, gain_d, D, HALF, WIDE, TAIL, STEP)
        a, b, c = a * ga, b * gb, c * gc
    if TURN:
        cosine, sine = _angles(cos, sin, n * cos_b + time * cos_t, ok, HALF, WIDE)
        a, b = _turn(a, b, cosine, sine)
    _store(y, n * y_b + head * y_h + time * y_t, ok, a, b, c, D, HALF, WIDE, TAIL, STEP)


@triton.jit
def _hat(
    a,
    b,
    c,
    k,
    ga,
    gb,
    gc,
    cosine,
    sine,
    ok,
    n,
    D: constexpr,
    HALF: constexpr,
    WIDE: constexpr,
    TAIL: constexpr,
    KIND: constexpr,
    GAIN: constexpr,
    TURN: constexpr,
    KEPT_X: constexpr,
    WHOLE: constexpr,
):
    """Returns x̂, the normed row before its gain, from the kept tensor: x, or y = rotation(gain · x̂)."""
    if KEPT_X:
        if KIND == LAYER:
            a, b, c = _centred(a, b, c, ok, n, D, HALF, WIDE, TAIL, WHOLE)
        a, b, c = a * k[:, None], b * k[:, None], c * k[:, None]
    else:
        if TURN:
            # Tables such as YaRN's also stretch.
            undo = 1.0 / (cosine * cosine + sine * sine)
            a, b = _turn(a, b, cosine * undo, -sine * undo)
        if GAIN:
            a, b, c = a / ga, b / gb, c / gc
    return a, b, c


@triton.jit
def backward(
    dy,
    kept,
    inverse,
    gain,
    cos,
    sin,
    dx,
    parts,
    eps,
    heads,
    times,
    outer,
    blocks,
    groups,
    groups_of_program,
    u_b,
    u_h,
    u_t,
    k_b,
    k_h,
    k_t,
    x_b,
    x_h,
    x_t,
    gain_h,
    gain_d,
    cos_b,
    cos_t,
    D: constexpr,
    HALF: constexpr,
    WIDE: constexpr,
    TAIL: constexpr,
    HEADS: constexpr,
    TOKENS: constexpr,
    STEP: constexpr,
    KIND: constexpr,
    GAIN: constexpr,
    BY_HEAD: constexpr,
    TURN: constexpr,
    KEPT_X: constexpr,
    WHOLE: constexpr,
):
    pid = tl.program_id(0)
    chunk, block = pid // blocks, pid % blocks
    size = D * heads if WHOLE else D
    da = tl.zeros([HEADS * TOKENS, WIDE], tl.float32)
    db = tl.zeros([HEADS * TOKENS, WIDE], tl.float32)
    dc = tl.zeros([HEADS * TOKENS, TAIL], tl.float32)
    # Placeholders if there is no gain or table.
    ga, gb, gc, cosine, sine = da, da, dc, da, da
    for group in range(
        chunk * groups_of_program,
        tl.minimum(chunk * groups_of_program + groups_of_program, groups),
    ):
        n, head, time, ok = _rows(
            group * blocks + block, heads, times, outer, blocks, HEADS, TOKENS
        )
        ua, ub, uc = _pieces(
            dy, n * u_b + head * u_h + time * u_t, ok, D, HALF, WIDE, TAIL, STEP
        )
        a, b, c = _pieces(
            kept, n * k_b + head * k_h + time * k_t, ok, D, HALF, WIDE, TAIL, STEP
        )
        k = tl.load(inverse + (n * times + time) * heads + head, mask=ok, other=1.0)
        if GAIN:
            ga, gb, gc = _gains(
                gain, head, ok, gain_h, gain_d, D, HALF, WIDE, TAIL, STEP
            )
        if TURN:
            cosine, sine = _angles(cos, sin, n * cos_b + time * cos_t, ok, HALF, WIDE)
            # The derivative of a rotation is the rotation back.
            ua, ub = _turn(ua, ub, cosine, -sine)
        a, b, c = _hat(
            a,
            b,
            c,
            k,
            ga,
            gb,
            gc,
            cosine,
            sine,
            ok,
            size,
            D,
            HALF,
            WIDE,
            TAIL,
            KIND,
            GAIN,
            TURN,
            KEPT_X,
            WHOLE,
        )
        if GAIN:
            # The gradient of the gain, before the gain scales that of x̂.
            da, db, dc = da + ua * a, db + ub * b, dc + uc * c
            ua, ub, uc = ua * ga, ub * gb, uc * gc
        along = _total(ua * a, ub * b, uc * c, WHOLE)
        # Where eps exceeds the norm, the size does not depend on x.
        along = tl.where(k < 1.0 / eps, along, 0.0) if KIND == L2 else along / size
        # LayerNorm takes a mean out forward, so also out of the gradient.
        mean = (_total(ua, ub, uc, WHOLE) / size if KIND == LAYER else along * 0.0)[
            :, None
        ]
        k, along = k[:, None], along[:, None]
        a, b, c = (
            k * (ua - mean - a * along),
            k * (ub - mean - b * along),
            k * (uc - mean - c * along),
        )
        _store(
            dx,
            n * x_b + head * x_h + time * x_t,
            ok,
            a,
            b,
            c,
            D,
            HALF,
            WIDE,
            TAIL,
            STEP,
        )
    if GAIN:
        _keep_sums(
            pid,
            parts,
            da,
            db,
            dc,
            chunk,
            block,
            heads,
            D,
            HALF,
            WIDE,
            TAIL,
            STEP,
            HEADS,
            BY_HEAD,
        )


@triton.jit
def _keep_sums(
    pid,
    parts,
    da,
    db,
    dc,
    chunk,
    block,
    heads,
    D: constexpr,
    HALF: constexpr,
    WIDE: constexpr,
    TAIL: constexpr,
    STEP: constexpr,
    HEADS: constexpr,
    BY_HEAD: constexpr,
):
    """Stores this program's part of the gain's gradient: [chunks h d], or [programs d] if heads share the gain."""
    # Such a tile has a single token.
    if BY_HEAD:
        head = block * HEADS + tl.arange(0, HEADS)
        _store(
            parts,
            (chunk * heads + head) * D,
            head < heads,
            da,
            db,
            dc,
            D,
            HALF,
            WIDE,
            TAIL,
            STEP,
        )
    else:
        first_row = tl.zeros([1], tl.int32)
        a, b, c = (
            tl.sum(da, 0, keep_dims=True),
            tl.sum(db, 0, keep_dims=True),
            tl.sum(dc, 0, keep_dims=True),
        )
        _store(
            parts,
            (first_row + pid) * D,
            first_row == 0,
            a,
            b,
            c,
            D,
            HALF,
            WIDE,
            TAIL,
            STEP,
        )


LAUNCHED: dict[str, Any] = {"forward": forward, "backward": backward}
Numbers = tuple[int | float, ...]


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _constants(
    x: Tensor,
    gain: Tensor | None,
    cos: Tensor | None,
    norm_code: int,
    by_head: bool = False,
) -> dict[str, int]:
    """Returns the constants of a launch: tile sizes, the requested computation, and warps for whole tokens."""
    d, h, whole = x.shape[-1], x.shape[1], bool(norm_code & norm_rope.WHOLE)
    half = d // 2 if cos is None else cos.shape[-1]
    wide, tail = (
        max(8, triton.next_power_of_2(half)),
        triton.next_power_of_2(max(1, d - 2 * half)),
    )
    # The rest that is not rotated may be wider than the pairs.
    rows = _ROWS[max(wide, triton.next_power_of_2(triton.cdiv(tail, 2)))]
    # Heads of a token first: a norm over all of them needs them in one tile.
    heads = triton.next_power_of_2(h) if whole else min(rows, triton.next_power_of_2(h))
    constants = {"D": d, "HALF": half, "WIDE": wide, "TAIL": tail, "HEADS": heads}
    # With a gain per head, each row of a tile is a head, whose sums for the gain's gradient stay apart.
    constants["TOKENS"] = 1 if by_head or whole else rows // heads
    if whole:
        # As many rows for each warp as in other tiles.
        constants["num_warps"] = 4 * max(1, heads // rows)
    constants["STEP"] = 2 if norm_code & norm_rope.INTERLEAVED else 1
    constants |= {
        "KIND": norm_code % norm_rope.WHOLE,
        "WHOLE": whole,
        "GAIN": gain is not None,
        "TURN": cos is not None,
    }
    return constants


def _shared_strides(gain: Tensor | None, cos: Tensor | None) -> Numbers:
    """Returns the strides of the gain along heads and dimensions, and of the tables along sequences and tokens; 0 if
    shared."""
    per_head = gain.stride(0) if gain is not None and gain.ndim == 2 else 0
    per_dim = (
        gain.stride(-1) if gain is not None and gain.ndim and gain.shape[-1] > 1 else 0
    )
    if cos is None:
        return per_head, per_dim, 0, 0
    return (
        per_head,
        per_dim,
        cos.stride(0) if cos.shape[0] > 1 else 0,
        cos.stride(2) if cos.shape[2] > 1 else 0,
    )


def _operands(
    stand_in: Tensor, gain: Tensor | None, cos: Tensor | None, sin: Tensor | None
) -> list[Tensor]:
    """Returns gain and table for a kernel; `stand_in` in place of what there is not, which the kernel does not read."""
    return [
        stand_in if gain is None else gain,
        *(stand_in if x is None else x.contiguous() for x in (cos, sin)),
    ]


def _run(
    x: Tensor,
    gain: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    norm_code: int,
    eps: float,
    inverses: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the result, and the inverse norms [b t h] of rows if requested and there is a norm."""
    x = _dense(x)
    y, (b, h, t, _) = torch.empty_like(x), x.shape
    has_inverses = inverses and norm_code % norm_rope.WHOLE != norm_rope.NONE
    inverse = x.new_empty((b, t, h) if has_inverses else (0,), dtype=torch.float32)
    constants = _constants(x, gain, cos, norm_code)
    blocks, groups = (
        triton.cdiv(h, constants["HEADS"]),
        triton.cdiv(b * t, constants["TOKENS"]),
    )
    gain_and_table = _operands(x, gain, cos, sin)
    with torch.cuda.device_of(x):
        LAUNCHED["forward"][(blocks * groups,)](
            x,
            y,
            inverse if has_inverses else x,
            *gain_and_table,
            eps,
            h,
            t,
            b * t,
            blocks,
            *x.stride()[:3],
            *y.stride()[:3],
            *_shared_strides(gain, None if cos is None else gain_and_table[1]),
            INVERSES=has_inverses,
            **constants,
        )
    return y, inverse


def _run_backward(
    grad_out: Tensor,
    kept: Tensor,
    inverse: Tensor,
    gain: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    norm_code: int,
    eps: float,
    kept_x: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of the gain, the latter [h or 1 d], summed in an order that shapes decide."""
    grad_out, kept = _dense(grad_out), _dense(kept)
    dx = torch.empty_like(kept)
    b, h, t, d = kept.shape
    by_head = gain is not None and gain.ndim == 2
    constants = _constants(kept, gain, cos, norm_code, by_head)
    blocks, groups = (
        triton.cdiv(h, constants["HEADS"]),
        triton.cdiv(b * t, constants["TOKENS"]),
    )
    # Without a gain nothing is summed over rows, so every tile may be a program.
    most = (
        groups
        if gain is None
        else max(1, (_PROGRAMS_BY_HEAD if by_head else _PROGRAMS) // blocks)
    )
    groups_of_program = triton.cdiv(groups, min(most, groups))
    chunks = triton.cdiv(groups, groups_of_program)
    shape = (chunks, h, d) if by_head else (chunks * blocks, 1, d)
    # Partial sums that are added afterwards, instead of atomic additions, whose order differs from run to run.
    parts = kept.new_empty((0,) if gain is None else shape, dtype=torch.float32)
    gain_and_table = _operands(kept, gain, cos, sin)
    with torch.cuda.device_of(kept):
        LAUNCHED["backward"][(chunks * blocks,)](
            grad_out,
            kept,
            inverse,
            *gain_and_table,
            dx,
            kept if gain is None else parts,
            eps,
            h,
            t,
            b * t,
            blocks,
            groups,
            groups_of_program,
            *grad_out.stride()[:3],
            *kept.stride()[:3],
            *dx.stride()[:3],
            *_shared_strides(gain, None if cos is None else gain_and_table[1]),
            BY_HEAD=by_head,
            KEPT_X=kept_x,
            **constants,
        )
    return dx, parts if gain is None else parts.sum(0)


def _run_tracked(*arguments: Any) -> tuple[Tensor, Tensor]:
    # The last argument tells backward what is kept.
    return _run(*arguments[:-1], inverses=True)


def _run_two(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    gain_q, gain_k, cos, sin, norm_code_q, norm_code_k, eps = arguments
    new_q, _ = _run(q, gain_q, cos, sin, norm_code_q, eps, inverses=False)
    new_k, _ = _run(k, gain_k, cos, sin, norm_code_k, eps, inverses=False)
    return new_q, new_k


def _shapes(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    b, h, t, _ = x.shape
    is_normed = arguments[3] % norm_rope.WHOLE != norm_rope.NONE
    return same_shape(x), x.new_empty(
        (b, t, h) if is_normed else (0,), dtype=torch.float32
    )


def register() -> None:
    """Registers the operators with torch: implementation, shapes and derivative."""
    gain_and_table = "Tensor? gain, Tensor? cos, Tensor? sin, int kind, float eps"
    back = "Tensor dy, Tensor kept, Tensor inverse"
    two = "Tensor? gain_q, Tensor? gain_k, Tensor? cos, Tensor? sin, int kind_q, int kind_k, float eps"
    for name, arguments, run, shapes in (
        (
            "norm_rope",
            f"Tensor x, {gain_and_table}, bool keep_x",
            _run_tracked,
            _shapes,
        ),
        (
            "norm_rope_two",
            f"Tensor q, Tensor k, {two}",
            _run_two,
            lambda q, k, *_: (same_shape(q), same_shape(k)),
        ),
        (
            "norm_rope_backward",
            f"{back}, {gain_and_table}, bool kept_x",
            _run_backward,
            backward_shapes,
        ),
    ):
        torch.library.define(
            f"qkeel_triton::{name}", f"({arguments}) -> (Tensor, Tensor)"
        )
        # On a CPU in interpreter mode only.
        torch.library.impl(f"qkeel_triton::{name}", ("cuda", "cpu"), run)
        torch.library.register_fake(f"qkeel_triton::{name}", shapes)
    norm_rope.register_derivatives("qkeel_triton")
