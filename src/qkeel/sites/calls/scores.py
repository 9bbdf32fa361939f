"""ScoresCall: a hand-written attention as it was seen, and the statistics of what went into its softmax."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkeel.errors import ShapeError
from qkeel.functional.norms import wide
from qkeel.functional.statistics.class_stats import TokenClasses, joined_classes
from qkeel.functional.statistics.logit_change import LogitChange, change_rows, reduce_changes
from qkeel.functional.statistics.logit_stats import TENSORS, LogitStats
from qkeel.functional.statistics.rows import (
    RowStats,
    Seen,
    extreme_logits,
    logit_rows,
    no_product_rows,
    product_rows,
    softmax_rows,
)
from qkeel.kernels.stats.found import FoundRows
from qkeel.kernels.stats.per_head import BLOCK
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.sites.calls.head_layout import Layout
from qkeel.spec import AttentionSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoresCall:
    """Logits [b h t s] before the cap, `capped` ones as the softmax took them, and which pairs are hidden.

    Where no cap was seen both are one tensor. `hidden` [b|1 h|1 t|1 s] is True where a query may not see a key.
    q [b h t d] and k [b g s d] are those that were multiplied, or None where these are unknown: they carry
    norms, angles and weights, the logits are never computed from them; of a logit that is a sum of products neither
    is there. `layout` is that of the scores in the module. In a probe `products` are q and k of every product of the
    sum, and `lost` says what else is in it. `query_mask` [b t]: False leaves a query row out of the statistics;
    `classes` splits them.
    """

    spec: AttentionSpec
    logits: Float[Tensor, "b h t s"]
    capped: Float[Tensor, "b h t s"]
    hidden: Bool[Tensor, "#b #h #t #s"] | None
    q: Float[Tensor, "b h t d"] | None
    k: Float[Tensor, "b g s d"] | None
    products: tuple[tuple[Tensor | None, Tensor | None], ...] = ()
    lost: tuple[str, ...] = ()
    layout: Layout | None = None
    query_mask: Bool[Tensor, "b t"] | None = None
    classes: TokenClasses | None = None

    @property
    def headless(self) -> bool:
        """True if these are the scores of one head of several."""
        return self.layout is not None and self.layout.headless

    @property
    def query_shape(self) -> tuple[int, int]:
        """Batch size b and number of queries t."""
        return self.logits.shape[0], self.logits.shape[2]

    @property
    def query_device(self) -> torch.device:
        """The device of the logits."""
        return self.logits.device


@torch.no_grad()
def scores_stats(call: ScoresCall, threshold: float = ALARM_THRESHOLD) -> LogitStats:
    """Exact LogitStats of a hand-written call; weights are those of the softmax over the visible keys, sinks left out.

    What needs q or k (norms, angles, qk_frobenius) is not measured where they are unknown: n_keys or n_products is 0.
    """
    return find_score_rows(call, threshold).with_others(())


def find_score_rows(call: ScoresCall, threshold: float = ALARM_THRESHOLD) -> FoundRows:
    """What `scores_stats` makes statistics of. Called without gradients, under no autocast."""
    kind = wide(call.logits.dtype)
    q, k = (None if x is None else x.to(kind) for x in (call.q, call.k))
    q_norm, k_norm = (None if x is None else x.norm(dim=-1) for x in (q, k))
    each = None if k is None else k.repeat_interleave(call.logits.shape[1] // k.shape[1], dim=1)
    classes = None if call.classes is None else call.classes.keys(call.logits.new_zeros((), dtype=kind))
    parts = []
    for rows in _blocks(call):
        z, seen = _logits(call, rows)
        angle = no_product_rows(z.amax(-1))
        if q is not None and each is not None and q_norm is not None and k_norm is not None:
            products = seen.blank_(q[:, :, rows] @ each.mT)
            angle = product_rows(products, 1.0, q_norm[:, :, rows], k_norm, seen)
        found = logit_rows(z, seen, threshold, classes)
        if call.capped is not call.logits:
            z = seen.lower_(seen.blank_(call.capped[:, :, rows].to(kind, copy=True)))
        parts.append(RowStats(**angle, **found, **softmax_rows(z, seen, classes)))
    rows = parts[0] if len(parts) == 1 else RowStats.cat(parts)
    return FoundRows(rows, call.query_mask, q_norm, k_norm, _keys_seen(call), call.classes)


@torch.no_grad()
def scores_change(before: ScoresCall, after: ScoresCall) -> LogitChange:
    """The change of the logits before the cap between two calls of the same batch; see logit_change of the kernels. A
    difference of logits: their rounding is in it."""
    if before.logits.shape != after.logits.shape:
        raise ShapeError(
            f"expected two calls of the same batch, got scores {tuple(before.logits.shape)} and then "
            f"{tuple(after.logits.shape)}"
        )
    parts = []
    for block in _blocks(after):
        z, seen = _logits(after, block)
        parts.append(change_rows(z - seen.blank_(before.logits[:, :, block].to(z.dtype, copy=True)), seen))
    return reduce_changes(parts, after.query_mask)


@torch.no_grad()
def scores_maxima(call: ScoresCall) -> tuple[Float[Tensor, " h"], Float[Tensor, " h"]]:
    """The max_logit and min_logit [h] of `scores_stats`, and nothing else."""
    extrema = []
    for rows in _blocks(call):
        z, seen = _logits(call, rows)
        extrema.append(extreme_logits(z, seen, None if call.query_mask is None else call.query_mask[:, rows]))
    top, low = zip(*extrema)
    return torch.stack(top).amax(0), torch.stack(low).amin(0)


def _blocks(call: ScoresCall) -> Iterator[slice]:
    b, h, t, s = call.logits.shape
    rows = max(1, BLOCK // max(1, b * h * s))
    for start in range(0, t, rows):
        yield slice(start, min(t, start + rows))


def _logits(call: ScoresCall, rows: slice) -> tuple[Tensor, Seen]:
    """A blanked copy of the logits of some rows, and which keys are visible there."""
    n = call.logits.shape[3]
    hidden = call.hidden
    if hidden is not None and hidden.shape[2] > 1:
        hidden = hidden[:, :, rows]
    seen = Seen(None, n, n) if hidden is None else Seen(~hidden, 0, n)
    return seen.blank_(call.logits[:, :, rows].to(wide(call.logits.dtype), copy=True)), seen


def _keys_seen(call: ScoresCall) -> Tensor:
    """A mask of the keys [b g s] that some counted row sees; [b h s] where the keys are unknown."""
    b, h, _, s = call.logits.shape
    groups = h if call.k is None else call.k.shape[1]
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.logits.device)
    if call.hidden is not None:
        visible = ~call.hidden
    if call.query_mask is not None:
        visible = visible & call.query_mask[:, None, :, None]
    return visible.any(-2).expand(b, h, s).unflatten(1, (groups, -1)).any(2)


def cat_heads(parts: list[LogitStats]) -> LogitStats:
    """The statistics of calls of one head each as those of one site."""
    whole = {name: torch.cat([getattr(p, name) for p in parts]) for name in TENSORS}
    return LogitStats(**whole, classes=joined_classes([p.classes for p in parts]))
