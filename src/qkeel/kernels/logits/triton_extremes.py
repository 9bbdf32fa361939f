"""The largest and smallest logit of every query row in one Triton pass over q and k: a product and two comparisons a logit.

Neither the values nor a T×T matrix are needed."""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # not on every system
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Bool, Float
from torch import Tensor
from triton.language import constexpr  # pyright: ignore[reportMissingImports]

from qkeel.kernels.logits.triton_visible_keys import (
    dense,
    key_mask,
    reach,
    tile_sizes,
    visible,
)

_ALL = constexpr(tl.PropagateNan.ALL)


@triton.jit
def _extremes(
    q,
    k,
    keys,
    tops,
    lows,
    scale,
    heads,
    share,
    times,
    length,
    window,
    tiles,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    keys_b,
    keys_s,
    D: constexpr,
    WIDE: constexpr,
    ROWS: constexpr,
    KEYS: constexpr,
    CAUSAL: constexpr,
    WINDOW: constexpr,
    MASK: constexpr,
):
    """Computes the largest and smallest logit of each row of a tile: NaN if a logit is NaN, -inf and inf if nothing was
    read."""
    # Sequence and head.
    # In 64 bits, since offsets into long caches exceed 32.
    of = (tl.program_id(0) // tiles).to(tl.int64)
    n, h = of // heads, of % heads
    # Longest rows first under a causal mask.
    tile = tiles - 1 - tl.program_id(0) % tiles
    row, i = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    ok = row < times
    at, first = row + length - times, tile * ROWS + length - times
    query_rows = q + n * q_b + h * q_h + row.to(tl.int64)[:, None] * q_t + i[None, :]
    x = tl.load(query_rows, mask=ok[:, None] & (i[None, :] < D), other=0.0)
    begin, shared_end, stop = reach(
        first, first + ROWS - 1, length, window, KEYS, CAUSAL, WINDOW, MASK
    )
    # One running extreme for each place of the tile. They are reduced once, at the end, because a reduction across
    # threads for each tile would cost more than the comparisons.
    top = tl.full([ROWS, KEYS], float("-inf"), tl.float32)
    low = -top
    theirs = k + n * k_b + (h // share) * k_h + i[:, None]
    # Tiles that every row sees need no mask.
    for past in range(begin, shared_end, KEYS):
        key = past + tl.arange(0, KEYS)
        y = tl.load(
            theirs + key.to(tl.int64)[None, :] * k_t, mask=i[:, None] < D, other=0.0
        )
        # Triton's default for float32 is TF32, which would round q and k to 10 bits.
        z = tl.dot(x, y, input_precision="ieee")
        top, low = (
            tl.maximum(top, z, propagate_nan=_ALL),
            tl.minimum(low, z, propagate_nan=_ALL),
        )
    for past in range(shared_end, stop, KEYS):
        key = past + tl.arange(0, KEYS)
        y = tl.load(
            theirs + key.to(tl.int64)[None, :] * k_t,
            mask=(key[None, :] < length) & (i[:, None] < D),
            other=0.0,
        )
        z = tl.dot(x, y, input_precision="ieee")
        is_visible = visible(
            keys + n * keys_b,
            key,
            at,
            ok,
            length,
            window,
            keys_s,
            CAUSAL,
            WINDOW,
            MASK,
        )
        top = tl.maximum(
            top, tl.where(is_visible, z, float("-inf")), propagate_nan=_ALL
        )
        low = tl.minimum(low, tl.where(is_visible, z, float("inf")), propagate_nan=_ALL)
    # A maximum over registers drops NaN.
    lost = tl.sum((top != top).to(tl.int32), 1) != 0
    to = of * times + row
    tl.store(tops + to, tl.where(lost, float("nan"), tl.max(top, 1) * scale), mask=ok)
    tl.store(lows + to, tl.where(lost, float("nan"), tl.min(low, 1) * scale), mask=ok)


LAUNCHED: dict[str, Any] = {"extremes": _extremes}


def extremes(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    scale: float,
    *,
    causal: bool,
    window: int | None = None,
    keys: Bool[Tensor, "_ s"] | None = None,
) -> tuple[Float[Tensor, "b h t"], Float[Tensor, "b h t"]]:
    """Returns the largest and the smallest logit, before a cap, of each row; NaN if a logit is NaN, -inf and inf if the
    row sees no key.

    Args:
        q: encoded queries: float32, bfloat16 or float16; d at most 256.
        k: encoded keys of the same dtype; h / g query heads share a key head.
        scale: factor on the logits.
        causal: a query sees the keys up to its position, with positions aligned at the end.
        window: a query sees only keys fewer than this many positions away.
        keys: True where a key may be visible, for all sequences or for each.
    """
    b, h, t, d = q.shape
    g, s = k.shape[1:3]
    # The kernel scales after the pass, where a negative factor would swap largest and smallest. Half precision would
    # round q times the factor; a changed sign is exact.
    if scale <= 0:
        q, scale = (-q, -scale) if scale else (q * 0, 1.0)
    q, k = dense(q), dense(k)
    wide, tile = tile_sizes(q)
    tiles = triton.cdiv(t, tile[0])
    tops, lows = (q.new_empty((b, h, t), dtype=torch.float32) for _ in range(2))
    mask, over = key_mask(q, keys)
    with torch.cuda.device_of(q):
        LAUNCHED["extremes"][(tiles * b * h,)](
            q,
            k,
            mask,
            tops,
            lows,
            scale,
            h,
            h // g,
            t,
            s,
            window or 0,
            tiles,
            *q.stride()[:3],
            *k.stride()[:3],
            *over,
            D=d,
            WIDE=wide,
            ROWS=tile[0],
            KEYS=tile[1],
            CAUSAL=causal,
            WINDOW=window is not None,
            MASK=keys is not None,
            num_warps=tile[2],
        )
    return tops, lows
