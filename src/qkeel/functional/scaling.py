"""Factors on the logit that depend on the query's position, and constants of scale."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.errors import InvalidValueError


def log_n(n: Tensor, train_length: int, clip: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    """ln(n) / ln(train_length) per query that sees n keys; with `clip`, never under 1.

    Calibrated so that the factor is 1 at the training length. n = 1 gives 0, harmless with a single key.

    Source: Su 2021, kexue.fm 8823 (entropy invariance); clip: kexue.fm 9706.

    >>> log_n(torch.tensor([512, 4096]), 512)
    tensor([1.0000, 1.3333])
    """
    if train_length < 2:
        raise InvalidValueError(f"log n needs a train_length of at least 2, got {train_length}")
    factor = n.clamp_min(1).to(dtype).log() / math.log(train_length)
    return factor.clamp_min(1.0) if clip else factor


def floor_log_temperature(
    pos: Tensor, alpha: float = 0.1, floor: int = 8192, dtype: torch.dtype = torch.float32
) -> Tensor:
    """1 + alpha·ln(1 + ⌊(pos + 1) / floor⌋); 1 for negative positions (queries before the first key).

    Source: Llama 4 as shipped in transformers (attn_scale, floor_scale).

    >>> floor_log_temperature(torch.tensor([0, 8191, 16383]))
    tensor([1.0000, 1.0693, 1.1099])
    """
    return 1 + alpha * torch.log1p(torch.div((pos + 1).clamp_min(0), floor, rounding_mode="floor").to(dtype))


def qk_norm_init(length: float) -> float:
    """g₀ = log₂(L² - L), the initial logit scale of QKNorm; L = 97.5th percentile of the lengths in training.

    Source: Henry et al. 2020, arXiv 2010.04245, section 3.

    >>> round(qk_norm_init(72), 4)
    12.3197
    """
    if not length > 1:
        raise InvalidValueError(f"expected a length above 1, got {length}")
    return math.log2(length * length - length)


def cosine_scale(train_length: float) -> float:
    """λ = 4 ln n with n = train_length / 2, the scale of cosine attention for head_dim near 128.

    Source: Su 2023, kexue.fm 9812 and 9859.

    >>> round(cosine_scale(512), 2)
    22.18
    """
    if not train_length > 2:
        raise InvalidValueError(f"expected a training length above 2, got {train_length}")
    return 4 * math.log(train_length / 2)


def sigmoid_bias(length: float) -> float:
    """b = -ln n, which keeps the row sum of sigmoid attention near 1 at initialisation.

    Source: Ramapuram et al. 2024, arXiv 2409.04431, section 3.

    >>> round(sigmoid_bias(2048), 6)
    -7.624619
    """
    if not length > 0:
        raise InvalidValueError(f"expected a length above 0, got {length}")
    return -math.log(length)


def apply_gain(x: Float[Tensor, "b h t d"], gain: Tensor) -> Float[Tensor, "b h t d"]:
    """x times a gain of shape [], [d], [h] (as [h 1]) or [h d], in x's dtype."""
    if gain.ndim == 2:
        gain = gain[:, None, :]
    return (x * gain.to(x.dtype)).to(x.dtype)


def deepnorm(sublayers: int) -> tuple[float, float]:
    """(α, β) of DeepNorm, x ← N(αx + F(x)) with F's output matrix smaller by β: n^(1/4), (4n)^(-1/4), n sublayers.

    Source: Wang et al. 2022, arXiv 2203.00555, decoder-only: (2M)^(1/4) and (8M)^(-1/4) for M layers of two sublayers.
    That a layer of one sublayer (GAU) counts once is our reading of it.

    >>> [round(x, 4) for x in deepnorm(48)]
    [2.6321, 0.2686]
    """
    if sublayers < 1:
        raise InvalidValueError(f"expected at least one sublayer, got {sublayers}")
    return sublayers**0.25, (4 * sublayers) ** -0.25
