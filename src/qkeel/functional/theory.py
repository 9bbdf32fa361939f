"""Expectations: how long queries are, how far logits spread, how much of a softmax still moves."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor


def expected_squared_norm(weight: Float[Tensor, "*h d m"], sigma: float = 1.0) -> Float[Tensor, "*h"]:
    """E‖W x‖² = σ² ‖W‖_F² at fixed W, for x of independent entries with mean 0 and standard deviation σ.

    Of one set of weights: inputs of a class whose entries vary k times as much give queries k times as long. Behind a
    norm of x (RMS 1 for every token) σ is 1 for all. Source: derived, E[x xᵀ] = σ² I.
    """
    return sigma**2 * weight.square().sum((-2, -1))


def logit_std(query_rms: float, key_rms: float, head_dim: int, scale: float | None = None) -> float:
    """The standard deviation scale · √d · rms(q) · rms(k) of logits of independent q and k; scale 1/√d if not given.

    rms: per entry. With 1/√d and entries of RMS 1 it is 1 at any d, without the root √d, with 1/d it is 1/√d. In nats.
    Source: derived, a sum of d products of variance rms(q)² rms(k)² each.

    Args:
        query_rms: of the entries of queries.
        key_rms: of the entries of keys.
        head_dim: d.
        scale: the factor on q·k; 1/√d if not given.

    >>> [round(logit_std(1, 1, 64, scale), 3) for scale in (1.0, 64**-0.5, 1 / 64)]
    [8.0, 1.0, 0.125]
    """
    return (head_dim**-0.5 if scale is None else scale) * math.sqrt(head_dim) * query_rms * key_rms


def softmax_jacobian_norm(weights: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """‖diag(p) - p pᵀ‖_F = √(Σp² - 2 Σp³ + (Σp²)²) of rows p of softmax weights: what is left of a gradient.

    0 for one key with all the weight; √(n - 1) / n for equal weights; at most 1/2, that of two keys with half each.
    Below about 1e-8 (float64) it is rounding. Source: derived, the sum of the squared entries p_i (δ_ij - p_j).
    """
    square = weights.square().sum(-1)
    return (square - 2 * weights.pow(3).sum(-1) + square.square()).clamp_min(0).sqrt()
