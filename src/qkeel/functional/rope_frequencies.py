"""RoPE frequencies for contexts longer than those of training: every published way to slow the rotation down.

θ_i = base^(-2i/d), i = 0 … d/2 - 1, is what `functional.rope.rope_frequencies` gives; m = i + 1 below.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.errors import InvalidValueError

Frequencies = Float[Tensor, " half"]
Ramp = Literal["code", "paper"]


def interpolate(theta: Frequencies, factor: float) -> Frequencies:
    """θ_i / factor: positions squeezed into the trained range. Source: Chen et al. 2023, arXiv 2306.15595 (PI)."""
    return theta / factor


def ntk(theta: Frequencies, factor: float | Tensor, *, exact: bool = False) -> Frequencies:
    """θ_i · k^(-2i/d), the base times k; `exact`: θ_i · k^(-2i/(d - 2)), so that the last pair turns 1/k as fast.

    Source: bloc97 2023 (NTK-aware); the exact base as in transformers' "dynamic" rope; "NTK-old" of kexue.fm 9706.

    >>> theta = torch.ones(64, dtype=torch.float64)
    >>> [round(float(ntk(theta, 8.0)[m - 1]), 5) for m in (1, 2, 64)]
    [1.0, 0.96803, 0.12913]

    Raises: InvalidValueError for `exact` with one pair, which would have to keep its frequency and turn 1/k as fast.
    """
    half = len(theta)
    if exact and half < 2:
        raise InvalidValueError("expected at least 4 rotated numbers for the exact base of NTK, got 2; use NTK or PI")
    index = torch.arange(half, dtype=theta.dtype, device=theta.device)
    power = -index / (half - 1 if exact else half)
    return theta * torch.as_tensor(factor, dtype=theta.dtype, device=theta.device) ** power


def ntk_mixed(theta: Frequencies, factor: float, power: float = 0.625) -> Frequencies:
    """θ_m · exp(-a m^b), a (d/2)^b = ln k. b = 1 is NTK-fixed, b = 0 interpolation, 0.625 the best of the source.

    Source: Su 2023, kexue.fm 9706.

    >>> theta = torch.ones(64, dtype=torch.float64)
    >>> [round(float(ntk_mixed(theta, 8.0)[m - 1]), 5) for m in (1, 8, 64)]
    [0.8568, 0.56727, 0.125]
    """
    m = torch.arange(1, len(theta) + 1, dtype=theta.dtype, device=theta.device)
    return theta * torch.exp(-math.log(factor) * (m / len(theta)) ** power)


def yarn(
    theta: Frequencies,
    factor: float,
    train_length: float,
    *,
    base: float,
    fast: float = 32.0,
    slow: float = 1.0,
    ramp: Ramp = "code",
) -> Frequencies:
    """θ_i (γ_i + (1 - γ_i)/factor), γ = 1 for pairs that turn more than `fast` times in training, 0 below `slow`.

    ramp="paper": γ linear in the number of turns r_i = L θ_i / 2π. "code", as released and in transformers: linear in
    the index i between the floor and the ceiling of the two cut-offs, which differs much in between.

    Source: Peng et al. 2023, arXiv 2309.00071, section 3.2.

    Args:
        theta: the frequencies θ_i in radians per token.
        factor: how many times longer the texts become.
        train_length: L, in tokens.
        base: that of the frequencies.
        fast: turns in training from which a pair stays as it is.
        slow: turns below which a pair is slowed by the whole factor.
        ramp: between the two, "code" or "paper".
    """
    half = len(theta)
    if ramp == "paper":
        turns = train_length * theta / (2 * math.pi)
        keep = ((turns - slow) / (fast - slow)).clamp(0, 1)
    else:

        def cut(turns: float) -> float:
            return half * math.log(train_length / (turns * 2 * math.pi)) / math.log(base)

        # The released code clamps to the number of dimensions, not of pairs.
        low, high = max(math.floor(cut(fast)), 0), min(math.ceil(cut(slow)), 2 * half - 1)
        index = torch.arange(half, dtype=theta.dtype, device=theta.device)
        keep = 1 - ((index - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return theta * (keep + (1 - keep) / factor)


def yarn_magnitude(factor: float) -> float:
    """The factor 0.1 ln factor + 1 on cos and sin: logits gain its square. 1 for a factor of at most 1.

    Source: Peng et al. 2023, arXiv 2309.00071, equation 22.

    >>> round(yarn_magnitude(8.0), 6), round(yarn_magnitude(8.0) ** 2, 6)
    (1.207944, 1.459129)
    """
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def llama3(theta: Frequencies, factor: float, train_length: float, low: float = 1.0, high: float = 4.0) -> Frequencies:
    """Pairs with more than `high` turns in training stay, with fewer than `low` are slowed by factor, linear between.

    Linear in the number of turns, of the frequency itself. Source: Llama 3.1 as shipped in transformers.

    Args:
        theta: the frequencies in radians per token.
        factor: how many times longer the texts become.
        train_length: in tokens.
        low: turns below which a pair is slowed by the whole factor.
        high: turns above which it stays.
    """
    turns = train_length * theta / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return theta * (keep + (1 - keep) / factor)
