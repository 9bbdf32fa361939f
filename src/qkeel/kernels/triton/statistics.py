"""Per-head statistics of attention logits as Triton kernels: exact, and over sampled rows."""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # not on every system
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkeel.kernels.triton.available import HeadNumbers, RowNumbers

# Largest and smallest logit, logsumexp and entropy of every query row from q and k alone, in one pass.
#
# This computes only one of attention's two matrix products, and needs neither the values nor a T×T matrix. The entropy
# is updated together with the sum of exponentials while the maximum grows (W ← f (W + L (M - M')), L ← f L, f = e^(M -
# M'); H = ln L - W / L), so nothing cancels at large logits. The hardware's maxima drop NaN, sums do not, so the sums
# reveal rows with a NaN or infinite logit. Not measured on a GPU yet.

# Rows, keys and warps of a tile by head size: what fits in the registers of Ampere and Hopper in 16 bits.
_TILES = {16: (128, 64, 4), 32: (128, 64, 4), 64: (128, 64, 4), 128: (128, 64, 8), 256: (64, 64, 8)}
_TILES_FLOAT32 = {16: (64, 32, 4), 32: (64, 32, 4), 64: (64, 32, 4), 128: (32, 32, 4), 256: (16, 16, 4)}
_SAMPLED_ROWS = 64
_LOG2_E = tl.constexpr(1.4426950408889634)
_YES, _NO = tl.constexpr(True), tl.constexpr(False)


@triton.jit
def capped(z, cap, CAP: tl.constexpr):
    """Returns cap · tanh(z / cap), computed with an exponential that cannot overflow."""
    if CAP:
        e = tl.exp(-2.0 * tl.abs(z) / cap)
        t = cap * (1.0 - e) / (1.0 + e)
        z = tl.where(z < 0, -t, t)
    return z


@triton.jit
def _more(q, k, scale, cap, seen, top, low, most, mass, along, CAP: tl.constexpr, ALL: tl.constexpr):
    """Adds a block of keys with logits z [rows keys], restricted to `seen`; with ALL, every key is seen."""
    z = tl.dot(q, k, input_precision="ieee") * scale
    low = tl.minimum(low, tl.min(z if ALL else tl.where(seen, z, float("inf")), 1))
    z = z if ALL else tl.where(seen, z, float("-inf"))
    largest = tl.max(z, 1)
    if CAP:
        top = tl.maximum(top, largest)
        z = capped(z, cap, CAP) if ALL else tl.where(seen, capped(z, cap, CAP), float("-inf"))
        largest = tl.max(z, 1)
    new = tl.maximum(most, largest)
    base = tl.where(new == float("-inf"), 0.0, new)  # before the first key any finite number works
    was = tl.where(most == float("-inf"), base, most)
    away = z - base[:, None]
    p = tl.exp2(away * _LOG2_E)  # tl.exp spends four more instructions on numbers below 1e-38
    if not ALL:
        away, p = tl.where(seen, away, 0.0), tl.where(seen, p, 0.0)
    fade = tl.exp(was - base)
    along = fade * (along + mass * (was - base)) + tl.sum(p * away, 1)
    mass = fade * mass + tl.sum(p, 1)
    return top if CAP else new, low, new, mass, along


@triton.jit
def stratum(u, times, strata):
    """Returns the first row and the number of rows of stratum `u`; sizes of strata differ by at most one row."""
    size, more = times // strata, times % strata
    return u * size + tl.minimum(u, more), size + (u < more).to(tl.int32)


@triton.jit
def _sampled(r, n, times, strata, seed):
    """Returns the row of index `r` in the sample of sequence `n`: two distinct rows per stratum, by Philox."""
    u = r // 2
    begin, size = stratum(u, times, strata)
    at = (n.to(tl.int32) * strata + u) * 2
    one = tl.minimum((tl.rand(seed, at) * size).to(tl.int32), size - 1)
    other = one + 1 + tl.minimum((tl.rand(seed, at + 1) * (size - 1)).to(tl.int32), size - 2)
    return begin + tl.where(r % 2 == 0, one, other) % size


@triton.jit
def reach(
    first, last, length, window, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr
):
    """Returns, for rows at positions `first` to `last`, where their keys begin, the end of the complete tiles that all
    rows see, and where their keys end.
    """
    stop = tl.minimum(length, tl.maximum(last + 1, 0)) if CAUSAL else length
    begin = 0
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0) // KEYS * KEYS
        stop = tl.minimum(stop, tl.maximum(last + window, 0))
    whole = begin
    if not (WINDOW or MASK):
        whole = (tl.minimum(length, tl.maximum(first + 1, 0)) if CAUSAL else length) // KEYS * KEYS
    return begin, whole, stop


@triton.jit
def span(starts, stops, row, ok, length, KEYS: tl.constexpr) -> Any:
    """Returns the first key that each row sees and the key after the last; and, for all rows together, the first key,
    the end of the complete tiles that every row sees, and the end of the last key.
    """
    low, high = tl.load(starts + row, mask=ok, other=0), tl.load(stops + row, mask=ok, other=0)
    some = low < high
    begin = tl.min(tl.where(some, low, length), 0)
    stop = tl.max(tl.where(some, high, 0), 0)
    shared = tl.min(tl.where(some, high, tl.where(ok, begin, length)), 0)  # a row that sees nothing shares no tile
    alike = tl.max(tl.where(some, low, begin), 0) == begin
    whole = begin + tl.where(alike, tl.maximum(shared - begin, 0), 0) // KEYS * KEYS  # pyright: ignore[reportOperatorIssue]
    return low, high, begin, whole, stop


@triton.jit
def bounds(
    starts, stops, row, ok, first, last, length, window,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SPANS: tl.constexpr,
) -> Any:  # fmt: skip
    """Like `span`, but without spans it returns the result of `reach` and placeholders for the ends of each row."""
    low, high = row, row
    if SPANS:
        low, high, begin, whole, stop = span(starts, stops, row, ok, length, KEYS)
        whole = begin if MASK else whole
    else:
        begin, whole, stop = reach(first, last, length, window, KEYS, CAUSAL, WINDOW, MASK)
    return low, high, begin, whole, stop


@triton.jit
def visible(
    keys, key, at, ok, low, high, length, window, keys_s,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Returns which keys of a tile the rows at positions `at` see; `keys` is their sequence's key mask."""
    inside, away = key < length, at[:, None] - key[None, :]
    seen = inside[None, :] & ok[:, None]
    if SPANS:
        seen = seen & (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
    if CAUSAL:
        seen = seen & (away >= 0)
    if WINDOW:
        seen = seen & (away < window) & (away > -window)
    if MASK:
        seen = seen & (tl.load(keys + key * keys_s, mask=inside, other=0) != 0)[None, :]
    return seen


@triton.jit
def _rows(
    q, k, keys, starts, stops, largest, smallest, lse, entropy, picked, scale, cap, heads, share, times, length, window,
    tiles, seed, count, strata, q_b, q_h, q_t, k_b, k_h, k_t, keys_b, keys_s,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SPANS: tl.constexpr, CAP: tl.constexpr,
    SAMPLED: tl.constexpr,
):  # fmt: skip
    of = (tl.program_id(0) // tiles).to(tl.int64)  # sequence and head
    n, h = of // heads, of % heads
    start = (tiles - 1 - tl.program_id(0) % tiles) * ROWS  # longest rows first under a causal mask
    r, i = start + tl.arange(0, ROWS), tl.arange(0, WIDE)
    ok = r < count
    row, first, last = r, start, start + ROWS - 1
    if SAMPLED:
        row = _sampled(r, n, times, strata, seed)
        first, _ = stratum(start // 2, times, strata)
        last, size = stratum(tl.minimum((start + ROWS - 1) // 2, strata - 1), times, strata)
        last += size - 1
        if h == 0:
            tl.store(picked + n * count + r, row, mask=ok)
    past_keys = length - times  # queries are aligned to the end of the keys
    at = row + past_keys
    own = q + n * q_b + h * q_h + row.to(tl.int64)[:, None] * q_t + i[None, :]
    x = tl.load(own, mask=ok[:, None] & (i[None, :] < D), other=0.0)
    low_key, high_key, begin, whole, stop = bounds(
        starts, stops, row, ok, first + past_keys, last + past_keys, length, window, KEYS, CAUSAL, WINDOW, MASK, SPANS
    )
    top = tl.full([ROWS], float("-inf"), tl.float32)
    low, most, mass, along = -top, top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    theirs = k + n * k_b + (h // share) * k_h + i[:, None]
    for past in range(begin, whole, KEYS):  # half the instructions of a masked tile
        key = past + tl.arange(0, KEYS)
        y = tl.load(theirs + key.to(tl.int64)[None, :] * k_t, mask=i[:, None] < D, other=0.0)
        top, low, most, mass, along = _more(x, y, scale, cap, True, top, low, most, mass, along, CAP, _YES)
    for past in range(whole, stop, KEYS):
        key = past + tl.arange(0, KEYS)
        y = tl.load(
            theirs + key.to(tl.int64)[None, :] * k_t, mask=(key[None, :] < length) & (i[:, None] < D), other=0.0
        )
        seen = visible(
            keys + n * keys_b, key, at, ok, low_key, high_key, length, window, keys_s, CAUSAL, WINDOW, MASK, SPANS
        )
        top, low, most, mass, along = _more(x, y, scale, cap, seen, top, low, most, mass, along, CAP, _NO)
    _put(largest, smallest, lse, entropy, of * count + r, ok, top, low, most, mass, along)


@triton.jit
def _put(largest, smallest, lse, entropy, to, ok, top, low, most, mass, along):
    nan, some = float("nan"), mass > 0
    lost = mass != mass  # NaN or +inf among the logits; rows of -inf only sum to 0
    bad = lost | ((mass == 0) & (low <= top))
    total = tl.log(tl.where(some, mass, 1.0))
    spread = total - along / tl.where(some, mass, 1.0)  # NaN if a logit is -inf
    unknown = lost & (top != float("inf"))
    tl.store(largest + to, tl.where(unknown, nan, top), mask=ok)
    tl.store(smallest + to, tl.where(unknown, nan, low), mask=ok)
    tl.store(lse + to, tl.where(bad, nan, tl.where(some, most + total, float("-inf"))), mask=ok)
    tl.store(entropy + to, tl.where(bad | (spread != spread), nan, tl.where(spread > 0, spread, 0.0)), mask=ok)


Spans = tuple[Int[Tensor, "1 t"], Int[Tensor, "1 t"]]
LAUNCHED: dict[str, Any] = {"rows": _rows}


def tile_sizes(q: Float[Tensor, "b h t d"]) -> tuple[int, tuple[int, int, int]]:
    """Returns the width of q as a power of two, and rows, keys and warps of a tile."""
    wide = max(16, triton.next_power_of_2(q.shape[-1]))
    return wide, (_TILES_FLOAT32 if q.dtype == torch.float32 else _TILES)[wide]


def key_mask(q: Tensor, keys: Bool[Tensor, "_ s"] | None) -> tuple[Tensor, tuple[int, int]]:
    """Returns the key mask for the kernels (a placeholder if there is none) and its strides."""
    mask = q if keys is None else keys.to(torch.uint8)
    return mask, (0, 0) if keys is None else (mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(1))


def first_and_last(window: int | Spans | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the two ends of spans for the kernels; placeholders if there are none."""
    return (window[0][0].to(torch.int32), window[1][0].to(torch.int32)) if isinstance(window, tuple) else (q, q)


def dense(x: Tensor) -> Tensor:
    """Returns the tensor with contiguous rows."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def row_statistics(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    scale: float,
    *,
    causal: bool,
    window: int | Spans | None = None,
    cap: float | None = None,
    keys: Bool[Tensor, "_ s"] | None = None,
) -> RowNumbers:
    """Returns the statistics of the rows of logits scale · q kᵀ [b h t s] without forming these logits.

    A row with a NaN logit has NaN in all four. A row with an infinite logit has NaN for lse and entropy, unlike a row
    that sees no key.

    Args:
        q: encoded queries: float32, bfloat16 or float16; d at most 256.
        k: encoded keys of the same dtype; h / g query heads share a key head.
        scale: factor on the logits.
        causal: a query sees the keys up to its position, with positions aligned at the end.
        window: a query sees only keys fewer than this many positions away. If two tensors are given instead (without
            `causal`), each row sees the keys from its first index up to, but not including, its second, the same for
            all sequences.
        cap: the cap of a softcap; the largest and smallest logit are taken before it, the lse and entropy after it.
        keys: True where a key may be visible, for all sequences or for each.
    """
    found, _ = rows_of(q, k, scale, causal=causal, window=window, cap=cap, keys=keys)
    return found


def rows_of(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    scale: float,
    *,
    causal: bool,
    window: int | Spans | None = None,
    cap: float | None = None,
    keys: Bool[Tensor, "_ s"] | None = None,
    sample: tuple[int, int] = (0, 0),
) -> tuple[RowNumbers, Int[Tensor, "b r"]]:
    """Returns row statistics of a sample of rows, and the indices of these rows.

    Args:
        q: as in `row_statistics`, like k, scale, causal, window, cap and keys.
        sample: the number of strata of consecutive rows and the seed. Two rows of each stratum are drawn, the same for
            all heads of a sequence. A stratum has t / strata rows, at least two; 0 strata selects all rows.
    """
    strata, seed = sample
    b, h, t, d = q.shape
    g, s = k.shape[1:3]
    q, k = dense(q), dense(k)
    wide, tile = tile_sizes(q)
    if strata:  # a tile of sampled rows spans many more rows, whose keys are masked
        tile = min(tile[0], _SAMPLED_ROWS), *tile[1:]
    count, near = 2 * strata or t, None if isinstance(window, tuple) else window
    largest, smallest, lse, entropy = (q.new_empty((b, h, count), dtype=torch.float32) for _ in range(4))
    picked = q.new_empty((b, 2 * strata), dtype=torch.int32)
    mask, over = key_mask(q, keys)
    tiles = triton.cdiv(count, tile[0])
    with torch.cuda.device_of(q):
        LAUNCHED["rows"][(tiles * b * h,)](
            q, k, mask, *first_and_last(window, q), largest, smallest, lse, entropy, picked, scale,
            cap or 1.0, h, h // g, t, s, near or 0, tiles, seed, count, strata,
            *q.stride()[:3], *k.stride()[:3], *over,
            D=d, WIDE=wide, ROWS=tile[0], KEYS=tile[1], CAUSAL=causal, WINDOW=near is not None,
            MASK=keys is not None, SPANS=isinstance(window, tuple), CAP=cap is not None,
            SAMPLED=strata > 0, num_warps=tile[2],
        )  # fmt: skip
    return RowNumbers(largest, smallest, lse, entropy), picked


# Exact extreme logits of every head in one pass, and its entropy with an error from a sample of rows.
#
# The extremes take a product and two comparisons per logit. If logsumexps of rows are known, tiles that cannot hold the
# largest logit are skipped. The entropy comes from two rows of each stratum of consecutive positions, so rows that see
# few keys and rows that see many are represented as in the whole.

_ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _extremes(
    q, k, keys, starts, stops, counted, lse, bars, tops, lows, scale, heads, share, times, length, window,
    tiles, q_b, q_h, q_t, k_b, k_h, k_t, keys_b, keys_s,
    D: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr, SPANS: tl.constexpr, COUNTED: tl.constexpr,
    BARS: tl.constexpr,
):  # fmt: skip
    """Computes the largest and smallest logit of a tile of rows: NaN if a logit is NaN, -inf and inf if nothing was
    read."""
    of = (tl.program_id(0) // tiles).to(tl.int64)  # sequence and head
    n, h = of // heads, of % heads
    tile = tiles - 1 - tl.program_id(0) % tiles  # longest rows first under a causal mask
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
    if BARS:  # a logit is at most its row's logsumexp; comparisons with NaN read the tile
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
def _value(lse, entropy, picked, counted, at, to, n, times, inside, MASK: tl.constexpr):
    """Returns the entropy of a sampled row and 1 if the row is counted and sees a key, otherwise 0 and 0."""
    over = inside & (tl.load(lse + at, mask=inside, other=float("-inf")) != float("-inf"))  # keeps NaN
    if MASK:
        row = tl.load(picked + to, mask=inside, other=0)
        over = over & (tl.load(counted + n * times + row, mask=inside, other=0) != 0)
    return tl.load(entropy + at, mask=over, other=0.0), over.to(tl.float32)


@triton.jit
def _pair(lse, entropy, picked, counted, i, h, heads, strata, times, inside, MASK: tl.constexpr):
    """Returns the two sampled rows of stratum `i % strata` of sequence `i // strata`, and its number of rows."""
    n, u = (i // strata).to(tl.int64), i % strata
    _, size = stratum(u, times, strata)
    at, to = (n * heads + h) * 2 * strata + 2 * u, n * 2 * strata + 2 * u
    y, c = _value(lse, entropy, picked, counted, at, to, n, times, inside, MASK)
    z, d = _value(lse, entropy, picked, counted, at + 1, to + 1, n, times, inside, MASK)
    return y, c, z, d, tl.where(inside, size, 0).to(tl.float32)


@triton.jit
def _quantile(df):
    """Returns Student's 97.5 % quantile for df >= 1 degrees of freedom, with relative error 2e-4."""
    x = 1.0 / df
    return 1.9598 + x * (2.3901 + x * (2.5456 + x * (3.9425 + x * (-1.2628 + x * 3.1305))))


@triton.jit
def _sampled_heads(
    tops, lows, lse, entropy, picked, counted, numbers, counts, batch, heads, strata, times, tiles, widest,
    MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduces one head to its largest logit, mean entropy, and the error of the mean; see below."""
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
    tl.store(numbers + 2 * heads + h, tl.where(lost | (mean != mean), nan, tl.where(seen != 0, error, 0.0)))
    tl.store(counts + h, tl.floor(n + 0.5).to(tl.int64))


LAUNCHED.update(extremes=_extremes, sampled_heads=_sampled_heads)


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
    """Returns the largest and the smallest logit, before a cap, of each tile of rows; NaN if a logit is NaN.

    Args:
        q: as in `row_statistics`, like k, scale, causal, window and keys.
        counted: the query rows to count; None: all.
        known: row logsumexps, and a lower bound on each head's largest logit. Tiles with smaller logsumexps are then
            skipped, and the smallest logit covers the remaining tiles only.
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


def sampled_head_numbers(
    tops: tuple[Float[Tensor, "b h tiles"], Float[Tensor, "b h tiles"]],
    rows: tuple[Float[Tensor, "b h r"], Float[Tensor, "b h r"], Int[Tensor, "b r"]],
    t: int,
    widest: float,
    counted: Bool[Tensor, "b t"] | None,
) -> HeadNumbers:
    """Returns head statistics in one launch; the entropy is the mean over sampled rows, with its error.

    Let N_u be the number of rows in stratum u, y and z the entropies of its two sampled rows, N = Σ N_u, and H̄ = Σ N_u
    (y + z) / 2N. The error is half the width of a 95 % interval: t √(Σ N_u (N_u - 2) (y - z)² / 4) / N, where t is
    Student's quantile at Satterthwaite's degrees of freedom, plus (1 - n/N) · ln 20 / n · max(H̄, ln s - H̄) for rare
    rows with extreme entropies that a sample of n rows misses. Rows that are not counted or see no key are excluded
    from sums and strata, which makes N an estimate. A head with a NaN or infinite logit has NaN for entropy and error.

    Args:
        tops: the result of `extremes`.
        rows: lse, entropy and indices of the sampled rows, from `rows_of`.
        t: query rows per sequence.
        widest: the largest possible entropy of a row, ln s.
        counted: the query rows to count; None: all.
    """
    lse, entropy, picked = rows
    b, h, r = lse.shape
    numbers, counts = lse.new_empty((3, h)), lse.new_empty(h, dtype=torch.int64)
    mask = lse if counted is None else counted.contiguous().to(torch.uint8)
    with torch.cuda.device_of(lse):
        LAUNCHED["sampled_heads"][(h,)](
            *tops, lse, entropy, picked, mask, numbers, counts, b, h, r // 2, t, tops[0].shape[2], widest,
            MASK=counted is not None, BLOCK=512,
        )  # fmt: skip
    return HeadNumbers(numbers[0], numbers[1], numbers[2], counts)
