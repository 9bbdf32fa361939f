"""Rotary position embedding."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.errors import ShapeError
from qkeel.functional.norms import wide

Pairing = Literal["half", "interleaved", "half_reversed"]


def rope_frequencies(rotary_dim: int, base: float = 10_000.0) -> Float[Tensor, " half"]:
    """θ_i = base^(-2i/d) for i = 0 .. d/2 - 1, in float64.

    Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2.
    """
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ShapeError(
            f"RoPE rotates pairs, so it needs an even number of dimensions; got {rotary_dim}. "
            "Use an even head_dim, or rotate a part of it (Rope(rotary=0.5))."
        )
    return base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def rope_table(
    pos: Tensor, frequencies: Float[Tensor, " half"], dtype: torch.dtype
) -> tuple[Float[Tensor, "*pos half"], Float[Tensor, "*pos half"]]:
    """cos(pos·θ_i) and sin(pos·θ_i), in float32 or wider."""
    kind = wide(dtype)
    angle = pos.to(kind)[..., None] * frequencies.to(device=pos.device, dtype=kind)
    return angle.cos(), angle.sin()


def rotate(
    x: Float[Tensor, "*batch d"],
    cos: Float[Tensor, "*#batch half"],
    sin: Float[Tensor, "*#batch half"],
    pairing: Pairing = "half",
) -> Float[Tensor, "*batch d"]:
    """Rotate pairs of the first 2·half dimensions of x; the rest passes through.

    Pair i is (x_i, x_{i+half}) for "half" (GPT-NeoX, Llama), (x_{2i}, x_{2i+1}) for "interleaved" (RoFormer,
    Cohere, Llama 4) and (x_{i+half}, x_i) for "half_reversed" (nanochat, modded-nanogpt: it turns "half" by -θ):
    (a, b) -> (a cos - b sin, b cos + a sin).

    >>> c, s = torch.zeros(1), torch.ones(1)
    >>> rotate(torch.tensor([1.0, 2.0]), c, s)
    tensor([-2.,  1.])
    """
    half = cos.shape[-1]
    y = x.to(cos.dtype)
    if pairing == "half":
        a, b = y[..., :half], y[..., half : 2 * half]
        parts = [a * cos - b * sin, b * cos + a * sin]
    elif pairing == "half_reversed":
        b, a = y[..., :half], y[..., half : 2 * half]
        parts = [b * cos + a * sin, a * cos - b * sin]
    else:
        a, b = y[..., 0 : 2 * half : 2], y[..., 1 : 2 * half : 2]
        parts = [torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)]
    if 2 * half < x.shape[-1]:
        parts.append(y[..., 2 * half :])
    return torch.cat(parts, dim=-1).to(x.dtype)
