"""Exact LogitStats of a call without a T×T matrix: one pass over blocks of rows, under no_grad."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.errors import RefusedError, ShapeError
from qkeel.functional.normalizers import entropy
from qkeel.functional.statistics.class_stats import KeyClasses
from qkeel.functional.statistics.logit_change import (
    LogitChange,
    change_factors,
    change_rows,
    no_change_rows,
    reduce_changes,
)
from qkeel.functional.statistics.logit_stats import LogitStats
from qkeel.functional.statistics.rows import (
    KernelRows,
    RowStats,
    Seen,
    by_class,
    extreme_logits,
    logit_rows,
    product_rows,
    softmax_rows,
)
from qkeel.kernels.native import logit_pass
from qkeel.kernels.prepare import extremes, head_numbers, row_blocks, sampled_numbers
from qkeel.kernels.stats.found import (
    FoundByKernel,
    FoundExtremes,
    FoundPacked,
    FoundRows,
    FoundStats,
    only_extremes,
    with_capped,
)
from qkeel.kernels.triton.available import HeadNumbers
from qkeel.metrics import ALARM_THRESHOLD
from qkeel.spec.band_call import of_key
from qkeel.spec.call import AttentionCall
from qkeel.spec.position.rotary import NoPosition

BLOCK = 1 << 20  # logits at once: 4 MB in float32, so that the passes over a block stay in cache
ROWS = 64  # but at least this many rows: fewer make poor matrix products


@torch.no_grad()
def logit_stats(call: AttentionCall, threshold: float = ALARM_THRESHOLD) -> LogitStats:
    """Statistics of the logits, weights, norms and angles of a call, exactly. Masked pairs count nowhere, nor do
    query rows that the call's `query_mask` leaves out. share_above is over `threshold` nats.
    """
    return find_rows(call, threshold).with_others(())


def find_rows(call: AttentionCall, threshold: float = ALARM_THRESHOLD) -> FoundRows | FoundPacked:
    """What `logit_stats` makes statistics of. Called without gradients, under no autocast."""
    fast = logit_pass.rows_of(call, threshold)
    if fast is not None:
        fields, n_keys, k_norm = fast
        seen = None if _all_keys_seen(call) else _keys_seen(call)
        return FoundPacked(fields, logit_pass.FIELDS, n_keys, k_norm, seen, call.query_mask, of_key(call))
    keys_seen = _keys_seen(call)
    q, k = call.encoded()
    q_norm, k_norm = q.norm(dim=-1), k.norm(dim=-1)
    classes = None if call.classes is None else call.classes.keys(q)
    parts = []
    for rows, keys in _blocks(call):
        if keys.stop == keys.start:
            parts.append(RowStats.nothing(q_norm[:, :, rows], classes))
            continue
        keys = keys if classes is None else slice(0, keys.stop)  # the members of classes are counted from the first key
        z, seen = _logits(call, q, k, rows, keys)
        products, unit = _products(call, q, k, rows, keys)
        products = z if products is None else seen.blank_(products)
        # In this order: logit_rows lowers z, _weight_rows overwrites it.
        angle = product_rows(products, unit, q_norm[:, :, rows], k_norm[:, :, keys], seen)
        found = logit_rows(z, seen, threshold, classes)
        parts.append(RowStats(**angle, **found, **_weight_rows(call, z, seen, classes)))
    rows = parts[0] if len(parts) == 1 else RowStats.cat(parts)
    return FoundRows(rows, call.query_mask, q_norm, k_norm, keys_seen, call.classes, of_key(call))


def find_plain_rows(q: Tensor, k: Tensor, scale: float, causal: bool) -> FoundPacked | None:
    """The same as `find_rows` of a call of F.scaled_dot_product_attention without a mask; None where the compiled pass,
    which must be ready, does not compute it."""
    if not logit_pass.reads_plain(q, k, causal):
        return None
    fields, n_keys, k_norm = logit_pass.plain_rows(q, k, scale, causal, ALARM_THRESHOLD)
    return FoundPacked(fields, logit_pass.FIELDS, n_keys, k_norm, None, None, None)


def find_plain_extremes(q: Tensor, k: Tensor, scale: float, causal: bool) -> FoundExtremes | None:
    """The same as `find_extremes` of such a call."""
    if not logit_pass.reads_plain(q, k, causal):
        return None
    return FoundExtremes(*logit_pass.plain_extremes(q, k, scale, causal).unbind())


@torch.no_grad()
def logit_change(before: AttentionCall, after: AttentionCall) -> LogitChange:
    """The change of the logits before the cap between two calls of the same batch, over the visible pairs.

    ΔS = S' - S from `change_factors`, blockwise: exact, at the cost of two products q kᵀ, no T×T matrix. Scales that
    learn and biases that move are in it. Pairs are those that `after` sees, its `query_mask` respected.

    The calls are under specs with the same norm and position.

    Raises:
        ShapeError: the calls are of different shapes. RefusedError: the position does not fold into q and k.
    """
    if before.q.shape != after.q.shape or before.k.shape != after.k.shape:
        raise ShapeError(
            f"expected two calls of the same batch, got q {tuple(before.q.shape)}, k {tuple(before.k.shape)} and then "
            f"q {tuple(after.q.shape)}, k {tuple(after.k.shape)}"
        )
    if not after.spec.position.folds:
        raise RefusedError(f"{after.spec.position.formula()} enters no product q·k whose change could be computed")
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
    """The max_logit and min_logit [h] of `logit_stats`, and nothing else: for less than half its cost."""
    found = find_extremes(call).with_others(())
    return found.max_logit, found.min_logit


def find_extremes(call: AttentionCall) -> FoundExtremes | FoundStats:
    """What `logit_maxima` is made of. Called without gradients, under no autocast."""
    fast = logit_pass.extremes_of(call)
    if fast is not None:
        return FoundExtremes(*fast)
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
def stats_of_rows(call: AttentionCall, rows: KernelRows) -> LogitStats:
    """A kernel's statistics per head: max_logit, capped_max_logit, entropy, entropy_min, n_queries of `logit_stats`.

    The rest is as if nothing was seen; n_pairs 0 says so. Rows that the call's `query_mask` leaves out count nowhere.
    The logits are those of q and k in the precision in which the kernel took them.
    """
    return find_kernel_rows(call, rows).with_others(())


def find_kernel_rows(call: AttentionCall, rows: KernelRows) -> FoundByKernel | FoundStats:
    """What `stats_of_rows` makes statistics of. Called without gradients."""
    heads = head_numbers(rows, call.query_mask)
    if heads is not None:
        return FoundStats(_of_heads(call, heads))
    return FoundByKernel(rows, call.query_mask, call.k.shape[1], call.spec.cap)


@torch.no_grad()
def sampled_stats(call: AttentionCall, rate: int) -> LogitStats | None:
    """The same with entropies from a sample of rows, every `rate`-th in the mean, and exact largest logits.

    `entropy_error` is half the width of a 95 % interval; entropy_min is NaN, and n_queries an estimate where rows are
    left out or see nothing. None where no kernel does it, or all rows cost as little.
    """
    heads = sampled_numbers(call, rate)
    return None if heads is None else _of_heads(call, heads)


def _of_heads(call: AttentionCall, heads: HeadNumbers) -> LogitStats:
    found = LogitStats.of_numbers(len(heads.n), call.k.shape[1], lambda value, count: heads.neutral[value, count])
    found = dataclasses.replace(
        found,
        max_logit=heads.largest,
        entropy=heads.entropy,
        entropy_min=heads.least_entropy,
        n_queries=heads.n,
        entropy_error=heads.error,
    )
    return with_capped(found, call.spec.cap)


def _scaled(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Encoded q and k, the scale on q; in float32 at least, where the differences of half floats are exact."""
    q, k = (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in call.encoded())
    return q * call.spec.factor(call.pos_q, q.shape[-1], call.params, q.dtype), k


def _blocks(call: AttentionCall) -> Iterator[tuple[slice, slice]]:
    """Rows and the keys that they can see at most."""
    for rows in row_blocks(call, BLOCK, ROWS):
        yield rows, call.span(rows)


def _logits(call: AttentionCall, q: Tensor, k: Tensor, rows: slice, keys: slice) -> tuple[Tensor, Seen]:
    """Blanked logits before the cap of a block of encoded q and k, and which keys are visible there."""
    seen = _seen(call, rows, keys)
    return seen.blank_(call.scores(q[:, :, rows], k[:, :, keys], rows, keys)), seen


def _seen(call: AttentionCall, rows: slice, keys: slice) -> Seen:
    start, n = 0, keys.stop - keys.start
    if call.causal and call.plain and call.mask is None and call.window is None:
        # Every row of the block sees the keys before the block's own diagonal.
        start = min(max(call.k.shape[2] - call.q.shape[2] + rows.start + 1 - keys.start, 0), n)
    visible = call.visible(rows, slice(keys.start + start, keys.stop)) if start < n else None
    return Seen(visible, n if visible is None else start, n)


def _products(call: AttentionCall, q: Tensor, k: Tensor, rows: slice, keys: slice) -> tuple[Tensor | None, float]:
    """Returns unit · q·k of a block and its unit; None where the logits themselves are that."""
    unit = call.spec.factor(call.pos_q, q.shape[-1], call.params, q.dtype)
    added = call.mask is not None and call.mask.dtype != torch.bool
    if call.spec.position.folds and not added and isinstance(unit, float) and unit > 0:
        return None, unit
    products = NoPosition().scores(q[:, :, rows], k[:, :, keys], call.pos_q[:, rows], call.pos_k[:, keys], call.params)
    return products, 1.0


def _weight_rows(call: AttentionCall, z: Tensor, seen: Seen, keys: KeyClasses | None) -> dict[str, Tensor]:
    """Largest capped logit, entropy, first weight and weight by class of lowered logits; overwrites them."""
    cap, normalizer = call.spec.cap, call.spec.normalizer
    if cap.kind != "none":
        z = seen.lower_(seen.blank_(cap.apply(z)))
    if normalizer.softmax_over_keys:
        return softmax_rows(z, seen, keys)
    weights = normalizer.weights(z, seen.whole(z), call.params)
    total = weights.sum(-1)
    total = torch.where(total > 0, total, 1.0)
    split = {} if keys is None else {"class_mass": by_class(weights, keys) / total[..., None]}
    first = seen.first(weights) / total
    return {"capped_max": z.amax(-1), "entropy": entropy(weights).clamp_min(0), "first_weight": first, **split}


def _keys_seen(call: AttentionCall) -> Tensor:
    """The keys [b g s] that some counted row sees, in any of the heads that share them."""
    b, g, s, _ = call.k.shape
    counted = call.query_mask
    if _all_keys_seen(call):
        return torch.ones(b, g, s, dtype=torch.bool, device=call.k.device)
    alike = call.mask is None or call.mask.shape[2] == 1  # to all rows, as padding is
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
    """True if it shows without a look at masks and positions."""
    if call.query_mask is not None or call.mask is not None:
        return False
    return call.window is None and (not call.causal or call.plain)


def _keys_before(call: AttentionCall) -> Tensor:
    """Keys [b g s] that the mask shows to all rows and that stand no later than the last of the rows that count."""
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
    """[b|1 h|1 s] for query heads as [b|1 g|1 s]: whether some head of those that share keys does."""
    return seen if seen.shape[1] in (1, g) else seen.unflatten(1, (g, -1)).any(2)
