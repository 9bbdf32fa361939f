"""Position biases and decays as functions of the distance r = i - j between a query at i and a key at j."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.errors import check


def alibi_slopes(n_heads: int) -> Float[Tensor, " h"]:
    """Returns ALiBi's slopes m_h = 2^(-8h/H) [h], h = 1 … H, each in (0, 1).

    If H is not a power of 2, they are the slopes for the next lower power of 2, followed by every second slope for the
    next higher one.

    Raises:
        InvalidValueError: n_heads is below 1.

    Source: Press et al. 2022, arXiv 2108.12409, and its released code.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    check(n_heads >= 1, "at least one head", n_heads)
    lower = 2 ** int(math.log2(n_heads))
    between = _slopes_of(2 * lower)[::2][: n_heads - lower]
    slopes = _slopes_of(lower) + between
    return torch.tensor(slopes, dtype=torch.float64, device="cpu")


def _slopes_of(n_heads: int) -> list[float]:
    return [2 ** (-8 * h / n_heads) for h in range(1, n_heads + 1)]


def kerple_log(distance: Tensor, a: Tensor, p: Tensor) -> Tensor:
    """Returns the bias -p ln(1 + a|r|), in nats, at most 0; r, a and p broadcast.

    a and p are clamped to at least 0.01. Source: Chi et al. 2022, arXiv 2205.09921 (KERPLE, logarithmic).

    >>> round(kerple_log(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(2.0)).item(), 4)  # -2 ln 2
    -1.3863
    """
    return -p.clamp_min(0.01) * torch.log1p(a.clamp_min(0.01) * distance.abs())


def kerple_power(distance: Tensor, a: Tensor, p: Tensor) -> Tensor:
    """Returns the bias -a|r|^p, in nats, at most 0; r, a and p broadcast.

    a is clamped to at least 0.01, and p to [0.01, 2]. Source: Chi et al. 2022, arXiv 2205.09921 (KERPLE, power).

    >>> kerple_power(torch.tensor(3.0), torch.tensor(1.0), torch.tensor(2.0)).item()
    -9.0
    """
    r = distance.abs()
    # The derivative of r^p at r = 0 is infinite or NaN; the value is 0 for every p.
    grown = r.clamp_min(1e-6) ** p.clamp(0.01, 2.0)
    return -a.clamp_min(0.01) * torch.where(r > 0, grown, 0.0)


def xpos_decay(rotary_dim: int) -> Float[Tensor, " half"]:
    """Returns ζ_i = (i + 0.4 d)/(1.4 d) for i = 0, 2, …, the share of its score that pair i/2 keeps over 512 tokens.

    Source: Sun et al. 2022, arXiv 2212.10554, γ = 0.4 as in the released code.

    >>> [round(x, 3) for x in xpos_decay(8).tolist()]
    [0.286, 0.464, 0.643, 0.821]
    """
    i = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu")
    return (i + 0.4 * rotary_dim) / (1.4 * rotary_dim)
