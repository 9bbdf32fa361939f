"""Per-head statistics for any kernel: exact statistics block by block, and bounds from the logsumexps alone.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head, r rows of a block.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend

from qkeel.errors import RefusedError, ShapeError
from qkeel.functional.bounds import LogitChange, change_factors, change_rows, no_change_rows, reduce_changes
from qkeel.functional.class_statistics import Members, TokenClasses
from qkeel.functional.logits import entropy
from qkeel.functional.statistics import (
    KernelRows,
    LogitBracket,
    LogitStats,
    RowStats,
    VisibleKeys,
    by_class,
    extreme_logits,
    logit_rows,
    product_rows,
    reduce_fields,
    reduce_kernel_rows,
    reduce_rows,
    softmax_rows,
    with_sink,
)
from qkeel.kernels.contract import (
    extremes,
    lse_bounds,
    row_blocks,
    row_fields,
    row_statistics,
    sampled_numbers,
)
from qkeel.kernels.encode import folded
from qkeel.kernels.native import logit_pass
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.patching.modes import cudnn, flash, flash_on_cpu, kernel_choice, memory_efficient
from qkeel.spec.call import AttentionCall
from qkeel.spec.logits import Cap, Sink
from qkeel.spec.rope import NoPosition
from qkeel.spec.slot import Outputs, PerRow

# Findings about an attention call before their reduction to statistics, so that many calls can be reduced at once.
#
# A reduction over rows takes as many operations for the heads of one layer as for those of all layers, and each costs
# some microseconds on the host and in a GPU's queue. Findings of similar calls therefore wait until the pass ends or
# until they hold too much memory.


class Found(abc.ABC):
    """Findings about one attention call. Findings with equal `alike`, unless it is (), are reduced together."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def heads(self) -> tuple[int, int]:
        """Returns the numbers of query and key heads."""

    @property
    @abc.abstractmethod
    def alike(self) -> tuple[object, ...]:
        """Returns what must be equal for calls to be reduced together; () for a call that is reduced separately."""

    @property
    def size(self) -> int:
        """Returns how many numbers the findings hold until they are reduced."""
        return 0

    @abc.abstractmethod
    def with_others(self, others: Sequence[Any]) -> LogitStats:
        """Returns the statistics of this call and of other, similar calls, with their heads concatenated."""


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FoundStats(Found):
    """Statistics that are already reduced."""

    stats: LogitStats

    @property
    def heads(self) -> tuple[int, int]:
        return len(self.stats.max_logit), len(self.stats.key_norm)

    @property
    def alike(self) -> tuple[object, ...]:
        return ()

    def with_others(self, others: Sequence[FoundStats]) -> LogitStats:
        return self.stats


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FoundRows(Found):
    """Row statistics of a call, and the norms of its queries and keys; see `reduce_rows`."""

    rows: RowStats
    counted: Bool[Tensor, "b t"] | None
    q_norm: Float[Tensor, "b h t"] | None
    k_norm: Float[Tensor, "b g s"] | None
    keys_seen: Bool[Tensor, "b g s"]
    classes: TokenClasses | None = None
    sinks: int = 0

    @property
    def heads(self) -> tuple[int, int]:
        return self.rows.n_keys.shape[1], self.keys_seen.shape[1]

    @property
    def alike(self) -> tuple[object, ...]:
        if self.classes is not None:
            return ()
        x, keys = self.rows.total, self.keys_seen
        known = self.q_norm is None, self.k_norm is None, id(self.counted), self.sinks
        return FoundRows, x.shape[0], x.shape[2], keys.shape[0], keys.shape[2], x.dtype, x.device, *known

    @property
    def size(self) -> int:
        return 13 * self.rows.total.numel() + 2 * self.keys_seen.numel()

    def with_others(self, others: Sequence[FoundRows]) -> LogitStats:
        every = (self, *others)
        rows, q_norm, k_norm, seen = self.rows, self.q_norm, self.k_norm, self.keys_seen
        if others:
            rows = RowStats.cat([one.rows for one in every], dim=1)
            q_norm = None if q_norm is None else torch.cat([x for one in every if (x := one.q_norm) is not None], 1)
            k_norm = None if k_norm is None else torch.cat([x for one in every if (x := one.k_norm) is not None], 1)
            seen = torch.cat([one.keys_seen for one in every], 1)
        return reduce_rows(rows, self.counted, q_norm, k_norm, seen, self.classes, self.sinks)


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FoundPacked(Found):
    """Row statistics from the compiled CPU pass or the GPU pass, with all fields in one tensor and the query norms
    last.

    `keys_seen` is None if every key is seen."""

    fields: Float[Tensor, "n b h t"]  # in the order of functional.statistics.ROW_FIELDS
    n_keys: Int[Tensor, "b h t"]
    k_norm: Float[Tensor, "b g s"]
    keys_seen: Bool[Tensor, "b g s"] | None
    counted: Bool[Tensor, "b t"] | None

    @property
    def heads(self) -> tuple[int, int]:
        return self.fields.shape[2], self.k_norm.shape[1]

    @property
    def alike(self) -> tuple[object, ...]:
        seen = self.keys_seen is None, id(self.counted)
        x = self.fields
        return FoundPacked, x.shape[1::2], self.k_norm.shape[::2], x.dtype, x.device, *seen

    @property
    def size(self) -> int:
        return self.fields.numel() + self.n_keys.numel() + 2 * self.k_norm.numel()

    def with_others(self, others: Sequence[FoundPacked]) -> LogitStats:
        fields, k_norm, seen, every = self.fields, self.k_norm, self.keys_seen, (self, *others)
        if others:
            fields = torch.cat([one.fields for one in every], 2)
            k_norm = torch.cat([one.k_norm for one in every], 1)
            seen = None if seen is None else torch.cat([x for one in every if (x := one.keys_seen) is not None], 1)
        n_keys = torch.cat([one.n_keys for one in every], 1) if others else self.n_keys
        return reduce_fields(fields, n_keys, self.counted, k_norm, seen)


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FoundByKernel(Found):
    """Row statistics that a kernel computed in its attention pass; see `reduce_kernel_rows`."""

    rows: KernelRows
    counted: Bool[Tensor, "b t"] | None
    n_kv_heads: int
    cap: Cap

    @property
    def heads(self) -> tuple[int, int]:
        return self.rows.lse.shape[1], self.n_kv_heads

    @property
    def alike(self) -> tuple[object, ...]:
        x = self.rows.largest
        return FoundByKernel, x.shape[0], x.shape[2], x.dtype, x.device, id(self.counted), self.cap

    @property
    def size(self) -> int:
        return 3 * self.rows.lse.numel()

    def with_others(self, others: Sequence[FoundByKernel]) -> LogitStats:
        rows, groups = self.rows, self.n_kv_heads + sum([one.n_kv_heads for one in others])
        if others:
            rows = KernelRows(*(torch.cat(parts, 1) for parts in zip(rows, *(one.rows for one in others))))
        return with_capped(reduce_kernel_rows(rows, self.counted, groups), self.cap)


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FoundExtremes(Found):
    """The largest logit of every row of a call, and the smallest if known.

    Rows that see no key, and excluded rows, have -inf and inf."""

    rows: Float[Tensor, "n b h t"]  # the largest; then, with n = 2, the smallest

    @property
    def heads(self) -> tuple[int, int]:
        return self.rows.shape[2], self.rows.shape[2]

    @property
    def alike(self) -> tuple[object, ...]:
        n, b, _, t = self.rows.shape
        return FoundExtremes, n, b, t, self.rows.dtype, self.rows.device

    @property
    def size(self) -> int:
        return self.rows.numel()

    def with_others(self, others: Sequence[FoundExtremes]) -> LogitStats:
        rows = torch.cat([self.rows, *[one.rows for one in others]], 2) if others else self.rows
        return only_extremes(rows[0].amax((0, 2)), None if len(rows) == 1 else rows[1].amin((0, 2)))


def only_extremes(top: Float[Tensor, " h"], low: Float[Tensor, " h"] | None = None) -> LogitStats:
    """Returns statistics that contain only the largest, and perhaps the smallest, logit of each head."""
    nothing = _no_statistics(len(top), top.dtype, top.device)
    return LogitStats(**nothing | {"max_logit": top} | ({} if low is None else {"min_logit": low}))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=64)
def _no_statistics(heads: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Returns the fields of `LogitStats.empty`, created once, because statistics are never changed in place."""
    return LogitStats.empty(heads, heads, torch.empty((), dtype=dtype, device=device)).tensors()


def with_capped(found: LogitStats, cap: Cap) -> LogitStats:
    """Returns the statistics with capped_max_logit filled in."""
    top = found.max_logit
    capped = top if cap.kind == "none" else torch.where(top == -torch.inf, top, cap.apply(top))
    return dataclasses.replace(found, capped_max_logit=capped)


# Exact LogitStats of a call without a T×T matrix: one pass over blocks of rows, without gradients.

BLOCK = 1 << 20  # logits per block: 4 MB in float32, which stays in cache during the passes over a block
BLOCK_OFF_CPU = 1 << 25  # 128 MB: the time of a pass depends on launches, not on a cache
ROWS = 64  # least rows per block: fewer make inefficient matrix products


@torch.no_grad()
def logit_stats(call: AttentionCall, threshold: float = ALARM_THRESHOLD) -> LogitStats:
    """Computes exact statistics of the logits, weights, norms and angles of a call.

    Masked pairs and query rows excluded by the call's `query_mask` are not counted. share_above is the share of logits
    above `threshold` nats.
    """
    return find_rows(call, threshold).with_others(())


def find_rows(call: AttentionCall, threshold: float = ALARM_THRESHOLD) -> FoundRows | FoundPacked:
    """Returns the row statistics behind `logit_stats`. Call it with gradients and autocast disabled."""
    sink = sink_logit(call)
    fast = logit_pass.rows_of(call, threshold)
    if fast is None:
        fast = row_fields(call, threshold)
    if fast is not None:
        seen = None if _all_keys_seen(call) else _keys_seen(call)
        return FoundPacked(*fast, seen, call.query_mask)
    keys_seen = _keys_seen(call)
    q, k = call.encoded()
    q_norm, k_norm = q.norm(dim=-1), k.norm(dim=-1)
    classes = None if call.classes is None else call.classes.members(q.dtype)
    parts = []
    for rows, keys in _blocks(call):
        if keys.stop == keys.start:
            parts.append(RowStats.nothing(q_norm[:, :, rows], classes))
            continue
        keys = keys if classes is None else slice(0, keys.stop)  # class members are indexed from the first key
        z, seen = _logits(call, q, k, rows, keys)
        products, unit = _products(call, q, k, rows, keys)
        products = z if products is None else seen.blank_(products)
        # The order matters: logit_rows lowers z, _weight_rows overwrites it.
        angle = product_rows(products, unit, q_norm[:, :, rows], k_norm[:, :, keys], seen)
        found = logit_rows(z, seen, threshold, classes)
        parts.append(RowStats(**angle, **found, **_weight_rows(call, z, seen, classes, sink)))
    rows = parts[0] if len(parts) == 1 else RowStats.cat(parts)
    sinks = int(sink is not None)
    return FoundRows(rows, call.query_mask, q_norm, k_norm, keys_seen, call.classes, sinks)


def sink_logit(call: AttentionCall) -> Float[Tensor, "#h 1"] | None:
    """Returns the logit of each head's sink; None if the softmax has no sink."""
    normalizer = call.spec.normalizer
    if not isinstance(normalizer, Sink):
        return None
    if not normalizer.learned:
        return torch.full((1, 1), normalizer.init, device=call.q.device)
    return call.params["sink"].detach().flatten()[:, None]


def find_plain_rows(q: Tensor, k: Tensor, scale: float, causal: bool) -> FoundPacked | None:
    """Like `find_rows` for an F.scaled_dot_product_attention call without a mask; None if the compiled pass, which must
    be ready, does not support it."""
    if not logit_pass.reads_plain(q, k, causal):
        return None
    return FoundPacked(*logit_pass.plain_rows(q, k, scale, causal, ALARM_THRESHOLD), None, None)


def find_plain_extremes(q: Tensor, k: Tensor, scale: float, causal: bool) -> FoundExtremes | None:
    """Like `find_extremes` for an F.scaled_dot_product_attention call without a mask."""
    if not logit_pass.reads_plain(q, k, causal):
        return None
    return FoundExtremes(logit_pass.plain_extremes(q, k, scale, causal))


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
        if keys.stop == keys.start:
            parts.append(no_change_rows(a[:, :, rows, 0]))
            continue
        change = NoPosition().scores(a[:, :, rows], c[:, :, keys], after.pos_q[:, rows], after.pos_k[:, keys], {})
        biases = [call.bias(rows, keys) for call in (before, after)]
        if biases[0] is not None and biases[1] is not None:
            change = change + (biases[1] - biases[0]).to(change.dtype)
        seen = _seen(after, rows, keys)
        parts.append(change_rows(seen.blank_(change), seen))
    return reduce_changes(parts, after.query_mask)


@torch.no_grad()
def logit_maxima(call: AttentionCall) -> tuple[Float[Tensor, " h"], Float[Tensor, " h"]]:
    """Returns only max_logit and min_logit [h] of `logit_stats`, at less than half the cost."""
    found = find_extremes(call).with_others(())
    return found.max_logit, found.min_logit


def find_extremes(call: AttentionCall) -> FoundExtremes | FoundStats:
    """Returns the extremes behind `logit_maxima`. Call it with gradients and autocast disabled."""
    fast = logit_pass.extremes_of(call)
    if fast is not None:
        return FoundExtremes(fast)
    found = extremes(call)
    if found is not None:
        return FoundStats(only_extremes(*found))
    q, k = call.encoded()
    top = q.new_full((q.shape[1],), -torch.inf)
    low = -top
    for rows, keys in _blocks(call):
        if keys.stop > keys.start:
            z, seen = _logits(call, q, k, rows, keys)
            counted = None if call.query_mask is None else call.query_mask[:, rows]
            most, least = extreme_logits(z, seen, counted)
            top, low = torch.maximum(top, most), torch.minimum(low, least)
    return FoundStats(only_extremes(top, low))


@torch.no_grad()
def row_logsumexp(call: AttentionCall) -> PerRow:
    """Returns ln Σ exp(capped logit) over the keys of each row, without a sink, in nats; -inf for rows that see no
    key."""
    q, k = call.encoded()
    parts, cap = [], call.spec.cap
    for rows, keys in _blocks(call):
        z, seen = _logits(call, q, k, rows, keys)
        if not z.shape[-1]:
            parts.append(z.new_full(z.shape[:-1], -torch.inf))
            continue
        z = seen.lower_(z if cap.kind == "none" else seen.blank_(cap.apply(z)))
        none = seen.counts(z.shape[2], z.device) == 0
        parts.append(z.logsumexp(-1).masked_fill(none, -torch.inf))
    return torch.cat(parts, 2)


@torch.no_grad()
def stats_of_rows(call: AttentionCall, rows: KernelRows) -> LogitStats:
    """Reduces a kernel's rows to max_logit, capped_max_logit, entropy, entropy_min and n_queries per head.

    Other fields are neutral, with n_pairs 0. Rows excluded by the call's `query_mask` are not counted. Logits are those
    of q and k in the kernel's precision.
    """
    return find_kernel_rows(call, rows).with_others(())


def find_kernel_rows(call: AttentionCall, rows: KernelRows) -> FoundByKernel:
    """Returns the findings behind `stats_of_rows`. Call it with gradients disabled."""
    sink = sink_logit(call)
    if sink is not None:
        entropy, _ = with_sink(rows.entropy, rows.entropy, rows.lse, sink.to(rows.lse))
        rows = rows._replace(entropy=entropy)
    return FoundByKernel(rows, call.query_mask, call.k.shape[1], call.spec.cap)


@torch.no_grad()
def sampled_stats(call: AttentionCall, rate: int) -> LogitStats | None:
    """Returns head statistics with entropies from one in `rate` rows on average, and exact largest logits.

    `entropy_error` is half the width of a 95 % interval. entropy_min is NaN. n_queries is an estimate if some rows are
    excluded or see no key. Returns None if no kernel supports the call, or if using all rows costs no more.
    """
    heads = sampled_numbers(call, rate) if sink_logit(call) is None else None  # its entropies are over keys alone
    if heads is None:
        return None
    numbers = dataclasses.replace(
        LogitStats.empty(len(heads.n), call.k.shape[1], heads.largest),
        max_logit=heads.largest,
        entropy=heads.entropy,
        entropy_min=torch.full_like(heads.entropy, torch.nan),
        n_queries=heads.n,
        entropy_error=heads.error,
    )
    return with_capped(numbers, call.spec.cap)


def _scaled(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns encoded q and k with the scale applied to q, in float32 or wider, where differences of half-precision
    numbers are exact."""
    q, k = (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in call.encoded())
    return q * call.spec.factor(call.pos_q, q.shape[-1], call.params, q.dtype), k


def _blocks(call: AttentionCall) -> Iterator[tuple[slice, slice]]:
    """Yields blocks of rows, each with the range of keys that its rows can see."""
    for rows in row_blocks(call, BLOCK if call.q.device.type == "cpu" else BLOCK_OFF_CPU, ROWS):
        yield rows, call.span(rows)


def _logits(call: AttentionCall, q: Tensor, k: Tensor, rows: slice, keys: slice) -> tuple[Tensor, VisibleKeys]:
    """Returns the blanked logits of a block of encoded q and k, before the cap, and the visible keys."""
    seen = _seen(call, rows, keys)
    return seen.blank_(call.scores(q[:, :, rows], k[:, :, keys], rows, keys)), seen


def _seen(call: AttentionCall, rows: slice, keys: slice) -> VisibleKeys:
    start, n = 0, keys.stop - keys.start
    if call.causal and call.plain and call.mask is None and call.window is None:
        # Every row of the block sees the keys before the block's diagonal.
        start = min(max(call.k.shape[2] - call.q.shape[2] + rows.start + 1 - keys.start, 0), n)
    visible = call.visible(rows, slice(keys.start + start, keys.stop)) if start < n else None
    return VisibleKeys(visible, n if visible is None else start, n)


def _products(call: AttentionCall, q: Tensor, k: Tensor, rows: slice, keys: slice) -> tuple[Tensor | None, float]:
    """Returns unit · q·k of a block (None if it equals the logits) and the unit."""
    unit = call.spec.factor(call.pos_q, q.shape[-1], call.params, q.dtype)
    added = call.mask is not None and call.mask.dtype != torch.bool
    if call.spec.position.folds and not added and isinstance(unit, float) and unit > 0:
        return None, unit
    products = NoPosition().scores(q[:, :, rows], k[:, :, keys], call.pos_q[:, rows], call.pos_k[:, keys], call.params)
    return products, 1.0


def _weight_rows(
    call: AttentionCall, z: Tensor, seen: VisibleKeys, members: Members | None, sink: Tensor | None
) -> dict[str, Tensor]:
    """Returns the largest capped logit, entropy, first weight and class weights for lowered logits, which it
    overwrites."""
    cap, normalizer = call.spec.cap, call.spec.normalizer
    if cap.kind != "none":
        z = seen.lower_(seen.blank_(cap.apply(z)))
    if normalizer.softmax_over_keys:
        return softmax_rows(z, seen, members, sink)
    weights = normalizer.weights(z, seen.whole(z), call.params)
    total = weights.sum(-1)
    total = torch.where(total > 0, total, 1.0)
    split = {} if members is None else {"class_mass": by_class(weights, members) / total[..., None]}
    first = seen.first(weights) / total
    return {"capped_max": z.amax(-1), "entropy": entropy(weights).clamp_min(0), "first_weight": first, **split}


def _keys_seen(call: AttentionCall) -> Tensor:
    """Returns which keys [b g s] are seen by at least one counted row, in any of the heads that share them."""
    b, g, s, _ = call.k.shape
    counted = call.query_mask
    if _all_keys_seen(call):
        return torch.ones(b, g, s, dtype=torch.bool, device=call.k.device)
    alike = call.mask is None or call.mask.shape[2] == 1  # equal for all rows, as padding is
    whole = type(call) is AttentionCall and call.window is None and call.pos_q.numel() > 0
    if whole and alike and not call.pos_q.is_floating_point():
        return _keys_before(call)
    found = torch.zeros(b, g, s, dtype=torch.bool, device=call.k.device)
    for rows, keys in _blocks(call):
        visible = call.visible(rows, keys)
        if visible is None:
            visible = torch.ones(1, 1, 1, keys.stop - keys.start, dtype=torch.bool, device=found.device)
        if counted is not None:
            visible = visible & counted[:, None, rows, None]
        found[..., keys] |= _by_group(visible.any(-2), g)
    return found


def _all_keys_seen(call: AttentionCall) -> bool:
    """True if it is known that all keys are seen, without reading masks and positions."""
    if call.query_mask is not None or call.mask is not None:
        return False
    return call.window is None and (not call.causal or call.plain)


def _keys_before(call: AttentionCall) -> Tensor:
    """Returns which keys [b g s] the mask makes visible to all rows, up to the position of the last counted row."""
    b, g, s, _ = call.k.shape
    last, counted = call.pos_q.expand(b, -1), call.query_mask
    seen = torch.ones(b, 1, s, dtype=torch.bool, device=call.k.device)
    if counted is not None:
        last = torch.where(counted, last, torch.iinfo(last.dtype).min)
        seen = seen & counted.any(1)[:, None, None]
    if call.causal:
        seen = seen & (call.pos_k <= last.amax(1, keepdim=True))[:, None]
    shown = dataclasses.replace(call, causal=False).visible(slice(None), slice(None))
    seen = seen if shown is None else seen & _by_group(shown[:, :, 0], g)
    return seen.expand(b, g, s)


def _by_group(seen: Tensor, g: int) -> Tensor:
    """Reduces [b|1 h|1 s] over query heads to [b|1 g|1 s], True where a head that shares the keys sees the key."""
    return seen if seen.shape[1] in (1, g) else seen.unflatten(1, (g, -1)).any(2)


# Statistics from row logsumexps: bounds on the largest logit at no cost, the maximum and the entropy at little cost.

StatsLevel = Literal["bracket", "max", "entropy", "entropy:sample=16", "entropy:sample=32"]

GUIDED_ROWS = 4  # rows per sequence and head whose logits are computed to find and certify the maximum


def sample_rate(wanted: str) -> int:
    """Returns n if the entropy is computed for one row in n on average, or 0 if it is computed for all rows."""
    return int(wanted.partition("sample=")[2] or 0)


def attend_with_logsumexp(call: AttentionCall) -> tuple[Outputs, PerRow] | None:
    """Returns out [b h t e] and lse [b h t] of one fused call, or None if torch does not return the logsumexp.

    torch's fused kernels compute it anyway, and the operators below SDPA return it. Output and gradients equal those of
    SDPA; the logsumexp has no gradient. On a GPU this uses the operator that SDPA itself would choose.
    """
    if _no_fused_call(call):
        return None
    q, k, v, scale = folded(call)
    if call.q.device.type == "cpu":
        return flash_on_cpu(q, k, v, 0.0, call.causal, scale=scale)
    return fused_with_logsumexp(q, k, v, call.causal, scale)


def no_logsumexp(call: AttentionCall) -> str:
    """Returns why `attend_with_logsumexp` returns None for a call."""
    return _no_fused_call(call) or "the operator that torch chooses for this call on a GPU returns no logsumexp"


def _no_fused_call(call: AttentionCall) -> str:
    device = call.q.device.type
    if device not in ("cpu", "cuda"):
        return f"on {device} torch returns no logsumexp"
    if call.dropout or not call.whole:
        return (
            "torch returns no logsumexp with dropout, a mask, a window, packed sequences, or fewer causal queries "
            "than keys"
        )
    if device == "cuda" and torch.compiler.is_compiling():
        return "torch.compile cannot trace the choice of the fused operator"
    if call.v.shape[-1] != call.q.shape[-1]:
        return "torch's fused operators only take values as wide as the queries"
    return ""


@torch.no_grad()
def exact_bracket(call: AttentionCall, why: str, price: StatsLevel = "entropy") -> LogitBracket:
    """Returns the exact largest logit and entropy per head, computed in a separate pass, for calls without a
    logsumexp."""
    rate = sample_rate(price)
    heads = sampled_numbers(call, rate) if rate and sink_logit(call) is None else None
    if heads is not None:
        note = f"computed in one pass over q and k, with entropies from a sample of rows: {why}"
        return LogitBracket.exact(heads.largest, heads.entropy, note, heads.error)
    rows = row_statistics(call)
    if rows is None:
        exact = logit_stats(call)
        return LogitBracket.exact(exact.max_logit, exact.entropy, f"computed in a full pass over all logits: {why}")
    found = stats_of_rows(call, KernelRows(rows.largest, rows.lse, rows.entropy))
    return LogitBracket.exact(found.max_logit, found.entropy, f"computed in one pass over q and k: {why}")


def fused_with_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor] | None:
    """Returns out and lse of the fused operator that SDPA would choose on a GPU; None if it would not choose a fused
    operator."""
    if q.shape[-1] % 8 or v.shape[-1] % 8:  # SDPA would pad such heads itself
        return None
    gqa = q.shape[1] != k.shape[1]
    chosen = kernel_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=gqa)
    fused = _FUSED.get(SDPBackend(chosen))
    if fused is None:
        return None
    operator, between = fused
    out, lse = operator(q, k, v, *between, causal, scale=scale)[:2]
    if lse.ndim == 4:  # cuDNN returns [b h t 1]
        lse = lse[..., 0]
    return out, lse[..., : q.shape[2]]  # the memory-efficient kernel pads rows to a multiple of 32


# The operator of each choice, and its arguments between v and causality: the dropout; or a bias, whether to return the
# logsumexp, and the dropout.
_FUSED: dict[SDPBackend, tuple[Callable[..., Any], tuple[object, ...]]] = {
    SDPBackend.FLASH_ATTENTION: (flash, (0.0,)),
    SDPBackend.EFFICIENT_ATTENTION: (memory_efficient, (None, True, 0.0)),
    SDPBackend.CUDNN_ATTENTION: (cudnn, (None, True, 0.0)),
}


def bracket(call: AttentionCall, lse: PerRow, price: StatsLevel) -> LogitBracket:
    """Returns bounds on the largest logit per head from lse [b h t].

    lse_i - ln n_i <= max_j z_ij <= lse_i, where row i sees n_i keys. At the price "max", the maximum is searched for in
    the rows with the largest lse; if it is at least the next largest lse, no other row can exceed it. The price
    "entropy" adds H_i = lse_i - E_p[z_i], where E_p[z_i] comes from attention with keys in place of values;
    then lse_i - H_i <= max_j z_ij. This difference loses digits at large logits: its error is about 1e-7 · lse in
    float32, and ten times that in total. A GPU computes the maximum and the entropy in a separate pass, at the same
    cost and without this loss. With sampled rows, the entropy comes from the sample, and the maximum from the tiles
    that the logsumexps do not rule out. Rows excluded by the call's `query_mask` are not counted.
    """
    if price == "bracket":
        ends = logit_pass.bracket_of(lse.detach(), call)
        lower, upper = lse_bounds(call, lse.detach()) if ends is None else ends
        return LogitBracket(lower=lower, upper=upper)
    heads = sampled_numbers(call, rate, lse.detach()) if (rate := sample_rate(price)) else None
    if heads is not None:
        return LogitBracket.exact(heads.largest, heads.entropy, entropy_error=heads.error)
    return _bracket(call, lse, price)


@torch.no_grad()
def _bracket(call: AttentionCall, lse: Tensor, price: StatsLevel) -> LogitBracket:
    out = None if call.query_mask is None else ~call.query_mask[:, None]
    if out is not None:
        lse = lse.masked_fill(out, -torch.inf)
    lower, upper = lse_bounds(call, lse)
    wants_entropy = price != "max"
    n_rows = lse[:, 0].numel() if call.query_mask is None else call.query_mask.sum().clamp_min(1)
    rows = row_statistics(call) if wants_entropy else None
    if rows is not None:
        top, entropy = rows.largest.amax((0, 2)), rows.entropy.sum((0, 2)) / n_rows
        return LogitBracket.exact(top, entropy)
    q, k, _, scale = folded(call)
    entropy = None
    if wants_entropy:
        entropies = _entropies(call, lse)
        entropies = entropies if out is None else entropies.masked_fill(out, 0.0)
        lower = torch.maximum(lower, (lse - entropies).amax((0, 2)))
        entropy = entropies.sum((0, 2)) / n_rows
    found, bar = _guided(q, k, lse, scale, call)
    certified = (found >= bar) & found.isfinite()
    return LogitBracket(
        lower=torch.where(certified, found, torch.maximum(lower, found)),
        upper=torch.where(certified, found, upper),
        entropy=entropy,
        certified=certified,
    )


def _entropies(call: AttentionCall, lse: Tensor) -> Tensor:
    """Returns the entropy [b h t] of every row."""
    q, k, _, scale = folded(call)
    mean_key = torch.nn.functional.scaled_dot_product_attention(
        q, k, k, is_causal=call.causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    mean = torch.linalg.vecdot(q.to(lse.dtype), mean_key.to(lse.dtype))
    return (lse - scale * mean).clamp_min(0)


def _guided(q: Tensor, k: Tensor, lse: Tensor, scale: float, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns per head the largest logit of the rows with the largest lse, and the largest lse of all other rows.

    Up to GUIDED_ROWS rows of each sequence are used. All of k [b g s d] is read once, which costs less than gathering
    keys.
    """
    if lse.dtype == torch.float32 and logit_pass.holds(q, k) and logit_pass.ready():
        found, others = torch.ops.qkeel_native.guided_maxima(q, k, lse, scale, call.causal, GUIDED_ROWS)
        return found.amax(0), others.amax(0)
    b, h, t, d = q.shape
    m = min(GUIDED_ROWS, t)
    top = lse.topk(min(m + 1, t), dim=-1)
    row = top.indices[..., :m]
    rows = q.gather(2, row[..., None].expand(b, h, m, d)).to(lse.dtype) * scale
    groups = rows.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # rows of all heads that share a key head
    # Copied explicitly: matmul would copy the transpose, which takes six times as long.
    logits = (groups @ k.to(lse.dtype).contiguous().mT).view(b, h, m, -1)
    if call.causal:
        logits.masked_fill_(torch.arange(k.shape[2], device=q.device) > row[..., None], -torch.inf)
    logits.masked_fill_((top.values[..., :m] == -torch.inf)[..., None], -torch.inf)  # excluded rows
    others = top.values[..., m] if t > m else torch.full_like(top.values[..., 0], -torch.inf)
    return logits.amax((0, 2, 3)), others.amax(0)
