"""From q and k to per-head statistics of logits, for any kernel, block by block without a T×T matrix; the formulas are those
of `functional.statistics`.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head, r rows of a block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkeel.errors import RefusedError, ShapeError
from qkeel.functional.bounds import (
    LogitChange,
    change_factors,
    change_rows,
    reduce_changes,
)
from qkeel.functional.class_statistics import Members
from qkeel.functional.logits import entropy, qk_products
from qkeel.functional.norms import wide
from qkeel.functional.statistics import (
    KernelRows,
    LogitStats,
    RowStats,
    VisibleKeys,
    by_class,
    extreme_rows,
    logit_rows,
    no_product_rows,
    product_rows,
    reduce_fields,
    reduce_kernel_rows,
    reduce_rows,
    row_means,
    softmax_gradient,
    softmax_rows,
    spread_rows,
    with_sink,
)
from qkeel.kernels.contract import row_blocks
from qkeel.kernels.logits import compiled as logit_pass
from qkeel.kernels.logits.gpu import extremes, row_fields
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.spec.call import AttentionCall, LogitCall
from qkeel.spec.logits import Normalizer
from qkeel.spec.slot import Params, PerRow

# Logits per block: 4 MB in float32, which stays in cache during the passes over a block.
BLOCK = 1 << 20
# 128 MB: the time of a pass depends on launches, not on a cache.
BLOCK_OFF_CPU = 1 << 25
# Least rows per block: fewer make inefficient matrix products.
ROWS = 64

# All statistics, and the largest logits alone.


@torch.no_grad()
def logit_stats(call: LogitCall, threshold: float = ALARM_THRESHOLD) -> LogitStats:
    """Computes exact statistics of the logits, weights, norms and angles of a call.

    Masked pairs and query rows excluded by the call's `query_mask` are not counted. share_above is the share of logits
    above `threshold` nats. Call it with autocast disabled.
    """
    call_fields = call_rows(call, threshold)
    if call_fields is not None:
        fields, n_keys, k_norm, counted, keys_seen = call_fields
        return reduce_fields(fields, n_keys, counted, k_norm, keys_seen)
    q, k = call.encoded()
    keys_seen = _keys_seen(call, k)
    q_norm = None if call.q is None else q.norm(dim=-1)
    k_norm = None if call.k is None else k.norm(dim=-1)
    classes = None if call.classes is None else call.classes.members(q.dtype)
    unit, sink = call.unit, call.sink
    blocks = []
    for rows, keys in _blocks(call):
        # Class members are indexed from the first key.
        keys = keys if classes is None else slice(0, keys.stop)
        z, visible_keys = _logits(call, q, k, rows, keys)
        # The order matters: logit_rows lowers z, weight_rows overwrites it.
        if q_norm is None or k_norm is None:
            angles = no_product_rows(z[..., 0])
        else:
            norms = q_norm[:, :, rows], k_norm[:, :, keys]
            products = z
            if unit is None:
                products = qk_products(q[:, :, rows], k[:, :, keys])
                products = visible_keys.blank_(products)
            angles = product_rows(products, unit or 1.0, *norms, visible_keys)
        entering = _entering(call, z, q, k, rows, keys, visible_keys)
        logits = logit_rows(z, visible_keys, threshold, classes)
        if entering is not None:
            logits["spread"] = spread_rows(entering, visible_keys)
        if call.spec.cap.kind != "none":
            z = visible_keys.blank_(call.capped_scores(z, rows, keys))
            z = visible_keys.lower_(z)
        of_rows = sink
        if sink is not None and sink.shape[2] > 1:
            of_rows = sink[:, :, rows]
        weights = _weight_rows(
            call.spec.normalizer, call.params or {}, z, visible_keys, classes, of_rows
        )
        blocks.append(RowStats(**angles, **logits, **weights))
    if not blocks:
        return LogitStats.empty(q.shape[1], k.shape[1], q)
    row_stats = blocks[0] if len(blocks) == 1 else RowStats.cat(blocks)
    sinks = int(sink is not None)
    return reduce_rows(
        row_stats, call.query_mask, q_norm, k_norm, keys_seen, call.classes, sinks
    )


@torch.no_grad()
def max_stats(call: LogitCall) -> LogitStats:
    """Like `logit_stats`, but with max_logit, min_logit and logit_spread only and neutral values in all other fields,
    at less than half the cost."""
    if isinstance(call, AttentionCall):
        fields: Tensor | tuple[Tensor, ...] | None = logit_pass.extremes_of(call)
        if fields is None:
            fields = extremes(call)
        if fields is None:
            # Above no threshold, which spares counting.
            rows_of_gpu = row_fields(call, torch.inf)
            fields = None if rows_of_gpu is None else rows_of_gpu[0][:3]
        if fields is not None:
            return extreme_stats(*fields, counted=call.query_mask)
    q, k = call.encoded()
    blocks: list[tuple[Tensor, ...]] = []
    for rows, keys in _blocks(call):
        z, visible_keys = _logits(call, q, k, rows, keys)
        entering = _entering(call, z, q, k, rows, keys, visible_keys)
        blocks.append(
            extreme_rows(z, visible_keys, z if entering is None else entering)
        )
    if not blocks:
        # Without keys.
        empty = q.new_full((*q.shape[:2], 1), -torch.inf)
        return extreme_stats(empty, -empty, empty)
    of_rows = [torch.cat(field, -1) for field in zip(*blocks)]
    return extreme_stats(*of_rows, counted=call.query_mask)


class CallRows(NamedTuple):
    """The statistics of each row of a call, which `reduce_calls` reduces to those of heads.

    `fields` [fields b h t], `n_keys` [b h t] and `k_norm` [b g s] are those of `reduce_fields`. `counted` [b t] are the
    rows that count, and `keys_seen` [b g s] the keys that one of them sees; None for all.
    """

    fields: Tensor
    n_keys: Tensor
    k_norm: Tensor
    counted: Tensor | None = None
    keys_seen: Tensor | None = None


@torch.no_grad()
def call_rows(call: LogitCall, threshold: float = ALARM_THRESHOLD) -> CallRows | None:
    """Computes what `logit_stats` reduces, in one kernel; None if none supports the call."""
    if not isinstance(call, AttentionCall):
        return None
    rows = logit_pass.rows_of(call, threshold)
    if rows is None:
        rows = row_fields(call, threshold)
    if rows is None:
        return None
    return CallRows(
        *rows,
        call.query_mask,
        None if _all_keys_seen(call) else _keys_seen(call, call.k),
    )


def plain_rows(q: Tensor, k: Tensor, scale: float, causal: bool) -> CallRows | None:
    """Like `call_rows` for an F.scaled_dot_product_attention call without a mask; the compiled pass must be ready."""
    if not logit_pass.reads_plain(q, k, causal):
        return None
    return CallRows(*logit_pass.plain_rows(q, k, scale, causal, ALARM_THRESHOLD))


@torch.no_grad()
def reduce_calls(
    calls: Sequence[CallRows | Float[Tensor, " h"]],
) -> dict[tuple[int, ...], LogitStats]:
    """Returns the `logit_stats` of calls by their indices; of a call that is given by its heads' largest logits, these
    alone. Calls of the same shapes are reduced together, as one with all their heads, because each of some thirty
    operators costs microseconds, or a launch, whatever its size."""
    stats = {}
    groups: dict[object, dict[int, Any]] = {}
    for i, call in enumerate(calls):
        tensors = (call,) if isinstance(call, Tensor) else (call.fields, call.k_norm)
        first, last = tensors[0], tensors[-1]
        form = (first.shape, last.shape, first.dtype, first.device)
        if isinstance(call, CallRows):
            # Masks are the same if they are one object: comparing them would read them.
            form = (*form, id(call.counted), call.keys_seen is None)
        groups.setdefault(form, {})[i] = call
    for group in groups.values():
        rows = [*group.values()]
        if isinstance(rows[0], Tensor):
            stats[tuple(group)] = only_extremes(torch.cat(rows))
            continue
        keys_seen = [call.keys_seen for call in rows if call.keys_seen is not None]
        stats[tuple(group)] = reduce_fields(
            torch.cat([call.fields for call in rows], 2),
            torch.cat([call.n_keys for call in rows], 1),
            rows[0].counted,
            torch.cat([call.k_norm for call in rows], 1),
            torch.cat(keys_seen, 1) if keys_seen else None,
        )
    return stats


def plain_max_stats(
    q: Tensor, k: Tensor, scale: float, causal: bool
) -> LogitStats | None:
    """Like `max_stats` for a call that `plain_rows` supports."""
    if not logit_pass.reads_plain(q, k, causal):
        return None
    return extreme_stats(*logit_pass.plain_extremes(q, k, scale, causal))


@torch.no_grad()
def stats_of_tops(call: AttentionCall, largest: PerRow) -> LogitStats:
    """Like `max_stats` but for min_logit, from the largest logit of each row, which the kernel that attends knows."""
    means = _row_means(call)
    # What is not a sum over the keys is computed from the logits.
    if means is None:
        return max_stats(call)
    return extreme_stats(largest, None, largest - means, counted=call.query_mask)


def _row_means(call: AttentionCall) -> PerRow | None:
    """Returns the mean of the logits of each row; None if they are not q·k times a factor, or if the keys of a row are
    no range."""
    spec = call.spec
    if call.is_biased or spec.cap.kind != "none" or not spec.position.folds:
        return None
    visibility = logit_pass.visibility(call)
    if visibility is None:
        return None
    low, high, mask = visibility
    if mask is not None and mask.shape[1:3] != (1, 1):
        return None
    q, k = (x.to(wide(x.dtype)) for x in logit_pass.operands(call))
    ends = None if low is None or high is None else (low, high)
    means = row_means(q, k, ends, None if mask is None else mask[:, 0, 0])
    factor = spec.factor(call.pos_q, q.shape[-1], call.params, q.dtype)
    return means * (factor[..., 0] if isinstance(factor, Tensor) else factor)


# A row that sees a single key has a logsumexp equal to its logit, which rounds below it in half precision (by 6e-6 of it).
_ROUNDED = 1e-4


def is_over(lse: float, threshold: float) -> bool:
    """True if a row with this logsumexp may have a logit over a threshold; NaN may."""
    return not lse <= threshold * (1 - _ROUNDED)


def bounded_maxima(
    lse: PerRow,
    threshold: float,
    plain: tuple[Tensor, Tensor, float, bool] | None,
) -> Float[Tensor, " h"] | None:
    """The largest logits of heads that may exceed a threshold, and of other heads their largest logsumexp.

    max_j s_ij ≤ log Σ_j exp(s_ij), so a head whose logsumexps stay under the threshold has no logit over it.

    Args:
        lse: the logsumexp of each row, on a CPU and without a graph.
        threshold: above 0, in nats.
        plain: q [b h t d], k [b g s d], scale and causality of the call.

    Returns:
        None if a head may exceed the threshold and its logits cannot be computed from `plain`.
    """
    bound = lse.amax((0, 2))
    limit = threshold * (1 - _ROUNDED)
    # Without a loop in Python where nothing is over; NaN is not under.
    if all(map(float(limit).__ge__, bound.tolist())):
        return bound
    if plain is None:
        return None
    q, k, scale, is_causal = plain
    if not logit_pass.ready() or not logit_pass.reads_plain(q, k, is_causal):
        return None
    over = (~(bound <= limit)).nonzero()[:, 0]
    keys = over // (q.shape[1] // k.shape[1])
    with torch.no_grad():
        largest, *_ = logit_pass.plain_extremes(
            q[:, over], k[:, keys], scale, is_causal
        )
    return bound.to(largest).index_copy(0, over, largest.amax((0, 2)))


@torch.no_grad()
def stats_of_rows(call: AttentionCall, rows: KernelRows) -> LogitStats:
    """Reduces a kernel's rows to max_logit, capped_max_logit, entropy, entropy_min and n_queries per head.

    Other fields are neutral, with n_pairs 0. Rows excluded by the call's `query_mask` are not counted. Logits are those
    of q and k in the kernel's precision.
    """
    sink = call.sink
    if sink is not None:
        row_entropy, _ = with_sink(
            rows.entropy, rows.entropy, rows.lse, sink.to(rows.lse)
        )
        rows = rows._replace(entropy=row_entropy)
    stats = reduce_kernel_rows(rows, call.query_mask, call.k.shape[1])
    cap, largest = call.spec.cap, stats.max_logit
    capped = (
        largest
        if cap.kind == "none"
        else torch.where(largest == -torch.inf, largest, cap.apply(largest))
    )
    return dataclasses.replace(stats, capped_max_logit=capped)


def extreme_stats(
    largest: PerRow,
    smallest: PerRow | None = None,
    spread: PerRow | None = None,
    *,
    counted: Bool[Tensor, "b t"] | None = None,
) -> LogitStats:
    """Returns statistics with only the extremes of rows and their spreads, as far as they are given; rows that see no
    key have -inf, inf and -inf."""

    def of_heads(rows: PerRow, sign: float) -> Tensor:
        if counted is not None:
            rows = rows.masked_fill(~counted[:, None], -sign * torch.inf)
        return rows.amax((0, 2)) if sign > 0 else rows.amin((0, 2))

    fields = {"max_logit": of_heads(largest, 1.0)}
    if smallest is not None:
        fields["min_logit"] = of_heads(smallest, -1.0)
    if spread is not None:
        fields["logit_spread"] = of_heads(spread, 1.0)
    return only_extremes(**fields)


def only_extremes(
    max_logit: Float[Tensor, " h"], **others: Float[Tensor, " h"]
) -> LogitStats:
    """Returns statistics that contain only the largest logit of each head, and the other fields that are given."""
    neutral = _no_statistics(max_logit.shape[0], max_logit.dtype, max_logit.device)
    return LogitStats(**{**neutral, "max_logit": max_logit, **others})  # type: ignore[arg-type]


@functools.lru_cache(maxsize=64)
def _no_statistics(
    heads: int, dtype: torch.dtype, device: torch.device
) -> Mapping[str, Tensor]:
    """Returns the tensors of `LogitStats.empty`, created once, because statistics are never changed in place."""
    like = torch.empty((), dtype=dtype, device=device)
    return LogitStats.empty(heads, heads, like).tensors()


# The change of the logits between two steps, and the logsumexps of rows.


@torch.no_grad()
def logit_change(before: AttentionCall, after: AttentionCall) -> LogitChange:
    """Returns the change of the logits before the cap between two calls on the same batch, over the visible pairs.

    ΔS = S' - S is computed exactly from `change_factors`, block by block, at the cost of two products q kᵀ and without
    a T×T matrix. It includes changes of learned scales and biases. The pairs are those visible in `after`, and its
    `query_mask` applies.

    Both specs must have the same norm and position.

    Raises:
        ShapeError: the calls differ in shape.
        RefusedError: the position does not fold into q and k.
    """
    if before.q.shape != after.q.shape or before.k.shape != after.k.shape:
        raise ShapeError(
            f"expected two calls on the same batch, got q {tuple(before.q.shape)}, k {tuple(before.k.shape)} and then "
            f"q {tuple(after.q.shape)}, k {tuple(after.k.shape)}"
        )
    if not after.spec.position.folds:
        raise RefusedError(
            f"{after.spec.position.formula()} cannot be folded into q and k, so the change in q·k cannot be computed"
        )
    a, c = change_factors(*_scaled(before), *_scaled(after))
    parts = []
    for rows, keys in _blocks(after):
        change = qk_products(a[:, :, rows], c[:, :, keys])
        biases = [call.bias(rows, keys) for call in (before, after)]
        if biases[0] is not None and biases[1] is not None:
            change = change + (biases[1] - biases[0]).to(change.dtype)
        visible_keys = _visible_keys(after, rows, keys)
        parts.append(change_rows(visible_keys.blank_(change), visible_keys))
    if not parts:
        none = a.new_zeros(a.shape[1])
        return LogitChange(rms=none, n_pairs=none.long())
    return reduce_changes(parts, after.query_mask)


@torch.no_grad()
def score_change(before: LogitCall, after: LogitCall) -> LogitChange:
    """Like `logit_change`, but as a difference of logits, with their rounding errors.

    Raises: ShapeError if the calls differ in shape.
    """
    if before.scores_shape != after.scores_shape:
        raise ShapeError(
            f"expected two calls on the same batch, got scores {before.scores_shape} and then {after.scores_shape}"
        )
    operands = before.encoded(), after.encoded()
    parts = []
    for rows, keys in _blocks(after):
        visible_keys = _visible_keys(after, rows, keys)
        old, new = (
            call.scores(q[:, :, rows], k[:, :, keys], rows, keys)
            for call, (q, k) in zip((before, after), operands)
        )
        change = visible_keys.blank_(new) - visible_keys.blank_(old)
        parts.append(change_rows(change, visible_keys))
    return reduce_changes(parts, after.query_mask)


@torch.no_grad()
def row_logsumexp(call: LogitCall) -> PerRow:
    """Returns ln Σ exp(capped logit) over the keys of each row, without a sink, in nats; -inf for rows that see no
    key."""
    q, k = call.encoded()
    lse = q.new_full(q.shape[:-1], -torch.inf)
    for rows, keys in _blocks(call):
        z, visible_keys = _logits(call, q, k, rows, keys)
        if call.spec.cap.kind != "none":
            z = visible_keys.blank_(call.capped_scores(z, rows, keys))
        z = visible_keys.lower_(z)
        none = visible_keys.counts(z.shape[2], z.device) == 0
        lse[:, :, rows] = z.logsumexp(-1).masked_fill(none, -torch.inf)
    return lse


# Blocks of rows.


def _scaled(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns encoded q and k with the scale applied to q, in float32 or wider, where differences of half-precision
    numbers are exact."""
    q, k = (
        x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        for x in call.encoded()
    )
    return q * call.spec.factor(call.pos_q, q.shape[-1], call.params, q.dtype), k


def _blocks(call: LogitCall) -> Iterator[tuple[slice, slice]]:
    """Yields blocks of rows, each with the range of keys that its rows can see; nothing if there are no keys."""
    # A maximum over nothing is an error.
    if not call.scores_shape[3]:
        return
    is_on_cpu = call.query_device.type == "cpu"
    for rows in row_blocks(call, BLOCK if is_on_cpu else BLOCK_OFF_CPU, ROWS):
        keys = call.span(rows)
        # A hidden key instead of none, because a maximum needs one.
        yield rows, keys if keys.stop > keys.start else slice(0, 1)


def _logits(
    call: LogitCall, q: Tensor, k: Tensor, rows: slice, keys: slice
) -> tuple[Tensor, VisibleKeys]:
    """Returns the blanked logits of a block of encoded q and k, before the cap, and the visible keys."""
    visible_keys = _visible_keys(call, rows, keys)
    return visible_keys.blank_(
        call.scores(q[:, :, rows], k[:, :, keys], rows, keys)
    ), visible_keys


def _entering(
    call: LogitCall,
    z: Tensor,
    q: Tensor,
    k: Tensor,
    rows: slice,
    keys: slice,
    visible_keys: VisibleKeys,
) -> Tensor | None:
    """Returns the blanked logits of a block after the cap and without biases; None if they are z, those of `_logits`."""
    cap = call.spec.cap
    if call.is_biased:
        z = call.unbiased(q[:, :, rows], k[:, :, keys], rows, keys)
    elif cap.kind == "none":
        return None
    return visible_keys.blank_(cap.apply(z))


def _visible_keys(call: LogitCall, rows: slice, keys: slice) -> VisibleKeys:
    start, n = 0, keys.stop - keys.start
    if call.causal and call.plain and call.mask is None and call.window is None:
        # Every row of the block sees the keys before the block's diagonal.
        start = min(
            max(call.k.shape[2] - call.q.shape[2] + rows.start + 1 - keys.start, 0), n
        )
    visible = (
        call.visible(rows, slice(keys.start + start, keys.stop)) if start < n else None
    )
    return VisibleKeys(visible, n if visible is None else start, n)


def _weight_rows(
    normalizer: Normalizer,
    params: Params,
    z: Tensor,
    visible_keys: VisibleKeys,
    members: Members | None,
    sink: Tensor | None,
) -> dict[str, Tensor]:
    """Returns the largest capped logit, entropy, first weight, gradient and class weights for lowered logits after the
    cap, which it overwrites."""
    if normalizer.softmax_over_keys:
        return softmax_rows(z, visible_keys, members, sink)
    # What other normalisers do with hidden keys is their own.
    weights = normalizer.weights(z, visible_keys.whole(z), params)
    total = weights.sum(-1)
    # A row of softpick may put no weight on any key.
    total = torch.where(total > 0, total, 1.0)
    split = (
        {}
        if members is None
        else {"class_mass": by_class(weights, members) / total[..., None]}
    )
    first = visible_keys.first(weights) / total
    p = weights / total[..., None]
    n_keys = visible_keys.counts(z.shape[2], z.device)
    return {
        "capped_max": z.amax(-1),
        "entropy": entropy(weights).clamp_min(0),
        "first_weight": first,
        "softmax_gradient": softmax_gradient((p * (1 - p)).sum(-1), n_keys),
        **split,
    }


def _keys_seen(call: LogitCall, k: Tensor) -> Tensor:
    """Returns which of the keys k are seen [b g s] by at least one counted row, in any of the heads that share them."""
    b, g, s, _ = k.shape
    counted = call.query_mask
    if _all_keys_seen(call):
        return torch.ones(b, g, s, dtype=torch.bool, device=k.device)
    # As padding is.
    same_for_rows = call.mask is None or call.mask.shape[2] == 1
    is_plain = type(call) is AttentionCall and call.window is None
    if is_plain and same_for_rows and call.pos_q.numel():
        call = _last_row(call)
        counted = call.query_mask
    keys_seen = torch.zeros(b, g, s, dtype=torch.bool, device=k.device)
    for rows, keys in _blocks(call):
        visible = call.visible(rows, keys)
        if visible is None:
            visible = torch.ones(
                1,
                1,
                1,
                keys.stop - keys.start,
                dtype=torch.bool,
                device=keys_seen.device,
            )
        if counted is not None:
            visible = visible & counted[:, None, rows, None]
        keys_seen[..., keys] |= _by_group(visible.any(-2), g)
    return keys_seen


def _last_row(call: AttentionCall) -> AttentionCall:
    """Returns the call with one query at the position of the last counted row, which sees every key that a row of it
    sees; that takes O(s) where all rows take O(t s)."""
    position = call.pos_q.expand(len(call.q), -1)
    counted = call.query_mask
    if counted is not None:
        position = torch.where(counted, position, position.amin())
        counted = counted.any(1, keepdim=True)
    return dataclasses.replace(
        call,
        q=call.q[:, :, :1],
        pos_q=position.amax(1, keepdim=True),
        query_mask=counted,
        plain=False,
    )


def _all_keys_seen(call: LogitCall) -> bool:
    """True if it is known that all keys are seen, without reading masks and positions."""
    if call.query_mask is not None or call.mask is not None:
        return False
    return call.window is None and (not call.causal or call.plain)


def _by_group(visible_keys: Tensor, g: int) -> Tensor:
    """Reduces [b|1 h|1 s] over query heads to [b|1 g|1 s], True where a head that shares the keys sees the key."""
    return (
        visible_keys
        if visible_keys.shape[1] in (1, g)
        else visible_keys.unflatten(1, (g, -1)).any(2)
    )
