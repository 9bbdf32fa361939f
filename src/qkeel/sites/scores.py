"""ScoresCall: a hand-written attention as it was seen, and the statistics of what went into its softmax."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from qkeel.functional.norms import wide
from qkeel.functional.stats import LogitStats
from qkeel.spec import AttentionSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoresCall:
    """Logits [b h t s] before the cap, `capped` ones as the softmax took them, and who is hidden.

    Where no cap was seen both are one tensor. `hidden` [b|1 h|1 t|1 s] is True where a query may not see a key.
    q [b h t d] and k [b g s d] are those that were multiplied, or None where that could not be told: they carry
    norms and weights, the logits are never computed from them. `headless` marks a call of one head of several.
    """

    spec: AttentionSpec
    logits: Tensor
    capped: Tensor
    hidden: Tensor | None
    q: Tensor | None
    k: Tensor | None
    headless: bool = False


@torch.no_grad()
def scores_stats(call: ScoresCall) -> LogitStats:
    """Exact LogitStats of a hand-written call; entropy of the softmax over the visible keys, sinks left out."""
    z = call.logits.to(wide(call.logits.dtype))
    b, h, t, s = z.shape
    hidden = torch.zeros((), dtype=torch.bool, device=z.device) if call.hidden is None else call.hidden
    hidden = hidden.expand(b, h, t, s)
    seen = ~hidden.all(-1)
    top = z.masked_fill(hidden, -torch.inf)
    capped = top if call.capped is call.logits else call.capped.to(z.dtype).masked_fill(hidden, -torch.inf)
    entropy = row_entropy(capped).masked_fill(~seen, 0.0)
    pairs = b * t * s - hidden.sum((0, 2, 3))
    n_queries = seen.sum((0, 2))
    query = _norms(call.q, seen, like=z)
    key = _norms(call.k, ~hidden.all(-2), like=z)
    return LogitStats(
        max_logit=top.amax((0, 2, 3)),
        min_logit=z.masked_fill(hidden, torch.inf).amin((0, 2, 3)),
        mean_logit=z.masked_fill(hidden, 0.0).sum((0, 2, 3)) / pairs.clamp_min(1),
        capped_max_logit=capped.amax((0, 2, 3)),
        entropy=entropy.sum((0, 2)) / n_queries.clamp_min(1),
        entropy_min=entropy.masked_fill(~seen, torch.inf).amin((0, 2)),
        query_norm=query[0],
        query_norm_max=query[1],
        key_norm=key[0],
        key_norm_max=key[1],
        n_queries=n_queries,
        n_pairs=pairs,
        n_keys=key[2],
    )


def row_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax over the last dimension, centred; 0 for a row of -inf."""
    top = logits.amax(-1, keepdim=True)
    centred = logits - top.masked_fill(top == -torch.inf, 0.0)
    p = centred.exp()
    mass = p.sum(-1)
    spread = (p * centred.masked_fill(p == 0, 0.0)).sum(-1)
    return torch.where(mass > 0, mass.log() - spread / mass, 0.0).clamp_min(0)


def _norms(x: Tensor | None, seen: Tensor, *, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and largest norm per head of the seen vectors, and their count; zeros where they are unknown."""
    if x is None:
        zeros = like.new_zeros(seen.shape[1])
        return zeros, zeros, torch.zeros_like(zeros, dtype=torch.int64)
    heads = x.shape[1]
    if heads != seen.shape[1]:
        seen = seen.unflatten(1, (heads, -1)).any(2)
    norms = x.to(like.dtype).norm(dim=-1).masked_fill(~seen, 0.0)
    count = seen.sum((0, 2))
    return norms.sum((0, 2)) / count.clamp_min(1), norms.amax((0, 2)), count


def cat_heads(parts: list[LogitStats]) -> LogitStats:
    """The statistics of calls of one head each as those of one site."""
    fields = (f.name for f in dataclasses.fields(LogitStats))
    return LogitStats(**{name: torch.cat([getattr(p, name) for p in parts]) for name in fields})
