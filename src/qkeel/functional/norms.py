"""Normalisation over the last axis, without gain. Computed in float32 or wider, returned in the input's dtype."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype statistics are computed in: float32 or wider, so float64 stays float64."""
    return torch.promote_types(dtype, torch.float32)


def l2_norm(x: Float[Tensor, "*batch d"], eps: float = 1e-12) -> Float[Tensor, "*batch d"]:
    """x / max(‖x‖₂, eps): result of norm 1.

    Source: Henry et al. 2020, arXiv 2010.04245 (torch's F.normalize). Others say "L2" and divide by
    sqrt(mean + eps) (Llama 4: that is `rms_norm`) or by sqrt(sum + eps) (Transformer Engine).

    >>> l2_norm(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    y = x.to(wide(x.dtype))
    return (y / y.norm(dim=-1, keepdim=True).clamp_min(eps)).to(x.dtype)


def rms_norm(x: Float[Tensor, "*batch d"], eps: float = 1e-6) -> Float[Tensor, "*batch d"]:
    """x / sqrt(mean(x²) + eps): result of norm √d.

    Source: Zhang & Sennrich 2019, arXiv 1910.07467.

    >>> rms_norm(torch.tensor([3.0, 4.0]), eps=0.0)
    tensor([0.8485, 1.1314])
    """
    y = x.to(wide(x.dtype))
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def layer_norm(x: Float[Tensor, "*batch d"], eps: float = 1e-5) -> Float[Tensor, "*batch d"]:
    """(x - mean) / sqrt(var + eps), population variance.

    Source: Ba et al. 2016, arXiv 1607.06450.

    >>> layer_norm(torch.tensor([1.0, 3.0]), eps=0.0)
    tensor([-1.,  1.])
    """
    y = x.to(wide(x.dtype))
    y = y - y.mean(-1, keepdim=True)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
