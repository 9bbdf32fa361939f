"""Logits to weights. `visible` is True where a query may see a key; None means everywhere.

A row that sees no key gets weights 0, never NaN, and so do its gradients.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Logits = Float[Tensor, "*batch t s"]
Visible = Bool[Tensor, "*#batch #t #s"] | None


def _hide(z: Tensor, visible: Tensor | None) -> Tensor:
    # The most negative finite number, not -inf: a row without keys stays free of NaN, forward and backward.
    return z if visible is None else z.masked_fill(~visible, torch.finfo(z.dtype).min)


def _blank(weights: Tensor, visible: Tensor | None) -> Tensor:
    return weights if visible is None else weights.masked_fill(~visible, 0.0)


def softmax(z: Logits, visible: Visible = None) -> Logits:
    """Returns exp(z_ij) / Σ_j exp(z_ij) over the visible keys. Source: Vaswani et al. 2017, arXiv 1706.03762."""
    return _blank(torch.softmax(_hide(z, visible), dim=-1), visible)


def sink_softmax(z: Logits, sink: Tensor, visible: Visible = None) -> Logits:
    """Returns exp(z_ij) / (exp(s) + Σ_j exp(z_ij)): rows sum to less than 1. `sink` broadcasts to [*batch t 1].

    s = 0 is "softmax off by one"; a learned s per head is that of gpt-oss and DeepSeek-V4.

    Source: Miller 2023, Attention is off by one; gpt-oss as shipped in transformers.
    """
    column = sink.to(z.dtype).expand(*z.shape[:-1], 1)
    padded = torch.softmax(torch.cat([_hide(z, visible), column], dim=-1), dim=-1)
    return _blank(padded[..., :-1], visible)


def sigmoid(z: Logits, bias: float | Tensor, visible: Visible = None) -> Logits:
    """σ(z + b) in [0, 1], not normalised over the row. Source: Ramapuram et al. 2024, arXiv 2409.04431, equation 3."""
    return _blank(torch.sigmoid(z + bias), visible)


def squared_relu(z: Logits, visible: Visible = None) -> Logits:
    """Returns relu(z)² / n with n = number of visible keys of the row.

    Source: Hua et al. 2022, arXiv 2202.10447, in the form of bert4keras, which divides after squaring
    (the paper's code divides the logit by n before squaring: another number).
    """
    n = z.shape[-1] if visible is None else visible.expand(z.shape).sum(-1, keepdim=True).clamp_min(1)
    return _blank(torch.relu(z).square() / n, visible)


def softpick(z: Logits, visible: Visible = None, eps: float = 1e-8) -> Logits:
    """Returns relu(e^z - 1) / (Σ|e^z - 1| + eps): no sink needed, rows sum to at most 1.

    Computed with the row maximum m taken out: relu(e^(z-m) - e^-m) / (Σ|e^(z-m) - e^-m| + eps).

    Source: Zuhri et al. 2025, arXiv 2504.20966, equation 5 and their code.
    """
    if z.shape[-1] == 0:  # no key, no maximum
        return z
    hidden = _hide(z, visible)
    m = hidden.amax(-1, keepdim=True).detach().clamp_min(0.0)
    rise = _blank(torch.exp(hidden - m) - torch.exp(-m), visible)
    return torch.relu(rise) / (rise.abs().sum(-1, keepdim=True) + eps)


def entropy(weights: Float[Tensor, "*batch s"]) -> Float[Tensor, "*batch"]:
    """-Σ p ln p of the row made to sum to one, in nats; 0 for an empty row.

    Weights that do not sum to one (sinks, sigmoid, squared ReLU, softpick) are renormalised first, so the
    number says how spread the mass on the keys is, whatever share of it went to a sink. At most ln s.

    Source: Zhai et al. 2023, arXiv 2303.06296 (attention entropy).
    """
    total = weights.sum(-1, keepdim=True)
    p = weights / torch.where(total > 0, total, torch.ones_like(total))
    # Not xlogy(p, p): its gradient at p = 0 is NaN.
    return -(p * torch.where(p > 0, p, torch.ones_like(p)).log()).sum(-1)
