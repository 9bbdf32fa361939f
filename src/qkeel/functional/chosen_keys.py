"""How much of dense attention the chosen keys of sparse attention retain, and how well an indexer predicts it.

Shapes: b batch, h query heads, r rows, s keys.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Pairs = Bool[Tensor, "b h r s"]


def dense_divergence(
    z: Float[Tensor, "b h r s"], chosen: Pairs, allowed: Pairs
) -> Float[Tensor, "b h r"]:
    """Returns KL = -ln R in nats, the divergence of attention to the chosen keys from dense attention.

    Let p be the softmax of z over all allowed keys. The recall R is the weight that p puts on the chosen keys, and
    attention to these keys alone is p / R.

    Args:
        z: logits of all pairs after the cap, in nats.
        chosen: the keys that each row attends to, a subset of `allowed`.
        allowed: the keys that the row could have chosen.

    Source: derived; llm-internal-medicine's dsa_metrics has the same statistics.

    >>> z, allowed = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 4, dtype=torch.bool)
    >>> chosen = torch.tensor([[[[True, True, False, False]]]])
    >>> round(dense_divergence(z, chosen, allowed).exp().item(), 5)  # 1 / R, and R is a half
    2.0
    """
    logs = z.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    return -logs.masked_fill(~chosen, -torch.inf).logsumexp(-1).clamp_max(0)


def index_divergence(
    scores: Float[Tensor, "b 1 r s"],
    z: Float[Tensor, "b h r s"],
    visible: Bool[Tensor, "b 1 r s"],
) -> Float[Tensor, "b 1 r"]:
    """Returns Σ_s p_s ln(p_s / q_s), where q is the softmax of an indexer's scores and p is dense attention averaged
    over heads.

    Args:
        scores: the scores of the indexer.
        z: attention logits of all pairs after the cap, in nats.
        visible: the keys over which both softmaxes are computed.

    Source: DeepSeek-V3.2 (2025), which trains indexers on this loss while attention is still dense.

    >>> z, visible = torch.zeros(1, 2, 1, 4), torch.ones(1, 1, 1, 4, dtype=torch.bool)
    >>> round(index_divergence(z[:, :1], z, visible).abs().item(), 5)  # an indexer with the same scores
    0.0
    """
    p = z.masked_fill(~visible, -torch.inf).softmax(-1).mean(1, keepdim=True)
    logs = scores.masked_fill(~visible, -torch.inf).log_softmax(-1)
    return -(torch.special.entr(p) + p * logs.masked_fill(~visible, 0.0)).sum(-1)
