"""Exact LogitStats of a call without a T×T matrix: one pass over blocks of rows, under no_grad."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qkeel.functional.normalizers import entropy
from qkeel.functional.rows import RowStats, Seen, extreme_logits, logit_rows, product_rows, reduce_rows, softmax_rows
from qkeel.functional.stats import LogitStats
from qkeel.kernels.contract import row_blocks
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.spec.call import AttentionCall
from qkeel.spec.cap import NoCap
from qkeel.spec.position import NoPosition

BLOCK = 1 << 20  # logits at once: 4 MB in float32, so that the passes over a block stay in cache
ROWS = 64  # but at least this many rows: fewer make poor matrix products


@torch.no_grad()
def logit_stats(call: AttentionCall, threshold: float = ALARM_THRESHOLD) -> LogitStats:
    """Statistics of the logits, weights, norms and angles of a call, exactly.

    Masked pairs count nowhere, nor do query rows that the call's `query_mask` leaves out. share_above is over
    `threshold` nats.
    """
    q, k = call.encoded()
    q_norm, k_norm = q.norm(dim=-1), k.norm(dim=-1)
    parts = []
    for rows, keys in _blocks(call):
        if keys.stop == 0:
            parts.append(RowStats.nothing(q_norm[:, :, rows]))
            continue
        z, seen = _logits(call, q, k, rows, keys)
        products, unit = _products(call, q, k, rows, keys)
        products = z if products is None else seen.blank_(products)
        angle = product_rows(products, unit, q_norm[:, :, rows], k_norm[:, :, keys], seen)
        parts.append(RowStats(**angle, **logit_rows(z, seen, threshold), **_weight_rows(call, z, seen)))
    return reduce_rows(RowStats.cat(parts), call.query_mask, q_norm, k_norm, _keys_seen(call))


@torch.no_grad()
def logit_maxima(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The max_logit and min_logit [h] of `logit_stats`, and nothing else: for less than half its cost."""
    q, k = call.encoded()
    top = q.new_full((q.shape[1],), -torch.inf)
    low = -top
    for rows, keys in _blocks(call):
        if keys.stop:
            z, seen = _logits(call, q, k, rows, keys)
            counted = None if call.query_mask is None else call.query_mask[:, rows]
            most, least = extreme_logits(z, seen, counted)
            top, low = torch.maximum(top, most), torch.minimum(low, least)
    return top, low


def _blocks(call: AttentionCall) -> Iterator[tuple[slice, slice]]:
    """Rows and the keys that they can see at most."""
    for rows in row_blocks(call, BLOCK, ROWS):
        yield rows, slice(0, call.last_key(rows))


def _logits(call: AttentionCall, q: Tensor, k: Tensor, rows: slice, keys: slice) -> tuple[Tensor, Seen]:
    """Blanked logits before the cap of a block of encoded q and k, and who sees whom there."""
    z = call.scores(q[:, :, rows], k[:, :, keys], rows, keys)
    start = 0
    if call.causal and call.plain and call.mask is None:
        # Every row of the block sees the keys before the block's own diagonal.
        start = min(max(k.shape[2] - q.shape[2] + rows.start + 1, 0), keys.stop)
    visible = call.visible(rows, slice(start, keys.stop)) if start < keys.stop else None
    seen = Seen(visible, keys.stop if visible is None else start, keys.stop)
    return seen.blank_(z), seen


def _products(call: AttentionCall, q: Tensor, k: Tensor, rows: slice, keys: slice) -> tuple[Tensor | None, float]:
    """unit · q·k of a block and its unit; None where the logits themselves are that."""
    unit = call.spec.factor(call.pos_q, q.shape[-1], call.params, q.dtype)
    added = call.mask is not None and call.mask.dtype != torch.bool
    if call.spec.position.folds and not added and isinstance(unit, float) and unit > 0:
        return None, unit
    products = NoPosition().scores(q[:, :, rows], k[:, :, keys], call.pos_q[:, rows], call.pos_k[:, keys], call.params)
    return products, 1.0


def _weight_rows(call: AttentionCall, z: Tensor, seen: Seen) -> dict[str, Tensor]:
    """Largest capped logit, entropy and first weight of lowered logits; overwrites them."""
    cap, normalizer = call.spec.cap, call.spec.normalizer
    if not isinstance(cap, NoCap):
        z = seen.lower_(seen.blank_(cap.apply(z)))
    if normalizer.softmax_over_keys:
        return softmax_rows(z, seen)
    weights = normalizer.weights(z, seen.whole(z), call.params)
    total = weights.sum(-1)
    first = seen.first(weights) / torch.where(total > 0, total, 1.0)
    return {"capped_max": z.amax(-1), "entropy": entropy(weights).clamp_min(0), "first_weight": first}


def _keys_seen(call: AttentionCall) -> Tensor:
    """Which keys [b g s] some counted row sees, in any of the heads that share them."""
    b, g, s, _ = call.k.shape
    counted = call.query_mask
    if counted is None and call.mask is None and (not call.causal or call.plain):
        return torch.ones(b, g, s, dtype=torch.bool, device=call.k.device)
    found = torch.zeros(b, g, s, dtype=torch.bool, device=call.k.device)
    for rows, keys in _blocks(call):
        visible = call.visible(rows, keys)
        if visible is None:
            visible = torch.ones(1, 1, 1, keys.stop, dtype=torch.bool, device=found.device)
        if counted is not None:
            visible = visible & counted[:, None, rows, None]
        some = visible.any(-2)
        if some.shape[1] not in (1, g):
            some = some.unflatten(1, (g, -1)).any(2)
        found[..., keys] |= some
    return found
