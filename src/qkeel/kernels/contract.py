"""The kernel interface: what a kernel receives, how it refuses a call, and helpers that several kernels share.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head, e dimensions per value.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkeel.functional.norms import unrounded, wide
from qkeel.kernels.triton import available
from qkeel.spec.call import AttentionCall, BandCall
from qkeel.spec.slot import Keys, Logits, Outputs, PerRow, Queries, Values

# The kernel interface. A kernel refuses what it cannot compute exactly, with the reason, before it computes anything.


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why something cannot be done exactly, and what to do instead."""

    reason: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.way_out}"


class Kernel(abc.ABC):
    """Computes the output [b h t e] of a call."""

    @abc.abstractmethod
    def supports(self, call: AttentionCall) -> Refusal | None:
        """Returns None if this kernel computes the call exactly, otherwise the reason why it does not."""

    @abc.abstractmethod
    def __call__(self, call: AttentionCall) -> Outputs:
        """Returns the output [b h t e] in q's dtype."""


# Helpers that several kernels share: row blocks, the average of values, row statistics on a GPU.

LEAST_UNDER_WINDOW = 128  # least rows per block under a narrower window: fewer make inefficient matrix products
# Seeds for samples of rows: a new one per call, the same in every run. Odd numbers, because Triton compiles separate
# kernels for the argument 1 and for multiples of 16.
_SEEDS = itertools.count(3, 2)


def row_blocks(call: AttentionCall, elements: int, least: int = 1) -> Iterator[slice]:
    """Yields blocks of at least `least` query rows with about `elements` logits each, for O(T) memory at any T.

    Under a window, blocks are about as tall as the window is wide, so that they contain few keys outside it.
    """
    b, h, t, _ = call.q.shape
    rows = max(1, min(t, max(least, elements // max(1, b * h * call.k.shape[2]))))
    if call.window is not None:
        rows = min(rows, max(LEAST_UNDER_WINDOW, call.window))
    for start in range(0, t, rows):
        yield slice(start, min(t, start + rows))


def average(weights: Logits, v: Values) -> Outputs:
    """Returns weights [b h t s] times v [b g s e]; each key head serves h / g query heads without being repeated."""
    b, h, t, s = weights.shape
    g = v.shape[1]
    with unrounded(v):
        if g == h:
            return weights @ v
        return (weights.reshape(b, g, h // g * t, s) @ v).view(b, h, t, v.shape[-1])


def without_pairs(q: Queries, k: Keys, v: Values) -> Outputs:
    """Returns an output of zeros, with zero gradients, for calls without queries or keys."""
    share = q.shape[1] // k.shape[1]
    return (q @ k.repeat_interleave(share, 1).mT) @ v.repeat_interleave(share, 1)


class _LogitOperands(NamedTuple):
    """q, k and scale, whose product is the logits before the cap, and `how`, which says which keys are visible.

    The scale is a tensor that broadcasts to [b h t 1] if it differs by row or head."""

    q: Tensor
    k: Tensor
    scale: Any
    how: dict[str, Any]


def _read(call: AttentionCall) -> _LogitOperands | None:
    """Like `_operands`, but with a number as the scale: one that differs by row or head is multiplied into q."""
    operands = _operands(call)
    if operands is None or not isinstance(operands.scale, Tensor):
        return operands
    return operands._replace(q=operands.q * operands.scale, scale=1.0)


def _operands(call: AttentionCall, pairs: bool = False) -> _LogitOperands | None:
    """Returns the operands for Triton's statistics kernels; None if they do not support the call.

    The kernels do not support other devices, biases, masks of pairs (unless `pairs` is True), explicit positions, or
    subclasses other than BandCall. q and k are encoded in float32. If the spec does not encode them, they keep their
    precision, which gives the same products.
    """
    band = call if isinstance(call, BandCall) else None
    if type(call) is not AttentionCall and (band is None or band.slopes is not None):
        return None  # a subclass may override visibility and bias
    spec, mask = call.spec, call.mask if band is None else band.padding
    padding = mask is None or (mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1)
    shown = pairs and mask is not None and not padding and mask.dtype == torch.bool and band is None
    if not (
        (padding or shown) and (call.plain or band is not None) and spec.position.folds and spec.cap.kind != "other"
    ):
        return None
    if not available.takes(call.q, call.k):
        return None
    scale = spec.factor(call.pos_q, call.q.shape[-1], call.params, wide(call.q.dtype))
    bare = spec.norm.kind == spec.position.kind == "none" and not isinstance(scale, Tensor)
    q, k = (call.q, call.k) if bare else call.encoded()
    how: dict[str, Any] = {"keys": None if mask is None or shown else mask[:, 0, 0].expand(-1, k.shape[2])}
    how |= {"pairs": mask} if shown else {}
    if band is None:
        how |= {"causal": call.causal, "window": call.window}
    else:
        how |= {"causal": False, "window": (band.low, band.high)}
    return _LogitOperands(q, k, scale, how)


def row_fields(call: AttentionCall, threshold: float) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the ROW_FIELDS [n b h t] of every query row, the number of keys each row sees, and the key norms,
    computed in one GPU pass.

    Rows excluded by the call's `query_mask` are computed as well. Returns None if the GPU kernel does not support the
    call; it supports neither sinks nor token classes.
    """
    if call.classes is not None or call.spec.normalizer.kind != "softmax":
        return None
    read = _operands(call, pairs=True)
    if read is None:
        return None
    from qkeel.kernels.triton import row_fields

    return row_fields.row_fields(read.q, read.k, read.scale, threshold, cap=call.spec.cap.limit, **read.how)


def row_statistics(call: AttentionCall) -> available.RowNumbers | None:
    """Returns the largest and smallest logit, the lse and the entropy of every query row [b h t], in float32, computed
    in a separate GPU pass.

    Rows excluded by the call's `query_mask` get the values of rows that see no key. Returns None if the GPU kernel does
    not support the call.
    """
    read = _read(call)
    if read is None:
        return None
    from qkeel.kernels.triton import statistics

    found = statistics.row_statistics(read.q, read.k, read.scale, cap=call.spec.cap.limit, **read.how)
    if call.query_mask is None:
        return found
    out, nothing = ~call.query_mask[:, None], (-torch.inf, torch.inf, -torch.inf, 0.0)
    return available.RowNumbers(*(x.masked_fill(out, empty) for x, empty in zip(found, nothing)))


def extremes(call: AttentionCall) -> tuple[Tensor, Tensor] | None:
    """Returns the largest and smallest logit [h], computed in a GPU pass with two comparisons per logit; None if
    unsupported."""
    read = _read(call)
    if read is None:
        return None
    from qkeel.kernels.triton import statistics

    top, low = statistics.extremes(read.q, read.k, read.scale, counted=call.query_mask, **read.how)
    return top.amax((0, 2)), low.amin((0, 2))


def sampled_numbers(call: AttentionCall, rate: int, lse: PerRow | None = None) -> available.HeadNumbers | None:
    """Returns head statistics from a GPU: the entropy from one in `rate` rows on average, the largest logit from all
    rows.

    Args:
        call: the attention call.
        rate: average number of rows per sampled row.
        lse: the logsumexps of a call without mask and window, if known. Tiles of rows that cannot contain the largest
            logit are then skipped.

    Returns:
        None if unsupported, or if a sequence has fewer than two strata of 2 · rate rows, because using all rows is then
        no more expensive.
    """
    t = call.q.shape[2]
    strata = t // (2 * rate)
    read = _read(call) if strata > 1 else None
    if read is None:
        return None
    from qkeel.kernels.triton import statistics

    q, k, scale, how = read
    s, counted = k.shape[2], call.query_mask
    known = None if lse is None else (lse, lse_bounds(call, lse)[0])
    tops = statistics.extremes(q, k, scale, counted=counted, known=known, **how)
    rows, picked = statistics.rows_of(q, k, scale, cap=call.spec.cap.limit, sample=(strata, next(_SEEDS)), **how)
    return statistics.sampled_head_numbers(tops, (rows.lse, rows.entropy, picked), t, math.log(s), counted)


def lse_bounds(call: AttentionCall, lse: PerRow) -> tuple[Tensor, Tensor]:
    """Returns bounds [h] on the largest logits from the row logsumexps of a call without mask and window:
    max_i (lse_i - ln n_i) and max_i lse_i over the counted rows, where row i sees n_i keys. NaN propagates."""
    if call.query_mask is not None:
        lse = lse.masked_fill(~call.query_mask[:, None], -torch.inf)
    best = lse.amax(0)  # row i sees the same number of keys in every sequence
    n = (call.pos_q[0] + 1).to(lse.dtype).log() if call.causal else math.log(call.k.shape[2])
    return (best - n).amax(-1), best.amax(-1)
