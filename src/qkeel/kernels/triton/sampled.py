"""The exact extreme logits of every head in one pass, and its entropy from a sample of rows with its error, in Triton.

The extremes read every logit, for a product and two comparisons each; where logsumexps of rows are known, tiles in
which none can hold the largest logit are left out. The entropy is read from two rows of each stratum of consecutive
positions, so rows that see few keys and rows that see many are in the sample as often as in the whole.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]  # not on every system
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkeel.kernels.triton.available import HeadNumbers
from qkeel.kernels.triton.statistics import (
    LAUNCHED,
    Spans,
    bounds,
    dense,
    first_and_last,
    key_mask,
    stratum,
    tile_sizes,
    visible,
)

_ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _extremes(
    q, k, keys, starts, stops, counted, lse, bars, tops, lows, scale, heads, share, times, length, window,
    tiles, q_b, q_h, q_t, k_b, k_h, k_t, keys_b, keys_s,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SPANS: tl.constexpr, COUNTED: tl.constexpr,
    BARS: tl.constexpr,
):  # fmt: skip
    """The largest and the smallest logit of a tile of rows, NaN where one is; -inf and inf where nothing was read."""
    of = (tl.program_id(0) // tiles).to(tl.int64)  # which sequence and head
    n, h = of // heads, of % heads
    tile = tiles - 1 - tl.program_id(0) % tiles  # under a causal mask the longest rows first
    row, i = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    ok = row < times
    if COUNTED:
        ok = ok & (tl.load(counted + n * times + row, mask=ok, other=0) != 0)
    at, first = row + length - times, tile * ROWS + length - times
    own = q + n * q_b + h * q_h + row.to(tl.int64)[:, None] * q_t + i[None, :]
    x = tl.load(own, mask=ok[:, None] & (i[None, :] < D), other=0.0)
    low_key, high_key, begin, whole, stop = bounds(
        starts, stops, row, ok, first, first + ROWS - 1, length, window, KEYS, CAUSAL, WINDOW, MASK, SPANS
    )
    if BARS:  # a logit is at most its row's logsumexp; NaN is not less
        might = ok & ~(tl.load(lse + of * times + row, mask=ok, other=0.0) < tl.load(bars + h))
        none = tl.sum(might.to(tl.int32), 0) == 0
        whole, stop = tl.where(none, begin, whole), tl.where(none, begin, stop)
    top = tl.full([ROWS, KEYS], float("-inf"), tl.float32)
    low = -top
    theirs = k + n * k_b + (h // share) * k_h + i[:, None]
    for past in range(begin, whole, KEYS):
        key = past + tl.arange(0, KEYS)
        y = tl.load(theirs + key.to(tl.int64)[None, :] * k_t, mask=i[:, None] < D, other=0.0)
        z = tl.dot(x, y, input_precision="ieee")
        top, low = tl.maximum(top, z, propagate_nan=_ALL), tl.minimum(low, z, propagate_nan=_ALL)
    for past in range(whole, stop, KEYS):
        key = past + tl.arange(0, KEYS)
        y = tl.load(
            theirs + key.to(tl.int64)[None, :] * k_t, mask=(key[None, :] < length) & (i[:, None] < D), other=0.0
        )
        z = tl.dot(x, y, input_precision="ieee")
        seen = visible(
            keys + n * keys_b, key, at, ok, low_key, high_key, length, window, keys_s, CAUSAL, WINDOW, MASK, SPANS
        )
        top = tl.maximum(top, tl.where(seen, z, float("-inf")), propagate_nan=_ALL)
        low = tl.minimum(low, tl.where(seen, z, float("inf")), propagate_nan=_ALL)
    top, low = tl.where(ok[:, None], top, float("-inf")), tl.where(ok[:, None], low, float("inf"))
    lost = tl.sum(tl.sum((top != top).to(tl.int32), 1), 0) != 0  # a maximum over registers drops NaN
    tl.store(tops + of * tiles + tile, tl.where(lost, float("nan"), tl.max(tl.max(top, 1), 0) * scale))
    tl.store(lows + of * tiles + tile, tl.where(lost, float("nan"), tl.min(tl.min(low, 1), 0) * scale))


@triton.jit
def _bracket(
    lse, counted, ends, batch, heads, times, length, CAUSAL: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr
):
    """One head: ends [2 h] are the largest lse - ln n and the largest lse of the rows that count."""
    h = tl.program_id(0)
    low = tl.full([BLOCK], float("-inf"), tl.float32)
    high = low
    for start in range(0, batch * times, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < batch * times
        if COUNTED:
            inside = inside & (tl.load(counted + i, mask=inside, other=0) != 0)
        x = tl.load(lse + ((i // times).to(tl.int64) * heads + h) * times + i % times, mask=inside, other=float("-inf"))
        n = i % times + length - times + 1 if CAUSAL else i * 0 + length
        low = tl.maximum(low, x - tl.log(tl.maximum(n, 1).to(tl.float32)), propagate_nan=_ALL)
        high = tl.maximum(high, x, propagate_nan=_ALL)
    lost = tl.sum((high != high).to(tl.int32), 0) != 0
    tl.store(ends + h, tl.where(lost, float("nan"), tl.max(low, 0)))
    tl.store(ends + heads + h, tl.where(lost, float("nan"), tl.max(high, 0)))


@triton.jit
def _value(lse, entropy, picked, counted, at, to, n, times, inside, MASK: tl.constexpr):
    """The entropy of a sampled row, and 1 if it counts and sees a key, else 0 and 0."""
    over = inside & (tl.load(lse + at, mask=inside, other=float("-inf")) != float("-inf"))  # NaN is to be seen
    if MASK:
        row = tl.load(picked + to, mask=inside, other=0)
        over = over & (tl.load(counted + n * times + row, mask=inside, other=0) != 0)
    return tl.load(entropy + at, mask=over, other=0.0), over.to(tl.float32)


@triton.jit
def _pair(lse, entropy, picked, counted, i, h, heads, strata, times, inside, MASK: tl.constexpr):
    """The two sampled rows of stratum `i % strata` of sequence `i // strata`, and how many rows it has."""
    n, u = (i // strata).to(tl.int64), i % strata
    _, size = stratum(u, times, strata)
    at, to = (n * heads + h) * 2 * strata + 2 * u, n * 2 * strata + 2 * u
    y, c = _value(lse, entropy, picked, counted, at, to, n, times, inside, MASK)
    z, d = _value(lse, entropy, picked, counted, at + 1, to + 1, n, times, inside, MASK)
    return y, c, z, d, tl.where(inside, size, 0).to(tl.float32)


@triton.jit
def _quantile(df):
    """Student's 97.5 % quantile for df >= 1 degrees of freedom, to 2e-4 of itself."""
    x = 1.0 / df
    return 1.9598 + x * (2.3901 + x * (2.5456 + x * (3.9425 + x * (-1.2628 + x * 3.1305))))


@triton.jit
def _sampled_heads(
    tops, lows, lse, entropy, picked, counted, numbers, counts, batch, heads, strata, times, tiles, widest,
    MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head: numbers [7 h] are largest logit, mean entropy, NaN, -inf, inf, 0, the error of the mean; see below."""
    h, j = tl.program_id(0), tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    low, total, share = -top, tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    rows, first, second = share, share, share
    for start in range(0, batch * tiles, BLOCK):
        i = start + j
        at = ((i // tiles).to(tl.int64) * heads + h) * tiles + i % tiles
        top = tl.maximum(top, tl.load(tops + at, mask=i < batch * tiles, other=float("-inf")), propagate_nan=_ALL)
        low = tl.minimum(low, tl.load(lows + at, mask=i < batch * tiles, other=float("inf")), propagate_nan=_ALL)
    for start in range(0, batch * strata, BLOCK):
        i = start + j
        y, c, z, d, size = _pair(lse, entropy, picked, counted, i, h, heads, strata, times, i < batch * strata, MASK)
        total, share, rows = total + size * (y + z) / 2, share + size * (c + d) / 2, rows + c + d
    n, seen = tl.sum(share, 0), tl.sum(rows, 0)
    mean = tl.sum(total, 0) / tl.maximum(n, 1.0)
    for start in range(0, batch * strata, BLOCK):
        i = start + j
        y, c, z, d, size = _pair(lse, entropy, picked, counted, i, h, heads, strata, times, i < batch * strata, MASK)
        apart = c * (y - mean) - d * (z - mean)
        v = size * (size - 2) * apart * apart / 4
        first, second = first + v, second + v * v
    v, vv = tl.sum(first, 0), tl.sum(second, 0)
    df = tl.maximum(v * v / tl.maximum(vv, 1e-30), 1.0)
    unseen = (1 - seen / tl.maximum(n, 1.0)) * tl.minimum(2.9957 / tl.maximum(seen, 1.0), 1.0)
    error = _quantile(df) * tl.sqrt(v) / tl.maximum(n, 1.0) + unseen * tl.maximum(mean, widest - mean)
    lost = tl.sum(((top != top) | (top == float("inf")) | (low == float("-inf"))).to(tl.int32), 0) != 0
    nan = float("nan")
    tl.store(numbers + h, tl.where(tl.sum((top != top).to(tl.int32), 0) != 0, nan, tl.max(top, 0)))
    tl.store(numbers + heads + h, tl.where(lost, nan, mean))
    tl.store(numbers + 2 * heads + h, nan)
    tl.store(numbers + 3 * heads + h, float("-inf"))
    tl.store(numbers + 4 * heads + h, float("inf"))
    tl.store(numbers + 5 * heads + h, 0.0)
    tl.store(numbers + 6 * heads + h, tl.where(lost | (mean != mean), nan, tl.where(seen != 0, error, 0.0)))
    tl.store(counts + h, tl.floor(n + 0.5).to(tl.int64))
    tl.store(counts + heads + h, tl.zeros([], tl.int64))


LAUNCHED.update(extremes=_extremes, bracket=_bracket, sampled_heads=_sampled_heads)


def bracket_of(
    lse: Float[Tensor, "b h t"], n_keys: int, *, causal: bool, counted: Bool[Tensor, "b t"] | None = None
) -> Float[Tensor, "2 h"]:
    """Bounds on the largest logit of each head from logsumexps of rows without mask and window, in one launch.

    max_i (lse_i - ln n_i) and max_i lse_i over the rows that count; n_i keys are visible to row i. A NaN is passed on.
    """
    b, h, t = lse.shape
    ends, lse = lse.new_empty((2, h), dtype=torch.float32), lse.contiguous()
    mask = lse if counted is None else counted.contiguous().to(torch.uint8)
    with torch.cuda.device_of(lse):
        LAUNCHED["bracket"][(h,)](
            lse, mask, ends, b, h, t, n_keys, CAUSAL=causal, COUNTED=counted is not None, BLOCK=1024
        )
    return ends


def extremes(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    scale: float,
    *,
    causal: bool,
    window: int | Spans | None = None,
    keys: Bool[Tensor, "_ s"] | None = None,
    counted: Bool[Tensor, "b t"] | None = None,
    known: tuple[Float[Tensor, "b h t"], Float[Tensor, " h"]] | None = None,
) -> tuple[Float[Tensor, "b h tiles"], Float[Tensor, "b h tiles"]]:
    """Returns the largest and the smallest logit, before a cap, of tiles of rows; NaN where a logit is.

    Args:
        q, k, scale, causal, window, keys: as of `statistics.row_statistics`.
        counted: which query rows count; None: all.
        known: logsumexps of the rows, and a number that the largest logit of each head reaches. With them a tile is
            read only if one of its logsumexps is no less, and the smallest logit is that of the tiles that were read.
    """
    b, h, t, d = q.shape
    g, s = k.shape[1:3]
    if scale <= 0:
        q, scale = q * scale, 1.0
    q, k = dense(q), dense(k)
    wide, tile = tile_sizes(q)
    near = None if isinstance(window, tuple) else window
    tiles = triton.cdiv(t, tile[0])
    tops, lows = (q.new_empty((b, h, tiles), dtype=torch.float32) for _ in range(2))
    mask, over = key_mask(q, keys)
    rows = q if counted is None else counted.contiguous().to(torch.uint8)
    with torch.cuda.device_of(q):
        LAUNCHED["extremes"][(tiles * b * h,)](
            q, k, mask, *first_and_last(window, q), rows,
            *((q, q) if known is None else (known[0].contiguous(), known[1])), tops, lows, scale,
            h, h // g, t, s, near or 0, tiles, *q.stride()[:3], *k.stride()[:3], *over,
            D=d, WIDE=wide, ROWS=tile[0], KEYS=tile[1], CAUSAL=causal, WINDOW=near is not None,
            MASK=keys is not None, SPANS=isinstance(window, tuple), COUNTED=counted is not None,
            BARS=known is not None, num_warps=tile[2],
        )  # fmt: skip
    return tops, lows


def head_numbers(
    tops: tuple[Float[Tensor, "b h tiles"], Float[Tensor, "b h tiles"]],
    rows: tuple[Float[Tensor, "b h r"], Float[Tensor, "b h r"], Int[Tensor, "b r"]],
    t: int,
    widest: float,
    counted: Bool[Tensor, "b t"] | None,
) -> HeadNumbers:
    """Returns the statistics of heads in one launch, their entropy as the mean over a sample of rows, with its error.

    With N_u rows in stratum u, y and z the entropies of its two, N = Σ N_u and H̄ = Σ N_u (y + z) / 2N, the error is
    half the width of a 95 % interval: t √(Σ N_u (N_u - 2) (y - z)² / 4) / N, t Student's quantile at Satterthwaite's
    degrees of freedom, and (1 - n/N) · ln 20 / n · max(H̄, ln s - H̄) for what a sample of n rows misses of rare rows
    at a possible extreme. Rows that do not count or see nothing are left out of sums and strata, so with those N is
    an estimate. Every head with a logit that is NaN or infinite has NaN for entropy and error.

    Args:
        tops: of `extremes`. rows: lse and entropy of the sampled rows and which ones they are, of `rows_of`.
        t: query rows of a sequence. widest: the largest entropy that a row can have, ln s.
        counted: which query rows count; None: all.
    """
    lse, entropy, picked = rows
    b, h, r = lse.shape
    numbers, counts = lse.new_empty((7, h)), lse.new_empty((2, h), dtype=torch.int64)
    mask = lse if counted is None else counted.contiguous().to(torch.uint8)
    with torch.cuda.device_of(lse):
        LAUNCHED["sampled_heads"][(h,)](
            *tops, lse, entropy, picked, mask, numbers, counts, b, h, r // 2, t, tops[0].shape[2], widest,
            MASK=counted is not None, BLOCK=512,
        )  # fmt: skip
    return HeadNumbers.of(numbers, counts, numbers[6])
