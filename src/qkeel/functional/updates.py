"""Formulas on weights between steps: QK-Clip, logit-adaptive learning rates, Newton-Schulz."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def qk_clip_gamma(max_logit: Float[Tensor, " h"], threshold: float) -> Float[Tensor, " h"]:
    """γ_h = τ / S_h where S_h > τ, else exactly 1.

    S_h is the largest signed scaled logit. Zero, negative and -inf maxima (a head without data) give 1, and
    so do NaN and +inf, which would set the head's weights to zero for good: a clip never makes a weight worse.

    Source: Kimi K2, arXiv 2507.20534, section 2.1, equation 1.

    >>> qk_clip_gamma(torch.tensor([200.0, 100.0, -3.0, float("-inf")]), 100.0)
    tensor([0.5000, 1.0000, 1.0000, 1.0000])
    """
    over = (max_logit > threshold) & max_logit.isfinite()
    return torch.where(over, threshold / torch.where(over, max_logit, torch.ones_like(max_logit)), 1.0)


def group_max(x: Float[Tensor, " h"], n_groups: int) -> Float[Tensor, " g"]:
    """Maximum over the query heads of each key group."""
    return x.view(n_groups, -1).amax(1)


def repeat_groups(x: Float[Tensor, " g"], n_heads: int) -> Float[Tensor, " h"]:
    """Each group's value for its query heads."""
    return x.repeat_interleave(n_heads // x.shape[0])


def lalr_rates(
    q_norm: Float[Tensor, " h"], k_norm: Float[Tensor, " g"], q_init: Tensor, k_init: Tensor
) -> tuple[Float[Tensor, " h"], Float[Tensor, " g"]]:
    """Per-head learning-rate factors, before τ: query n_K(0)/‖W_K‖, key n_Q(0)/‖W_Q‖.

    With grouped keys the key's factor is max_h n_Q(0) / max_h ‖W_Q‖ over the heads of its group: the
    worst case over the logits it takes part in.

    Source: Anson & Aitchison 2025, arXiv 2511.21377, algorithm 1; groups: derived like its shared W_kr.

    >>> one = torch.ones(1)
    >>> [x.item() for x in lalr_rates(5 * one, 4 * one, one, one)]
    [0.25, 0.20000000298023224]
    """
    groups = k_norm.shape[0]
    query = repeat_groups(_ratio(k_init, k_norm), q_norm.shape[0])
    return query, _ratio(group_max(q_init, groups), group_max(q_norm, groups))


def _ratio(old: Tensor, new: Tensor) -> Tensor:
    # A weight that is zero has no direction to run away in: its partner keeps the base rate.
    return torch.where(new > 0, old / torch.where(new > 0, new, torch.ones_like(new)), torch.ones_like(new))


def newton_schulz(g: Float[Tensor, "*b m n"], steps: int = 5) -> Float[Tensor, "*b m n"]:
    """An approximate orthogonal factor of g (singular values to 1 ± 0.3), in g's own dtype.

    X ← aX + (b A + c A²) X with A = X Xᵀ, (a, b, c) = (3.4445, -4.7750, 2.0315), X₀ = g / (‖g‖_F + 1e-7).

    Source: Jordan 2024 (Muon); Liu et al. 2025, arXiv 2502.16982. They iterate in bfloat16, which CPUs
    without bfloat16 units emulate; float32 is faster there and no less exact.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
