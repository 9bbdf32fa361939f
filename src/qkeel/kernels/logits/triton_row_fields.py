"""All statistics of every query row of a call, computed from q and k in one pass by a Triton kernel.

The pass computes only one of attention's two matrix products, and needs neither the values nor a T×T matrix. It returns
what the compiled pass on a CPU returns (`kernels.logits.compiled`): the fields of `functional.statistics.ROW_FIELDS`
in one tensor. The entropy is updated together with the sum of exponentials while the maximum grows: W ← f (W + L (M -
M')), L ← f L, f = e^(M - M'); H = ln L - W / L. So nothing cancels at large logits. The sum of squared exponentials
fades by f².

Shapes: b batch, h query heads, g key heads, t queries, s keys, d dimensions per head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # not on every system
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.language import constexpr  # pyright: ignore[reportMissingImports]

from qkeel.functional.statistics import ROW_FIELDS
from qkeel.kernels.logits.triton_visible_keys import (
    dense,
    key_mask,
    reach,
    tile_sizes,
    visible,
)

# Rows, keys and warps of a tile by head size, in 16 bits and in float32: the fewest instructions a logit of those that
# spill no registers on Hopper.
_TILES = {
    16: (64, 64, 4),
    32: (64, 64, 4),
    64: (64, 64, 4),
    128: (128, 64, 8),
    256: (64, 32, 8),
}
_TILES_FLOAT32 = {
    16: (64, 32, 4),
    32: (64, 32, 4),
    64: (64, 32, 4),
    128: (32, 32, 4),
    256: (16, 16, 4),
}
# The kernel finds a field by a product in 32 bits.
MOST_ROWS = (2**31 - 1) // (len(ROW_FIELDS) - 1)
_LOG2_E, _LN_2 = constexpr(1.4426950408889634), constexpr(0.6931471805599453)
# No key.
_NONE = constexpr(2**31 - 1)
_YES, _NO = constexpr(True), constexpr(False)


@triton.jit
def capped(z, cap, CAP: constexpr):
    """Returns cap · tanh(z / cap), computed with an exponential that cannot overflow."""
    if CAP:
        e = tl.exp(-2.0 * tl.abs(z) / cap)
        t = cap * (1.0 - e) / (1.0 + e)
        z = tl.where(z < 0, -t, t)
    return z


@triton.jit
def _add(
    x,
    y,
    inverse,
    factor,
    cap,
    threshold,
    is_visible,
    key,
    top,
    low,
    most,
    mass,
    along,
    mass_squares,
    total,
    level,
    above,
    squares,
    widest,
    cosines,
    n,
    begin,
    CAP: constexpr,
    MASK: constexpr,
    ALL: constexpr,
):
    """Adds a tile of keys to the running statistics of the rows; with ALL, every key is seen.

    `most`, `mass`, `along` and `mass_squares` refer to logits in units of ln 2. All weights of a tile are relative to
    the same rounded maximum, so its rounding cancels from the entropy.
    """
    # Triton's default for float32 is TF32, which would round q and k to 10 bits.
    products = tl.dot(x, y, input_precision="ieee")
    if not ALL:
        # a hidden key may hold anything.
        products = tl.where(is_visible, products, 0.0)
        n += tl.sum(is_visible.to(tl.int32), 1)
        if MASK:
            begin = tl.minimum(
                begin, tl.min(tl.where(is_visible, key[None, :], _NONE), 1)
            )
    else:
        n += products.shape[1]
    total += tl.sum(products, 1)
    squares += tl.sum(products * products, 1)
    # Divided by the norms of the keys here, and by those of the queries at the end.
    angles = products * inverse[None, :]
    angles = angles if ALL else tl.where(is_visible, angles, 0.0)
    cosines += tl.sum(angles, 1)
    widest = tl.maximum(
        widest,
        tl.max(angles if ALL else tl.where(is_visible, angles, float("-inf")), 1),
    )
    most_product = tl.max(
        products if ALL else tl.where(is_visible, products, float("-inf")), 1
    )
    least_product = tl.min(
        products if ALL else tl.where(is_visible, products, float("inf")), 1
    )
    # No key of the tile is seen; and with a negative factor the extremes trade places.
    none, up = least_product > most_product, factor >= 0  # pyright: ignore[reportOperatorIssue]
    largest = tl.where(none, 0.0, tl.where(up, most_product, least_product)) * factor
    least = tl.where(none, 0.0, tl.where(up, least_product, most_product)) * factor
    largest, low = (
        tl.where(none, float("-inf"), largest),
        tl.minimum(low, tl.where(none, float("inf"), least)),
    )
    top = tl.maximum(top, largest)
    # Most tiles have no logit above it, so counting costs nothing there.
    if tl.max(largest, 0) > threshold:
        over = products * factor[:, None] > threshold
        above += tl.sum((over if ALL else over & is_visible).to(tl.int32), 1)
    # A cap is monotone, so the largest capped logit is that of the largest logit.
    highest = capped(tl.where(none, 0.0, largest), cap, CAP) * _LOG2_E
    # The running maximum, to which all weights are relative.
    new = tl.maximum(most, tl.where(none, float("-inf"), highest))
    # Before the first key any finite number works.
    base = tl.where(new == float("-inf"), 0.0, new)
    was = tl.where(most == float("-inf"), base, most)
    if CAP:
        # 0 where nothing is seen, as the product is there.
        entering = capped(products * factor[:, None], cap, CAP)
        level += tl.sum(entering, 1)
        away = entering * _LOG2_E - base[:, None]
    else:
        away = products * (factor * _LOG2_E)[:, None] - base[:, None]
    # What a hidden key holds must not reach a sum.
    away = away if ALL else tl.where(is_visible, away, 0.0)
    p = tl.exp2(away)
    p = p if ALL else tl.where(is_visible, p, 0.0)
    # What was summed under the former maximum counts less now.
    fade = tl.exp2(was - base)
    along = fade * (along + mass * (was - base)) + tl.sum(p * away, 1)
    mass_squares = fade * fade * mass_squares + tl.sum(p * p, 1)
    mass = fade * mass + tl.sum(p, 1)
    return (
        top,
        low,
        new,
        mass,
        along,
        mass_squares,
        total,
        level,
        above,
        squares,
        widest,
        cosines,
        n,
        begin,
    )


@triton.jit
def _fields(
    q,
    k,
    inverses,
    keys,
    scales,
    fields,
    counts,
    scale,
    cap,
    threshold,
    heads,
    share,
    times,
    length,
    tiles,
    rows_in_all,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    keys_b,
    keys_s,
    scales_b,
    scales_h,
    scales_t,
    D: constexpr,
    WIDE: constexpr,
    ROWS: constexpr,
    KEYS: constexpr,
    CAUSAL: constexpr,
    MASK: constexpr,
    CAP: constexpr,
    SCALED: constexpr,
):
    # Sequence and head.
    of = (tl.program_id(0) // tiles).to(tl.int64)
    n, h = of // heads, of % heads
    # Longest rows first under a causal mask.
    start = (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    row, i = start + tl.arange(0, ROWS), tl.arange(0, WIDE)
    ok = row < times
    # Queries are aligned to the end of the keys.
    past_keys = length - times
    at = row + past_keys
    query_rows = q + n * q_b + h * q_h + row.to(tl.int64)[:, None] * q_t + i[None, :]
    x = tl.load(query_rows, mask=ok[:, None] & (i[None, :] < D), other=0.0)
    factor = tl.zeros([ROWS], tl.float32) + scale
    if SCALED:
        factor = tl.load(
            scales + n * scales_b + h * scales_h + row * scales_t, mask=ok, other=1.0
        )
    begin, shared_end, stop = reach(
        start + past_keys,
        start + ROWS - 1 + past_keys,
        length,
        0,
        KEYS,
        CAUSAL,
        _NO,
        MASK,
    )
    nothing = tl.zeros([ROWS], tl.float32)
    top = nothing + float("-inf")
    low, most = -top, top
    mass, along, mass_squares = nothing, nothing, nothing
    total, squares, level = nothing, nothing, nothing
    widest, cosines = top, nothing
    above, seen_keys = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    first = tl.zeros([ROWS], tl.int32) + (_NONE if MASK else 0)
    theirs, turns = (
        k + n * k_b + (h // share) * k_h,
        inverses + (n * (heads // share) + h // share) * length,
    )
    # Tiles that every row sees need no mask.
    for past in range(begin, shared_end, KEYS):
        key = past + tl.arange(0, KEYS)
        y = tl.load(
            theirs + key.to(tl.int64)[None, :] * k_t + i[:, None],
            mask=i[:, None] < D,
            other=0.0,
        )
        inverse = tl.load(turns + key)
        (
            top,
            low,
            most,
            mass,
            along,
            mass_squares,
            total,
            level,
            above,
            squares,
            widest,
            cosines,
            seen_keys,
            first,
        ) = _add(
            x,
            y,
            inverse,
            factor,
            cap,
            threshold,
            True,
            key,
            top,
            low,
            most,
            mass,
            along,
            mass_squares,
            total,
            level,
            above,
            squares,
            widest,
            cosines,
            seen_keys,
            first,
            CAP,
            MASK,
            _YES,
        )
    for past in range(shared_end, stop, KEYS):
        key = past + tl.arange(0, KEYS)
        y = tl.load(
            theirs + key.to(tl.int64)[None, :] * k_t + i[:, None],
            mask=(key[None, :] < length) & (i[:, None] < D),
            other=0.0,
        )
        is_visible = visible(
            keys + n * keys_b,
            key,
            at,
            ok,
            length,
            0,
            keys_s,
            CAUSAL,
            _NO,
            MASK,
        )
        inverse = tl.load(turns + key, mask=key < length, other=0.0)
        (
            top,
            low,
            most,
            mass,
            along,
            mass_squares,
            total,
            level,
            above,
            squares,
            widest,
            cosines,
            seen_keys,
            first,
        ) = _add(
            x,
            y,
            inverse,
            factor,
            cap,
            threshold,
            is_visible,
            key,
            top,
            low,
            most,
            mass,
            along,
            mass_squares,
            total,
            level,
            above,
            squares,
            widest,
            cosines,
            seen_keys,
            first,
            CAP,
            MASK,
            _NO,
        )
    sees_a_key = seen_keys > 0
    # The logit of the first key again, because the running sums do not keep it.
    row_and_key = sees_a_key & ok
    z = tl.load(
        theirs + first.to(tl.int64)[:, None] * k_t + i[None, :],
        mask=row_and_key[:, None] & (i[None, :] < D),
        other=0.0,
    )
    wide = x.to(tl.float32)
    z = tl.sum(wide * z.to(tl.float32), 1)
    z = capped(z * factor, cap, CAP) * _LOG2_E if CAP else z * (factor * _LOG2_E)
    norm = tl.sqrt(tl.sum(wide * wide, 1))
    inverse = tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 0.0)
    # The hardware's maxima drop NaN, sums do not, so the sums show rows with a NaN or infinite logit.
    nan, full = float("nan"), mass > 0
    lost = mass != mass
    # Such a row sees only logits of -inf, so it has no weights.
    bad = lost | (sees_a_key & ((mass == 0) & (low <= top)))
    logs = tl.log(tl.where(full, mass, 1.0))
    spread = logs - along / tl.where(full, mass, 1.0) * _LN_2
    weight = tl.exp2(z - tl.where(sees_a_key, most, 0.0)) / tl.where(full, mass, 1.0)
    of_squares = mass_squares / tl.where(full, mass * mass, 1.0)
    unknown = lost & (top != float("inf"))
    best = tl.where(
        sees_a_key, capped(tl.where(sees_a_key, top, 0.0), cap, CAP), float("-inf")
    )
    cosine, turned = tl.where(sees_a_key, widest, 0.0) * inverse, cosines * inverse
    count = seen_keys.to(tl.float32)
    # 1 - Σp² over that of uniform attention, 1 - 1 / count. Rows with fewer than two keys are left out by whoever reads.
    gradient = (1.0 - of_squares) * count / tl.maximum(count - 1.0, 1.0)
    # Without a cap, the sum of what enters the softmax is that of the logits.
    mean = (level if CAP else total * factor) / tl.where(sees_a_key, count, 1.0)
    apart = tl.where(sees_a_key, best - mean, float("-inf"))
    to = fields + of * times + row
    tl.store(to, tl.where(unknown, nan, top), mask=ok)
    tl.store(to + rows_in_all, tl.where(unknown, nan, low), mask=ok)
    tl.store(to + 2 * rows_in_all, tl.where(unknown, nan, apart), mask=ok)
    tl.store(to + 3 * rows_in_all, tl.where(unknown, nan, best), mask=ok)
    tl.store(to + 4 * rows_in_all, total * factor, mask=ok)
    tl.store(to + 5 * rows_in_all, above.to(tl.float32), mask=ok)
    entropy = tl.where(bad | (spread != spread), nan, tl.where(spread > 0, spread, 0.0))
    tl.store(to + 6 * rows_in_all, entropy, mask=ok)
    tl.store(to + 7 * rows_in_all, tl.where(bad, nan, tl.minimum(weight, 1.0)), mask=ok)
    tl.store(
        to + 8 * rows_in_all,
        tl.where(bad, nan, tl.minimum(tl.maximum(gradient, 0.0), 1.0)),
        mask=ok,
    )
    tl.store(to + 9 * rows_in_all, tl.sqrt(squares), mask=ok)
    tl.store(
        to + 10 * rows_in_all,
        tl.where(lost, nan, tl.minimum(tl.maximum(cosine, -1.0), 1.0)),
        mask=ok,
    )
    # Keeps NaN.
    turned = tl.where(turned > count, count, tl.where(turned < -count, -count, turned))
    tl.store(to + 11 * rows_in_all, turned, mask=ok)
    tl.store(to + 12 * rows_in_all, norm, mask=ok)
    tl.store(counts + of * times + row, seen_keys.to(tl.int64), mask=ok)


LAUNCHED: dict[str, Any] = {"fields": _fields}


def row_fields(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    scale: float | Tensor,
    threshold: float,
    *,
    causal: bool,
    cap: float | None = None,
    keys: Bool[Tensor, "_ s"] | None = None,
) -> tuple[Float[Tensor, "fields b h t"], Int[Tensor, "b h t"], Float[Tensor, "b g s"]]:
    """Returns ROW_FIELDS of all rows, the number of keys that each row sees, and the key norms.

    A row with a NaN logit has NaN in its extremes, sums and entropy. A row with an infinite logit has NaN as its
    entropy. The fields of a row that sees no key are meaningless.

    Args:
        q: encoded queries: float32, bfloat16 or float16; d at most 256.
        k: encoded keys of the same dtype; h / g query heads share a key head.
        scale: factor on the products, a number or a tensor that broadcasts to [b h t 1].
        threshold: logits above it are counted, in nats.
        causal: a query sees the keys up to its position, with positions aligned at the end.
        cap: cap of a softcap, or None.
        keys: True where a key may be visible, for all sequences or for each.
    """
    assert len(ROW_FIELDS) == 13
    b, h, t, d = q.shape
    g, s = k.shape[1:3]
    q, k = dense(q), dense(k)
    wide, _ = tile_sizes(q)
    rows, columns, warps = (_TILES_FLOAT32 if q.dtype == torch.float32 else _TILES)[
        wide
    ]
    norms = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32)
    # A key of zeros has only products of 0; the clamp keeps its inverse norm finite.
    inverse = norms.clamp_min(torch.finfo(torch.float32).tiny).reciprocal()
    fields = q.new_empty((len(ROW_FIELDS), b, h, t), dtype=torch.float32)
    counts = q.new_empty((b, h, t), dtype=torch.int64)
    number = not isinstance(scale, Tensor)
    # The norms stand in for a tensor that is not read.
    scales = norms if number else scale.float().expand(b, h, t, 1)
    mask, over = key_mask(q, keys)
    tiles = triton.cdiv(t, rows)
    with torch.cuda.device_of(q):
        LAUNCHED["fields"][(tiles * b * h,)](
            q,
            k,
            inverse,
            mask,
            scales,
            fields,
            counts,
            scale if number else 1.0,
            cap or 1.0,
            threshold,
            h,
            h // g,
            t,
            s,
            tiles,
            b * h * t,
            *q.stride()[:3],
            *k.stride()[:3],
            *over,
            *((0, 0, 0) if number else scales.stride()[:3]),
            D=d,
            WIDE=wide,
            ROWS=rows,
            KEYS=columns,
            CAUSAL=causal,
            MASK=keys is not None,
            CAP=cap is not None,
            SCALED=not number,
            num_warps=warps,
        )
    return fields, counts, norms
