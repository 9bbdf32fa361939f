"""Statistics of the keys that sparse attention chooses: how many, how far away, and their weight in dense attention.

Shapes: b batch, h query heads, r rows, s keys.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

PerRow = Float[Tensor, "b h r"]
Pairs = Bool[Tensor, "b h r s"]


def chosen_distances(chosen: Pairs, allowed: Pairs, positions: Int[Tensor, " r"]) -> dict[str, Tensor]:
    """Returns statistics [b h r] of where each row's chosen keys lie, keyed by recorded name.

    With n keys to choose from and c chosen keys, select_share is c / n. select_distance is the mean distance of the
    chosen keys in tokens, divided by n, and select_distance_max is the largest distance, divided by n.
    select_local_share is the share of the chosen keys that are among the c nearest keys; it is 1 where the choice is a
    sliding window.

    Args:
        chosen: the keys that each row attends to, a subset of `allowed`.
        allowed: the keys that the row could have chosen.
        positions: the index of each row's query among the keys.

    Source: llm-internal-medicine's dsa_metrics for the first three; the last is derived here and needs no window width.
    """
    s = chosen.shape[-1]
    n, c = (x.sum(-1).clamp_min(1) for x in (allowed, chosen))
    apart = (positions[:, None] - torch.arange(s, device=chosen.device)).abs().expand(chosen.shape)
    rank = apart.masked_fill(~allowed, s).argsort(dim=-1, stable=True).argsort(-1)
    near = chosen & (rank < c[..., None])
    far = apart.masked_fill(~chosen, 0).to(torch.float32)
    return {
        "select_share": c / n,
        "select_distance": far.sum(-1) / c / n,
        "select_distance_max": far.amax(-1) / n,
        "select_local_share": near.sum(-1) / c,
    }


def dense_comparison(z: Float[Tensor, "b h r s"], chosen: Pairs, allowed: Pairs) -> dict[str, PerRow]:
    """Returns statistics [b h r] of how much of dense attention the chosen keys retain, keyed by recorded name.

    Let p be the softmax of z over all allowed keys. dense_recall R is the weight that p puts on the chosen keys.
    Attention to these keys alone is p / R, so its divergence from dense attention is KL = -ln R, which is recorded as
    dense_kl, in nats. dense_top_share is 1 where the largest logit belongs to a chosen key. dense_entropy is the
    entropy of p, in nats.

    Args:
        z: logits of all pairs after the cap, in nats.
        chosen: the keys that each row attends to, a subset of `allowed`.
        allowed: the keys that the row could have chosen.

    Source: derived; llm-internal-medicine's dsa_metrics has the same statistics.
    """
    every = z.masked_fill(~allowed, -torch.inf)
    logs = every.log_softmax(-1)
    kl = -logs.masked_fill(~chosen, -torch.inf).logsumexp(-1)
    top = every.argmax(-1, keepdim=True)
    return {
        "dense_recall": (-kl).exp().clamp_max(1),
        "dense_kl": kl.clamp_min(0),
        "dense_top_share": chosen.gather(-1, top)[..., 0].to(z.dtype),
        "dense_entropy": -(logs.exp() * logs.masked_fill(~allowed, 0.0)).sum(-1),
    }


def key_coverage(chosen: Pairs, allowed: Pairs) -> Float[Tensor, "b h"]:
    """Returns the share of all available keys that at least one row chose; it is low if all rows choose the same keys.

    Source: llm-internal-medicine's dsa_metrics, over the given rows.
    """
    return chosen.any(-2).sum(-1) / allowed.any(-2).sum(-1).clamp_min(1)


def index_choice(scores: Float[Tensor, "b h r s"], chosen: Pairs, allowed: Pairs) -> dict[str, PerRow]:
    """Returns statistics [b h r] of how an indexer's scores separate chosen keys from the others, keyed by recorded
    name.

    index_margin is the mean score of the chosen keys minus that of the other keys. index_top_mass is the sum of the
    chosen keys' positive scores divided by the sum of the positive scores of all keys; it is 0 where no score is
    positive.

    Source: llm-internal-medicine's dsa_metrics, which has the same statistics.
    """

    def mean(over: Pairs) -> PerRow:
        return scores.masked_fill(~over, 0.0).sum(-1) / over.sum(-1).clamp_min(1)

    kept, every = (scores.masked_fill(~over, 0.0).clamp_min(0).sum(-1) for over in (chosen, allowed))
    return {
        "index_margin": mean(chosen) - mean(allowed & ~chosen),
        "index_top_mass": kept / every.clamp_min(torch.finfo(every.dtype).tiny),
    }


def index_divergence(
    scores: Float[Tensor, "b 1 r s"], z: Float[Tensor, "b h r s"], seen: Bool[Tensor, "b 1 r s"]
) -> Float[Tensor, "b 1 r"]:
    """Returns Σ_s p_s ln(p_s / q_s), where q is the softmax of an indexer's scores and p is dense attention averaged
    over heads.

    Args:
        scores: the scores of the indexer.
        z: attention logits of all pairs after the cap, in nats.
        seen: the keys over which both softmaxes are computed.

    Source: DeepSeek-V3.2 (2025), which trains indexers on this loss while attention is still dense.
    """
    p = z.masked_fill(~seen, -torch.inf).softmax(-1).mean(1, keepdim=True)
    logs = scores.masked_fill(~seen, -torch.inf).log_softmax(-1)
    return -(torch.special.entr(p) + p * logs.masked_fill(~seen, 0.0)).sum(-1)


def index_sizes(
    q: Float[Tensor, "... d"], k: Float[Tensor, "... d"], weights: Float[Tensor, ...] | None
) -> dict[str, Tensor]:
    """Returns the sizes of an indexer's queries, keys and head weights, keyed by recorded name.

    A score is Σ_j w_j ReLU(q_j·k). index_query_norm and index_key_norm are the L2 norms of the query and key vectors.
    index_weight_mean is w, index_weight_max is |w|, and index_weight_negative is 1 where w < 0, so that a large q_j·k
    lowers a key's score.

    Source: llm-internal-medicine's dsa_metrics, which takes root mean squares of the same tensors instead of L2 norms.
    """
    found = {"index_query_norm": q.norm(dim=-1), "index_key_norm": k.norm(dim=-1)}
    if weights is not None:
        found["index_weight_mean"], found["index_weight_max"] = weights, weights.abs()
        found["index_weight_negative"] = (weights < 0).to(weights.dtype)
    return found
