"""Norm and rotation of queries and keys as Triton kernels, for one tensor and for q and k together."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]  # not on every system
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Float
from torch import Tensor

from qkeel.kernels.native.operators import NONE, WHOLE, backward_shapes, same_shape

# Norm, gain and rotation of q or k in one pass over GPU memory, and its derivative.
#
# The same operator as in C++ (`kernels.native.operators`): storage float32, bfloat16 or float16, arithmetic in float32.
# A program handles some heads of some tokens. It has not been timed on a GPU yet: tile sizes are estimated, not tuned.

TritonObject = Any  # a Triton kernel, an autograd context, or arguments passed through torch's dispatcher
# Numbers of the kinds of norms besides NONE.
RMS = tl.constexpr(1)
L2 = tl.constexpr(2)
LAYER = tl.constexpr(3)
# Rows of a tile by half the head size: 1024 pairs, 8 for each of 128 threads, so that 16-bit data loads 16 bytes each.
_ROWS = {8: 64, 16: 64, 32: 32, 64: 16, 128: 8, 256: 4, 512: 2}
_PROGRAMS = 2048  # in backward with a shared gain: several for each of 132 processors
_PROGRAMS_BY_HEAD = 256  # with a gain per head, so that partial sums stay small next to q and k


@triton.jit
def _rows(pid, heads, times, outer, blocks, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Returns sequence, head and time of each row of tile `pid`, and which rows exist."""
    row = tl.arange(0, HEADS * TOKENS)
    token = pid // blocks * TOKENS + row // HEADS
    head = pid % blocks * HEADS + row % HEADS
    return (
        (token // times).to(tl.int64),
        head.to(tl.int64),
        (token % times).to(tl.int64),
        (token < outer) & (head < heads),
    )


@triton.jit
def _pieces(p, at, ok, D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr):
    """Loads the two numbers of each pair and the unrotated rest of the rows from `at` on, in float32; absent numbers
    are 0.

    At STEP 1 pairs are x_i and x_{i+half}, at STEP 2 x_2i and x_{2i+1}.
    """
    i, j, row = tl.arange(0, WIDE)[None, :], tl.arange(0, TAIL)[None, :], (p + at)[:, None]
    pair, rest = ok[:, None] & (i < HALF), ok[:, None] & (j < D - 2 * HALF)
    a = tl.load(row + STEP * i, mask=pair, other=0.0).to(tl.float32)
    b = tl.load(row + STEP * i + (HALF if STEP == 1 else 1), mask=pair, other=0.0).to(tl.float32)
    c = tl.load(row + 2 * HALF + j, mask=rest, other=0.0).to(tl.float32)
    return a, b, c


@triton.jit
def _store(
    p, at, ok, a, b, c,
    D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Stores three pieces at the locations from which `_pieces` loads them."""
    i, j, row = tl.arange(0, WIDE)[None, :], tl.arange(0, TAIL)[None, :], (p + at)[:, None]
    pair, rest = ok[:, None] & (i < HALF), ok[:, None] & (j < D - 2 * HALF)
    kind = p.dtype.element_ty
    tl.store(row + STEP * i, a.to(kind), mask=pair)
    tl.store(row + STEP * i + (HALF if STEP == 1 else 1), b.to(kind), mask=pair)
    tl.store(row + 2 * HALF + j, c.to(kind), mask=rest)


@triton.jit
def _gains(
    gain, head, ok, gain_h, gain_d,
    D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Returns the gain of each number of the rows, however it is shared; 1 if there is no gain."""
    i, j, row = tl.arange(0, WIDE)[None, :], tl.arange(0, TAIL)[None, :], (gain + head * gain_h)[:, None]
    pair, rest = ok[:, None] & (i < HALF), ok[:, None] & (j < D - 2 * HALF)
    a = tl.load(row + STEP * i * gain_d, mask=pair, other=1.0).to(tl.float32)
    b = tl.load(row + (STEP * i + (HALF if STEP == 1 else 1)) * gain_d, mask=pair, other=1.0).to(tl.float32)
    c = tl.load(row + (2 * HALF + j) * gain_d, mask=rest, other=1.0).to(tl.float32)
    return a, b, c


@triton.jit
def _angles(cos, sin, at, ok, HALF: tl.constexpr, WIDE: tl.constexpr):
    i = tl.arange(0, WIDE)[None, :]
    inside = ok[:, None] & (i < HALF)
    c = tl.load(cos + at[:, None] + i, mask=inside, other=1.0)
    s = tl.load(sin + at[:, None] + i, mask=inside, other=0.0)
    return c, s


@triton.jit
def _turn(a, b, c, s):
    return a * c - b * s, b * c + a * s


@triton.jit
def _total(a, b, c, WHOLE: tl.constexpr):
    """Returns the sum of each row; with WHOLE the sum over all heads of a token, which make up the tile."""
    total = tl.sum(a, 1) + tl.sum(b, 1) + tl.sum(c, 1)
    return tl.zeros([total.shape[0]], tl.float32) + tl.sum(total, 0) if WHOLE else total


@triton.jit
def _centred(
    a, b, c, ok, n,
    D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Returns the pieces minus the mean of the n numbers that are normed together; absent numbers stay 0."""
    mean = (_total(a, b, c, WHOLE) / n)[:, None]
    pair = ok[:, None] & (tl.arange(0, WIDE)[None, :] < HALF)
    rest = ok[:, None] & (tl.arange(0, TAIL)[None, :] < D - 2 * HALF)
    return tl.where(pair, a - mean, 0.0), tl.where(pair, b - mean, 0.0), tl.where(rest, c - mean, 0.0)


@triton.jit
def _inverse(a, b, c, ok, eps, n, KIND: tl.constexpr, WHOLE: tl.constexpr):
    """Returns 1 / size of the n numbers that are normed together, or 1 for absent rows; NaN stays NaN."""
    squares = _total(a * a, b * b, c * c, WHOLE)
    if KIND == L2:
        size = tl.maximum(tl.sqrt_rn(squares), eps, propagate_nan=tl.PropagateNan.ALL)
    else:
        size = tl.sqrt_rn(squares / n + eps)
    return tl.div_rn(tl.full(size.shape, 1.0, tl.float32), tl.where(ok, size, 1.0))


@triton.jit
def forward(
    before, x, y, inverse, gain, cos, sin, eps, heads, times, outer, blocks,
    x_b, x_h, x_t, y_b, y_h, y_t, gain_h, gain_d, cos_b, cos_t,
    D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr,
    KIND: tl.constexpr, GAIN: tl.constexpr, TURN: tl.constexpr, INVERSES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Forward pass of one tensor, executed by the programs of a launch from number `before` on."""
    n, head, time, ok = _rows(tl.program_id(0) - before, heads, times, outer, blocks, HEADS, TOKENS)
    a, b, c = _pieces(x, n * x_b + head * x_h + time * x_t, ok, D, HALF, WIDE, TAIL, STEP)
    if KIND == LAYER:
        a, b, c = _centred(a, b, c, ok, D * heads if WHOLE else D, D, HALF, WIDE, TAIL, WHOLE)
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
    a, b, c, k, ga, gb, gc, cosine, sine, ok, n,
    D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr,
    KIND: tl.constexpr, GAIN: tl.constexpr, TURN: tl.constexpr, KEPT_X: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Returns x̂, the normed row before its gain, from the kept tensor: x, or y = rotation(gain · x̂)."""
    if KEPT_X:
        if KIND == LAYER:
            a, b, c = _centred(a, b, c, ok, n, D, HALF, WIDE, TAIL, WHOLE)
        a, b, c = a * k[:, None], b * k[:, None], c * k[:, None]
    else:
        if TURN:
            undo = 1.0 / (cosine * cosine + sine * sine)  # tables such as YaRN's also stretch
            a, b = _turn(a, b, cosine * undo, -sine * undo)
        if GAIN:
            a, b, c = a / ga, b / gb, c / gc
    return a, b, c


@triton.jit
def backward(
    before, dy, kept, inverse, gain, cos, sin, dx, parts, eps, heads, times, outer, blocks, groups, each,
    u_b, u_h, u_t, k_b, k_h, k_t, x_b, x_h, x_t, gain_h, gain_d, cos_b, cos_t,
    D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr,
    KIND: tl.constexpr, GAIN: tl.constexpr, BY_HEAD: tl.constexpr, TURN: tl.constexpr, KEPT_X: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Backward pass of one tensor, executed by the programs of a launch from number `before` on."""
    pid = tl.program_id(0) - before
    chunk, block = pid // blocks, pid % blocks
    size = D * heads if WHOLE else D
    da = tl.zeros([HEADS * TOKENS, WIDE], tl.float32)
    db = tl.zeros([HEADS * TOKENS, WIDE], tl.float32)
    dc = tl.zeros([HEADS * TOKENS, TAIL], tl.float32)
    ga, gb, gc, cosine, sine = da, da, dc, da, da  # placeholders if there is no gain or table
    for group in range(chunk * each, tl.minimum(chunk * each + each, groups)):
        n, head, time, ok = _rows(group * blocks + block, heads, times, outer, blocks, HEADS, TOKENS)
        ua, ub, uc = _pieces(dy, n * u_b + head * u_h + time * u_t, ok, D, HALF, WIDE, TAIL, STEP)
        a, b, c = _pieces(kept, n * k_b + head * k_h + time * k_t, ok, D, HALF, WIDE, TAIL, STEP)
        k = tl.load(inverse + (n * times + time) * heads + head, mask=ok, other=1.0)
        if GAIN:
            ga, gb, gc = _gains(gain, head, ok, gain_h, gain_d, D, HALF, WIDE, TAIL, STEP)
        if TURN:
            cosine, sine = _angles(cos, sin, n * cos_b + time * cos_t, ok, HALF, WIDE)
            ua, ub = _turn(ua, ub, cosine, -sine)
        a, b, c = _hat(
            a, b, c, k, ga, gb, gc, cosine, sine, ok, size, D, HALF, WIDE, TAIL, KIND, GAIN, TURN, KEPT_X, WHOLE
        )
        if GAIN:
            da, db, dc = da + ua * a, db + ub * b, dc + uc * c
            ua, ub, uc = ua * ga, ub * gb, uc * gc
        along = _total(ua * a, ub * b, uc * c, WHOLE)
        along = tl.where(k < 1.0 / eps, along, 0.0) if KIND == L2 else along / size
        mean = (_total(ua, ub, uc, WHOLE) / size if KIND == LAYER else along * 0.0)[:, None]
        k, along = k[:, None], along[:, None]
        a, b, c = k * (ua - mean - a * along), k * (ub - mean - b * along), k * (uc - mean - c * along)
        _store(dx, n * x_b + head * x_h + time * x_t, ok, a, b, c, D, HALF, WIDE, TAIL, STEP)
    if GAIN:
        _keep_sums(pid, parts, da, db, dc, chunk, block, heads, D, HALF, WIDE, TAIL, STEP, HEADS, BY_HEAD)


@triton.jit
def _keep_sums(
    pid, parts, da, db, dc, chunk, block, heads,
    D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr,
    HEADS: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Stores this program's part of the gain's gradient: [chunks h d], or [programs d] if heads share the gain."""
    if BY_HEAD:  # such a tile has a single token
        head = block * HEADS + tl.arange(0, HEADS)
        _store(parts, (chunk * heads + head) * D, head < heads, da, db, dc, D, HALF, WIDE, TAIL, STEP)
    else:
        one = tl.zeros([1], tl.int32)
        a, b, c = tl.sum(da, 0, keep_dims=True), tl.sum(db, 0, keep_dims=True), tl.sum(dc, 0, keep_dims=True)
        _store(parts, (one + pid) * D, one == 0, a, b, c, D, HALF, WIDE, TAIL, STEP)


def norm_rope(
    x: Float[Tensor, "b h t d"],
    gain: Tensor | None,
    table: tuple[Tensor, Tensor] | None,
    kind: int,
    eps: float,
    keep_x: bool,
    step: int = 1,
) -> Float[Tensor, "b h t d"]:
    """Returns rotation(gain · norm(x)), in x's dtype and layout; arguments as in `kernels.native.operators.norm_rope`.

    step: 1 for pairs x_i and x_{i+half}, 2 for pairs x_2i and x_{2i+1}.
    """
    cos, sin = (None, None) if table is None else (table[0].contiguous(), table[1].contiguous())
    own = torch.ops.qkeel_triton
    if not (torch.is_grad_enabled() and (x.requires_grad or (gain is not None and gain.requires_grad))):
        return own.norm_rope_alone(x, gain, cos, sin, kind, eps, step)
    return own.norm_rope(x, gain, cos, sin, kind, eps, step, keep_x)[0]


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _constants(
    x: Tensor, gain: Tensor | None, cos: Tensor | None, kind: int, step: int, by_head: bool = False
) -> dict[str, int]:
    """Returns the constants of a launch: tile sizes, the requested computation, and warps for whole tokens."""
    d, h, whole = x.shape[-1], x.shape[1], kind >= WHOLE
    half = d // 2 if cos is None else cos.shape[-1]
    wide, tail = max(8, triton.next_power_of_2(half)), triton.next_power_of_2(max(1, d - 2 * half))
    rows = _ROWS[max(wide, triton.next_power_of_2(triton.cdiv(tail, 2)))]
    heads = triton.next_power_of_2(h) if whole else min(rows, triton.next_power_of_2(h))
    tile = {"HEADS": heads, "TOKENS": 1 if by_head or whole else rows // heads}
    tile |= {"num_warps": 4 * max(1, heads // rows)} if whole else {}
    flags = {"KIND": kind % WHOLE, "WHOLE": whole, "GAIN": gain is not None, "TURN": cos is not None, "STEP": step}
    return {"D": d, "HALF": half, "WIDE": wide, "TAIL": tail, **tile, **flags}


def _steps(x: Tensor, gain: Tensor | None, cos: Tensor | None) -> tuple[int, int, int, int]:
    """Returns the strides of the gain along heads and dimensions, and of the tables along sequences and tokens; 0 if
    shared."""
    per_head = gain.stride(0) if gain is not None and gain.ndim == 2 else 0
    per_dim = gain.stride(-1) if gain is not None and gain.ndim and gain.shape[-1] > 1 else 0
    if cos is None:
        return per_head, per_dim, 0, 0
    return per_head, per_dim, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(2) if cos.shape[2] > 1 else 0


class Launch(NamedTuple):
    """The launch of a kernel for one tensor: outputs, number of programs, arguments and constants."""

    out: tuple[Tensor, Tensor]
    programs: int
    arguments: tuple[Tensor | float, ...]
    constants: dict[str, int]


def there(
    x: Tensor, gain: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    kind: int, eps: float, step: int, inverses: bool,
) -> Launch:  # fmt: skip
    """Returns the launch for norm and rotation of x, and for its inverse norms if requested."""
    x = _dense(x)
    y, (b, h, t, _) = torch.empty_like(x), x.shape
    inverse = x.new_empty((b, t, h) if inverses and kind != NONE else (0,), dtype=torch.float32)
    constants = {**_constants(x, gain, cos, kind, step), "INVERSES": inverse.numel() > 0}
    blocks, groups = triton.cdiv(h, constants["HEADS"]), triton.cdiv(b * t, constants["TOKENS"])
    given = tuple(x if one is None else one for one in (gain, cos, sin))
    steps = (*x.stride()[:3], *y.stride()[:3], *_steps(x, gain, cos))
    arguments = (x, y, inverse if constants["INVERSES"] else x, *given, eps, h, t, b * t, blocks, *steps)
    return Launch((y, inverse), blocks * groups, arguments, constants)


def _launched(kernel: TritonObject, launch: Launch) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(launch.out[0]):
        kernel[(launch.programs,)](0, *launch.arguments, **launch.constants)
    return launch.out


def _run_alone(*how: TritonObject) -> Tensor:
    return _launched(forward, there(*[*how, False]))[0]


def _run_tracked(*how: TritonObject) -> tuple[Tensor, Tensor]:
    return _launched(forward, there(*[*how[:-1], True]))  # the last argument tells backward what is kept


def back(
    dy: Tensor, kept: Tensor, inverse: Tensor, gain: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    *how: TritonObject,
) -> Launch:  # fmt: skip
    """Returns the launch for the gradient of x and for parts of the gain's gradient."""
    kind, eps, step, kept_x = how
    dy, kept = _dense(dy), _dense(kept)
    dx = torch.empty_like(kept)
    b, h, t, d = kept.shape
    by_head = gain is not None and gain.ndim == 2
    constants = {**_constants(kept, gain, cos, kind, step, by_head), "BY_HEAD": by_head, "KEPT_X": kept_x}
    blocks, groups = triton.cdiv(h, constants["HEADS"]), triton.cdiv(b * t, constants["TOKENS"])
    most = groups if gain is None else max(1, (_PROGRAMS_BY_HEAD if by_head else _PROGRAMS) // blocks)
    each = triton.cdiv(groups, min(most, groups))
    chunks = triton.cdiv(groups, each)
    shape = (0, 1, d) if gain is None else (chunks, h, d) if by_head else (chunks * blocks, 1, d)
    parts = kept.new_empty(shape, dtype=torch.float32)
    given = tuple(kept if one is None else one for one in (gain, cos, sin))
    steps = (*dy.stride()[:3], *kept.stride()[:3], *dx.stride()[:3], *_steps(kept, gain, cos))
    own = (dx, kept if gain is None else parts, eps, h, t, b * t, blocks, groups, each)
    return Launch((dx, parts), chunks * blocks, (dy, kept, inverse, *given, *own, *steps), constants)


def summed(parts: Tensor) -> Tensor:
    """Sums the parts of the gain's gradient to [h or 1 d], in an order that depends only on shapes; empty if there is
    no gain."""
    return parts.sum(0) if parts.numel() else parts.new_empty(0)


def _run_back(*how: TritonObject) -> tuple[Tensor, Tensor]:
    dx, parts = _launched(backward, back(*how))
    return dx, summed(parts)


def _forward_shapes(x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    b, h, t, _ = x.shape
    return same_shape(x), x.new_empty((b, t, h) if rest[3] != NONE else (0,), dtype=torch.float32)


def _setup(ctx: TritonObject, inputs: tuple[TritonObject, ...], output: tuple[Tensor, Tensor]) -> None:
    x, gain, cos, sin, ctx.kind, ctx.eps, ctx.step, ctx.keep_x = inputs
    y, inverse = output
    ctx.save_for_backward(None if ctx.kind == NONE else x if ctx.keep_x else y, inverse, gain, cos, sin)
    ctx.mark_non_differentiable(inverse)


def _derivative(ctx: TritonObject, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    kept, inverse, gain, cos, sin = ctx.saved_tensors
    own = torch.ops.qkeel_triton
    if ctx.kind == NONE:  # the inverse rotation undoes a rotation and is differentiable itself
        back = None if sin is None else -sin
        return own.norm_rope(dy, None, cos, back, NONE, ctx.eps, ctx.step, False)[0], *[None] * 7
    dx, over = own.norm_rope_backward(dy, kept, inverse, gain, cos, sin, ctx.kind, ctx.eps, ctx.step, ctx.keep_x)
    dgain = None if gain is None else over.sum_to_size(gain.shape).to(gain.dtype)
    return dx, dgain, *[None] * 6


def once(*_: object) -> None:
    """Refuses a second derivative."""
    raise RuntimeError(
        "the fused norm and rotation can be differentiated only once; set QKEEL_TRITON=0 for higher derivatives"
    )


# Norm, gain and rotation of q and k in one launch, and their derivative in another.
#
# The programs of q come first, then those of k. Each does the same as the kernels for one tensor, so results are equal
# bit for bit. Not measured on a GPU yet.


@triton.jit
def _forward_two(
    x_q, y_q, inverse_q, gain_q, cos_q, sin_q, eps_q, heads_q, times_q, outer_q, blocks_q, x_b_q, x_h_q, x_t_q,
    y_b_q, y_h_q, y_t_q, gain_h_q, gain_d_q, cos_b_q, cos_t_q,
    x_k, y_k, inverse_k, gain_k, cos_k, sin_k, eps_k, heads_k, times_k, outer_k, blocks_k, x_b_k, x_h_k, x_t_k,
    y_b_k, y_h_k, y_t_k, gain_h_k, gain_d_k, cos_b_k, cos_t_k,
    programs,
    D_Q: tl.constexpr, HALF_Q: tl.constexpr, WIDE_Q: tl.constexpr, TAIL_Q: tl.constexpr, HEADS_Q: tl.constexpr,
    TOKENS_Q: tl.constexpr, STEP_Q: tl.constexpr, KIND_Q: tl.constexpr, GAIN_Q: tl.constexpr, TURN_Q: tl.constexpr,
    INVERSES_Q: tl.constexpr, WHOLE_Q: tl.constexpr,
    D_K: tl.constexpr, HALF_K: tl.constexpr, WIDE_K: tl.constexpr, TAIL_K: tl.constexpr, HEADS_K: tl.constexpr,
    TOKENS_K: tl.constexpr, STEP_K: tl.constexpr, KIND_K: tl.constexpr, GAIN_K: tl.constexpr, TURN_K: tl.constexpr,
    INVERSES_K: tl.constexpr, WHOLE_K: tl.constexpr,
):  # fmt: skip
    """Runs the programs of q, then of k."""
    if tl.program_id(0) < programs:
        forward(
            0, x_q, y_q, inverse_q, gain_q, cos_q, sin_q, eps_q, heads_q, times_q, outer_q, blocks_q, x_b_q,
            x_h_q, x_t_q, y_b_q, y_h_q, y_t_q, gain_h_q, gain_d_q, cos_b_q, cos_t_q,
            D_Q, HALF_Q, WIDE_Q, TAIL_Q, HEADS_Q, TOKENS_Q, STEP_Q, KIND_Q, GAIN_Q, TURN_Q, INVERSES_Q, WHOLE_Q,
        )  # fmt: skip
    else:
        forward(
            programs, x_k, y_k, inverse_k, gain_k, cos_k, sin_k, eps_k, heads_k, times_k, outer_k, blocks_k,
            x_b_k, x_h_k, x_t_k, y_b_k, y_h_k, y_t_k, gain_h_k, gain_d_k, cos_b_k, cos_t_k,
            D_K, HALF_K, WIDE_K, TAIL_K, HEADS_K, TOKENS_K, STEP_K, KIND_K, GAIN_K, TURN_K, INVERSES_K, WHOLE_K,
        )  # fmt: skip


@triton.jit
def _backward_two(
    dy_q, kept_q, inverse_q, gain_q, cos_q, sin_q, dx_q, parts_q, eps_q, heads_q, times_q, outer_q, blocks_q,
    groups_q, each_q, u_b_q, u_h_q, u_t_q, k_b_q, k_h_q, k_t_q, x_b_q, x_h_q, x_t_q, gain_h_q, gain_d_q, cos_b_q,
    cos_t_q,
    dy_k, kept_k, inverse_k, gain_k, cos_k, sin_k, dx_k, parts_k, eps_k, heads_k, times_k, outer_k, blocks_k,
    groups_k, each_k, u_b_k, u_h_k, u_t_k, k_b_k, k_h_k, k_t_k, x_b_k, x_h_k, x_t_k, gain_h_k, gain_d_k, cos_b_k,
    cos_t_k,
    programs,
    D_Q: tl.constexpr, HALF_Q: tl.constexpr, WIDE_Q: tl.constexpr, TAIL_Q: tl.constexpr, HEADS_Q: tl.constexpr,
    TOKENS_Q: tl.constexpr, STEP_Q: tl.constexpr, KIND_Q: tl.constexpr, GAIN_Q: tl.constexpr, BY_HEAD_Q: tl.constexpr,
    TURN_Q: tl.constexpr, KEPT_X_Q: tl.constexpr, WHOLE_Q: tl.constexpr,
    D_K: tl.constexpr, HALF_K: tl.constexpr, WIDE_K: tl.constexpr, TAIL_K: tl.constexpr, HEADS_K: tl.constexpr,
    TOKENS_K: tl.constexpr, STEP_K: tl.constexpr, KIND_K: tl.constexpr, GAIN_K: tl.constexpr, BY_HEAD_K: tl.constexpr,
    TURN_K: tl.constexpr, KEPT_X_K: tl.constexpr, WHOLE_K: tl.constexpr,
):  # fmt: skip
    """Runs the programs of q, then of k."""
    if tl.program_id(0) < programs:
        backward(
            0, dy_q, kept_q, inverse_q, gain_q, cos_q, sin_q, dx_q, parts_q, eps_q, heads_q, times_q, outer_q,
            blocks_q, groups_q, each_q, u_b_q, u_h_q, u_t_q, k_b_q, k_h_q, k_t_q, x_b_q, x_h_q, x_t_q, gain_h_q,
            gain_d_q, cos_b_q, cos_t_q,
            D_Q, HALF_Q, WIDE_Q, TAIL_Q, HEADS_Q, TOKENS_Q, STEP_Q, KIND_Q, GAIN_Q, BY_HEAD_Q, TURN_Q, KEPT_X_Q,
            WHOLE_Q,
        )  # fmt: skip
    else:
        backward(
            programs, dy_k, kept_k, inverse_k, gain_k, cos_k, sin_k, dx_k, parts_k, eps_k, heads_k, times_k,
            outer_k, blocks_k, groups_k, each_k, u_b_k, u_h_k, u_t_k, k_b_k, k_h_k, k_t_k, x_b_k, x_h_k, x_t_k,
            gain_h_k, gain_d_k, cos_b_k, cos_t_k,
            D_K, HALF_K, WIDE_K, TAIL_K, HEADS_K, TOKENS_K, STEP_K, KIND_K, GAIN_K, BY_HEAD_K, TURN_K, KEPT_X_K,
            WHOLE_K,
        )  # fmt: skip


def norm_rope_two(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g t d"],
    gains: tuple[Tensor | None, Tensor | None],
    table: tuple[Tensor, Tensor] | None,
    kinds: tuple[int, int],
    eps: float,
    keep: tuple[bool, bool],
    step: int = 1,
) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b g t d"]]:
    """Returns rotation(gain · norm(x)) of q and of k, bit for bit as in two separate calls.

    Args:
        q: queries.
        k: keys, of the same dtype and device.
        gains: the gains for q and for k, each as in `norm_rope`.
        table: cos and sin, for both q and k.
        kinds: the kinds of norm for q and for k; either both are a norm or neither is.
        eps: eps of the norms.
        keep: for q and for k, whether to keep x for backward.
        step: as in `norm_rope`, for both q and k.
    """
    cos, sin = (None, None) if table is None else (table[0].contiguous(), table[1].contiguous())
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, *gains))
    found = torch.ops.qkeel_triton.norm_rope_two(q, k, *gains, cos, sin, *kinds, eps, step, *keep, tracked)
    return found[0], found[1]


def _launch(kernel: TritonObject, q: Launch, k: Launch) -> None:
    sides = {"Q": {**q.constants}, "K": {**k.constants}}
    warps = [side.pop("num_warps", 0) for side in sides.values()]
    constants = {f"{name}_{end}": x for end, side in sides.items() for name, x in side.items()}
    if any(warps):
        constants["num_warps"] = max(warps)
    with torch.cuda.device_of(q.out[0]):
        kernel[(q.programs + k.programs,)](*q.arguments, *k.arguments, q.programs, **constants)


def _run(q: Tensor, k: Tensor, *how: TritonObject) -> tuple[Tensor, ...]:
    gain_q, gain_k, cos, sin, kind_q, kind_k, eps, step, _, _, tracked = how
    sides = [there(x, g, cos, sin, n, eps, step, tracked) for x, g, n in ((q, gain_q, kind_q), (k, gain_k, kind_k))]
    _launch(_forward_two, *sides)
    return sides[0].out[0], sides[1].out[0], sides[0].out[1], sides[1].out[1]


def _shapes(q: Tensor, k: Tensor, *how: TritonObject) -> tuple[Tensor, ...]:
    inverses = [
        x.new_empty((x.shape[0], x.shape[2], x.shape[1]) if how[-1] and kind != NONE else (0,), dtype=torch.float32)
        for x, kind in ((q, how[4]), (k, how[5]))
    ]
    return same_shape(q), same_shape(k), *inverses


def _run_two_back(dq: Tensor, dk: Tensor, *rest: TritonObject) -> tuple[Tensor, ...]:
    kept_q, kept_k, inverse_q, inverse_k, gain_q, gain_k, cos, sin, kind_q, kind_k, eps, step, x_q, x_k = rest
    q = back(dq, kept_q, inverse_q, gain_q, cos, sin, kind_q, eps, step, x_q)
    k = back(dk, kept_k, inverse_k, gain_k, cos, sin, kind_k, eps, step, x_k)
    _launch(_backward_two, q, k)
    return q.out[0], k.out[0], summed(q.out[1]), summed(k.out[1])


def _shapes_back(dq: Tensor, dk: Tensor, *rest: TritonObject) -> tuple[Tensor, ...]:
    kept_q, kept_k, inverse_q, inverse_k, gain_q, gain_k, *_ = rest
    q, k = backward_shapes(dq, kept_q, inverse_q, gain_q), backward_shapes(dk, kept_k, inverse_k, gain_k)
    return q[0], k[0], q[1], k[1]


def _setup_two(ctx: TritonObject, inputs: tuple[TritonObject, ...], output: tuple[Tensor, ...]) -> None:
    q, k, gain_q, gain_k, cos, sin, kind_q, kind_k, eps, step, keep_q, keep_k, _ = inputs
    yq, yk, *inverses = output
    ctx.how = kind_q, kind_k, eps, step, keep_q, keep_k
    kept = (None, None) if kind_q == NONE else (q if keep_q else yq, k if keep_k else yk)
    ctx.save_for_backward(*kept, *inverses, gain_q, gain_k, cos, sin)
    ctx.mark_non_differentiable(*inverses)


def _derivative_of_two(ctx: TritonObject, dq: Tensor, dk: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors
    gain_q, gain_k, cos, sin = kept[-4:]
    own = torch.ops.qkeel_triton
    if ctx.how[0] == NONE:  # the inverse rotation undoes a rotation and is differentiable itself
        found = own.norm_rope_two(dq, dk, None, None, cos, -sin, *ctx.how, torch.is_grad_enabled())
        return found[0], found[1], *[None] * 11
    xq, xk, over_q, over_k = own.norm_rope_two_backward(dq, dk, *kept, *ctx.how)
    gains = [
        None if gain is None else over.sum_to_size(gain.shape).to(gain.dtype)
        for gain, over in ((gain_q, over_q), (gain_k, over_k))
    ]
    return xq, xk, *gains, *[None] * 9


def register() -> None:
    """Registers the operators with torch: implementation, shapes and derivative."""
    one = "Tensor? gain, Tensor? cos, Tensor? sin, int kind, float eps, int step"
    two = "Tensor? gain_q, Tensor? gain_k, Tensor? cos, Tensor? sin, int kind_q, int kind_k, float eps, int step"
    kept = "Tensor kept_q, Tensor kept_k, Tensor inverse_q, Tensor inverse_k"
    for name, given, results, run, shapes in (
        ("norm_rope", f"Tensor x, {one}, bool keep_x", 2, _run_tracked, _forward_shapes),
        ("norm_rope_alone", f"Tensor x, {one}", 1, _run_alone, same_shape),
        (
            "norm_rope_backward",
            f"Tensor dy, Tensor kept, Tensor inverse, {one}, bool kept_x",
            2,
            _run_back,
            backward_shapes,
        ),
        ("norm_rope_two", f"Tensor q, Tensor k, {two}, bool keep_q, bool keep_k, bool tracked", 4, _run, _shapes),
        (
            "norm_rope_two_backward",
            f"Tensor dq, Tensor dk, {kept}, {two}, bool x_q, bool x_k",
            4,
            _run_two_back,
            _shapes_back,
        ),
    ):
        torch.library.define(f"qkeel_triton::{name}", f"({given}) -> ({', '.join(['Tensor'] * results)})")
        torch.library.impl(f"qkeel_triton::{name}", ("cuda", "cpu"), run)  # on a CPU in interpreter mode only
        torch.library.register_fake(f"qkeel_triton::{name}", shapes)
    torch.library.register_autograd("qkeel_triton::norm_rope", _derivative, setup_context=_setup)
    torch.library.register_autograd("qkeel_triton::norm_rope_two", _derivative_of_two, setup_context=_setup_two)
    for name in ("norm_rope_backward", "norm_rope_two_backward"):
        torch.library.register_autograd(f"qkeel_triton::{name}", once)
