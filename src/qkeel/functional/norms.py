"""Normalisation over the last axis, without a gain, computed in float32 or wider and returned in the input's dtype."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkeel.errors import InvalidTypeError
from qkeel.patching.torch_state import with_tangents

# Device types.
WITHOUT_FLOAT64 = frozenset({"mps"})


def widest(device: torch.device) -> torch.dtype:
    """Returns the widest dtype of a device: float64, or float32 for the devices in WITHOUT_FLOAT64.

    >>> widest(torch.device("cpu")), widest(torch.device("mps"))
    (torch.float64, torch.float32)
    """
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which statistics are computed: float64 for float64, else float32.

    >>> wide(torch.bfloat16), wide(torch.float64)
    (torch.float32, torch.float64)
    """
    # The usual answers need no operator of torch; a measured step asks nine times a layer.
    return (
        dtype
        if dtype in (torch.float32, torch.float64)
        else torch.promote_types(dtype, torch.float32)
    )


def _widened(x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise InvalidTypeError(
            f"expected a tensor to normalise, got {type(x).__name__}"
        )
    if not x.is_floating_point() or x.dtype.itemsize < 2:
        raise InvalidTypeError(
            f"expected floating-point numbers of 16 bits or more to normalise, got {x.dtype}; convert them first"
        )
    return x.to(wide(x.dtype))


def unrounded(x: Tensor) -> AbstractContextManager[object]:
    """Disables autocast for the device of x, so that products keep their dtype and logits are not rounded.

    >>> x = torch.ones(2, 2)
    >>> with torch.autocast("cpu"), unrounded(x):
    ...     (x @ x).dtype
    torch.float32
    """
    kind = x.device.type
    return (
        torch.autocast(kind, enabled=False)
        if torch.is_autocast_enabled(kind)
        else nullcontext()
    )


def l2_norm(
    x: Float[Tensor, "*batch d"], eps: float = 1e-12
) -> Float[Tensor, "*batch d"]:
    """Returns x / max(‖x‖₂, eps), a vector of norm 1.

    Source: Henry et al. 2020, arXiv 2010.04245 (torch's F.normalize). Other codebases use "L2" for division by
    sqrt(mean(x²) + eps) (Llama 4; here `rms_norm`) or by sqrt(sum(x²) + eps) (Transformer Engine).

    >>> l2_norm(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    return _resized(x, eps, mean=False)


def rms_norm(
    x: Float[Tensor, "*batch d"], eps: float = 1e-6
) -> Float[Tensor, "*batch d"]:
    """Returns x / sqrt(mean(x²) + eps), a vector of norm √d.

    Source: Zhang & Sennrich 2019, arXiv 1910.07467.

    >>> rms_norm(torch.tensor([3.0, 4.0]), eps=0.0)
    tensor([0.8485, 1.1314])
    """
    return _resized(x, eps, mean=True)


def layer_norm(
    x: Float[Tensor, "*batch d"], eps: float = 1e-5
) -> Float[Tensor, "*batch d"]:
    """Returns (x - mean) / sqrt(var + eps) with the population variance.

    Source: Ba et al. 2016, arXiv 1607.06450.

    >>> layer_norm(torch.tensor([1.0, 3.0]), eps=0.0)
    tensor([-1.,  1.])
    """
    return F.layer_norm(_widened(x), (x.shape[-1],), eps=eps).to(x.dtype)


def apply_gain(x: Float[Tensor, "b h t d"], gain: Tensor) -> Float[Tensor, "b h t d"]:
    """Returns x times a gain of shape [], [d], [h 1] or [h d], in x's dtype. Source: as for x's norm.

    >>> apply_gain(torch.ones(1, 2, 1, 1), torch.tensor([[2.0], [3.0]])).flatten().tolist()
    [2.0, 3.0]
    """
    if gain.ndim == 2:
        gain = gain[:, None, :]
    return (x * gain.to(x.dtype)).to(x.dtype)


def inverse_l2(
    x: Float[Tensor, "*batch d"], eps: float = 1e-12
) -> Float[Tensor, "*batch 1"]:
    """Returns 1 / max(‖x‖₂, eps), the factor that `l2_norm` applies (see its source), in float32 or wider.

    >>> inverse_l2(torch.tensor([3.0, 4.0]))
    tensor([0.2000])
    """
    return _one_over(_norm(x), None, eps)


def inverse_rms(
    x: Float[Tensor, "*batch d"], eps: float = 1e-6
) -> Float[Tensor, "*batch 1"]:
    """Returns 1 / sqrt(mean(x²) + eps), the factor that `rms_norm` applies (see its source), in float32 or wider.

    >>> inverse_rms(torch.tensor([3.0, 4.0]), eps=0.0)
    tensor([0.2828])
    """
    return _one_over(_norm(x), x.shape[-1], eps)


def _one_over(norm: Tensor, mean_over: int | None, eps: float) -> Tensor:
    """Returns 1 / RMS of a vector of `mean_over` elements with this L2 norm, or 1 / norm if `mean_over` is None."""
    if mean_over is None:
        return norm.clamp_min(eps).reciprocal()
    return torch.rsqrt(norm.square() / mean_over + eps)


def _resized(x: Tensor, eps: float, mean: bool) -> Tensor:
    if with_tangents():
        return (
            _widened(x) * _one_over(_norm(x), x.shape[-1] if mean else None, eps)
        ).to(x.dtype)
    return _Resize.apply(_widened(x), eps, mean)[0].to(x.dtype)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(_widened(x), dim=-1, keepdim=True)


class _Resize(torch.autograd.Function):
    """y = x · r with r = 1 / sqrt(mean(x²) + eps) if `mean`, else 1 / max(‖x‖₂, eps).

    A hand-written derivative keeps only y (which the gain's backward keeps anyway) and one number per vector instead of
    every intermediate: dx = r (g - c y (⟨g, y⟩ + r g_r)) for the gradients g of y and g_r of r, with c = 1/d for the
    mean, 1 for the norm, and 0 where eps is larger than the norm. It depends only on the outputs y and r, so it can be
    differentiated any number of times.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, eps: float, mean: bool) -> tuple[Tensor, Tensor, Tensor]:
        norm = _norm(x)
        r = _one_over(norm, x.shape[-1] if mean else None, eps)
        c = torch.full_like(r, 1 / x.shape[-1]) if mean else (norm > eps).to(x.dtype)
        return x * r, r, c

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        ctx.mark_non_differentiable(output[2])
        # Only a second derivative has a gradient of r.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, None, None]:
        y, r, c = ctx.saved_tensors
        g, of_r = grad_outputs[:2]
        if g is None:
            return None if of_r is None else -c * y * r.square() * of_r, None, None
        along = (g * y).sum(-1, keepdim=True)
        if of_r is not None:
            along = along + r * of_r
        return torch.addcmul(g, y, along * c, value=-1) * r, None, None


# torch looks the signature up at every call, which takes longer than the norm of a few tokens.
_Resize.forward.__signature__ = inspect.signature(_Resize.forward)  # type: ignore[attr-defined]


def stream_statistics(x: Float[Tensor, "... m"]) -> dict[str, Tensor]:
    """Computes the statistics of hidden states [... m], in float32 or wider, without waiting for the device.

    The peak of a channel is its largest magnitude over all tokens; with an even number of channels, the median is the
    mean of the middle two.

    >>> {name: float(value) for name, value in stream_statistics(torch.tensor([[1.0, -2.0], [7.0, 0.0]])).items()}
    {'rms': 3.674234628677368, 'max': 7.0, 'channel_ratio': 1.5555555820465088}

    Returns:
        `rms`: √(mean of x²). `max`: the largest peak. `channel_ratio`: the largest peak divided by the median peak.
    """
    m, dtype = x.shape[-1], wide(x.dtype)
    rms = torch.linalg.vector_norm(x, dtype=dtype) / x.numel() ** 0.5
    peaks = (
        torch.linalg.vector_norm(x.reshape(-1, m), ord=torch.inf, dim=0, dtype=dtype)
        .sort()
        .values
    )
    return {
        "rms": rms,
        "max": peaks[-1],
        "channel_ratio": 2 * peaks[-1] / (peaks[(m - 1) // 2] + peaks[m // 2]),
    }
