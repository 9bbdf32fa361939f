"""Exact LogitStats of a call without a T×T matrix: one pass over blocks of rows, under no_grad."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from qkeel.functional.normalizers import entropy
from qkeel.functional.stats import LogitStats
from qkeel.kernels.contract import row_blocks
from qkeel.spec.call import AttentionCall
from qkeel.spec.cap import NoCap

BLOCK = 1 << 20  # logits at once: 4 MB in float32, so that the passes over a block stay in cache
ROWS = 64  # but at least this many rows: fewer make poor matrix products


@torch.no_grad()
def logit_stats(call: AttentionCall) -> LogitStats:
    """Statistics of the logits, weights and norms of a call, exactly.

    Centred entropy: with m the row maximum, H = ln Σe^(z-m) - Σ(z-m)e^(z-m) / Σe^(z-m); no cancellation at
    logits of thousands. Masked pairs count nowhere.
    """
    q, k = call.encoded()
    heads, groups = q.shape[1], k.shape[1]
    sums = _Sums.start(heads, q)
    seen_keys = None if _all_keys_seen(call) else torch.zeros_like(k[..., 0], dtype=torch.bool)
    seen_rows = []
    for rows in row_blocks(call, BLOCK, ROWS):
        keys = slice(0, call.last_key(rows))
        if keys.stop == 0:
            seen_rows.append(torch.zeros(*q.shape[:2], rows.stop - rows.start, dtype=torch.bool, device=q.device))
            continue
        block = _Block.of(call, q, k, rows, keys)
        sums.add(call, block)
        seen_rows.append(block.row_seen.expand(*q.shape[:2], -1))
        if seen_keys is not None:
            _mark(seen_keys[..., keys], block.visible)
    rows_seen = torch.cat(seen_rows, dim=2)
    keys_seen = torch.ones_like(k[..., 0], dtype=torch.bool) if seen_keys is None else seen_keys
    return sums.finish(_norms(q, rows_seen), _norms(k, keys_seen), groups)


def _all_keys_seen(call: AttentionCall) -> bool:
    return call.mask is None and (not call.causal or call.plain)


def _mark(seen: Tensor, visible: Tensor | None) -> None:
    """Note which keys [b g keys] some query sees."""
    if visible is None:
        seen.fill_(True)
        return
    any_row = visible.any(-2)
    if any_row.shape[1] not in (1, seen.shape[1]):
        any_row = any_row.view(any_row.shape[0], seen.shape[1], -1, any_row.shape[-1]).any(2)
    seen |= any_row


def _norms(x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and largest norm of the seen vectors per head, and how many there are."""
    norms = x.norm(dim=-1).masked_fill(~seen, 0.0)
    count = seen.sum((0, 2))
    return norms.sum((0, 2)) / count.clamp_min(1), norms.amax((0, 2)), count


@dataclasses.dataclass(slots=True)
class _Block:
    """Logits of some rows; `tail` are the columns where anything may be hidden."""

    z: Tensor
    visible: Tensor | None
    tail: slice
    row_seen: Tensor

    @classmethod
    def of(cls, call: AttentionCall, q: Tensor, k: Tensor, rows: slice, keys: slice) -> _Block:
        z = call.scores(q[:, :, rows], k[:, :, keys], rows, keys)
        tail = keys
        if call.causal and call.plain and call.mask is None:
            # Every row of the block sees the keys before the block's own diagonal.
            first = k.shape[2] - q.shape[2] + rows.start + 1
            tail = slice(min(max(first, 0), keys.stop), keys.stop)
        visible = call.visible(rows, tail) if tail.start < tail.stop else None
        seen = torch.ones(1, 1, z.shape[2], dtype=torch.bool, device=z.device)
        if visible is not None and tail.start == 0:
            some = visible.any(-1)  # [b|1 h|1 rows|1]
            seen = some.expand(*some.shape[:2], z.shape[2])
        return cls(z, visible, tail, seen)


@dataclasses.dataclass(slots=True)
class _Sums:
    """Running per-head sums over blocks."""

    max_logit: Tensor
    min_logit: Tensor
    total: Tensor
    entropy: Tensor
    entropy_min: Tensor
    capped_max: Tensor
    pairs: Tensor

    @classmethod
    def start(cls, heads: int, like: Tensor) -> _Sums:
        def full(value: float) -> Tensor:
            return torch.full((heads,), value, dtype=like.dtype, device=like.device)

        pairs = torch.zeros(heads, dtype=torch.int64, device=like.device)
        return cls(full(-torch.inf), full(torch.inf), full(0), full(0), full(torch.inf), full(-torch.inf), pairs)

    def add(self, call: AttentionCall, block: _Block) -> None:
        z, visible, tail = block.z, block.visible, block.tail
        b, h, r, n = z.shape
        hidden = None if visible is None else (~visible).expand(b, h, r, n - tail.start)
        if hidden is None:
            low, total, pairs = z.amin((0, 2, 3)), z.sum((0, 2, 3)), b * r * n
        else:
            part = z[..., tail]
            low = part.masked_fill(hidden, torch.inf).amin((0, 2, 3))
            total = part.masked_fill(hidden, 0.0).sum((0, 2, 3))
            if tail.start:
                head = z[..., : tail.start]
                low = torch.minimum(low, head.amin((0, 2, 3)))
                total = total + head.sum((0, 2, 3))
            pairs = b * r * n - hidden.sum((0, 2, 3))
            part.masked_fill_(hidden, torch.finfo(z.dtype).min / 4)  # finite: 0 · it is 0, not NaN
        self.min_logit = torch.minimum(self.min_logit, low)
        self.total = self.total + total
        self.pairs = self.pairs + pairs
        row_max = z.amax(-1)
        row_entropy = self._entropy(call, z, row_max, block)
        unseen = ~block.row_seen
        self._rows(call, row_max.masked_fill(unseen, -torch.inf), row_entropy, unseen)

    def _entropy(self, call: AttentionCall, z: Tensor, row_max: Tensor, block: _Block) -> Tensor:
        spec = call.spec
        capped = not isinstance(spec.cap, NoCap)
        if not spec.normalizer.softmax_over_keys:
            visible = None
            if block.visible is not None:
                visible = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).expand(z.shape).clone()
                visible[..., block.tail] = block.visible
            return entropy(spec.normalizer.weights(spec.cap.apply(z), visible, call.params))
        top = row_max[..., None]
        if capped:
            hidden = z < torch.finfo(z.dtype).min / 8
            z, top = spec.cap.apply(z), spec.cap.apply(top)
            z = z.masked_fill(hidden, torch.finfo(z.dtype).min / 4)
        z -= top
        p = z.exp()
        mass = p.sum(-1)
        return mass.log() - p.mul_(z).sum(-1) / mass

    def _rows(self, call: AttentionCall, row_max: Tensor, row_entropy: Tensor, unseen: Tensor) -> None:
        top = row_max.amax((0, 2))
        self.max_logit = torch.maximum(self.max_logit, top)
        self.capped_max = torch.maximum(self.capped_max, call.spec.cap.apply(top))
        self.entropy = self.entropy + row_entropy.masked_fill(unseen, 0.0).sum((0, 2))
        self.entropy_min = torch.minimum(
            self.entropy_min, row_entropy.masked_fill(unseen, torch.inf).amin((0, 2)).clamp_min(0)
        )

    def finish(
        self, query: tuple[Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor, Tensor], groups: int
    ) -> LogitStats:
        n_queries = query[2]
        nothing = n_queries == 0
        return LogitStats(
            max_logit=self.max_logit,
            min_logit=self.min_logit,
            mean_logit=self.total / self.pairs.clamp_min(1),
            capped_max_logit=self.capped_max.masked_fill(nothing, -torch.inf),
            entropy=(self.entropy / n_queries.clamp_min(1)).clamp_min(0),
            entropy_min=self.entropy_min,
            query_norm=query[0],
            query_norm_max=query[1],
            key_norm=key[0],
            key_norm_max=key[1],
            n_queries=n_queries,
            n_pairs=self.pairs,
            n_keys=key[2],
        )
