"""Formulas on weights between steps: QK-Clip and Newton-Schulz. Those of lalr are `remedies.lalr.Rates`."""

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


def repeat_groups(x: Float[Tensor, "g ..."], n_heads: int) -> Float[Tensor, "h ..."]:
    """Each group's value, once for each of the h / g consecutive query heads that share it."""
    return x.repeat_interleave(n_heads // x.shape[0], dim=0)


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
