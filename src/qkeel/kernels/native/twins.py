"""What a stack of runs computes beside attention, as compiled operators: see lab.twins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qkeel.kernels.native.loader import usable


def ready() -> bool:
    """Whether the operators below can be used here and now."""
    return usable("twins", _register)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ by run: x [runs rows in], weight [runs out in] -> [runs rows out]; in and out multiples of 8."""
    return torch.ops.qkeel_native.twin_linear(x, weight)


def linear_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and W."""
    return torch.ops.qkeel_native.twin_linear_backward(dy, x, weight)


def gelu_(x: Tensor) -> Tensor:
    """gelu(x) = x Φ(x), to 1e-7; x becomes the slope there, Φ(x) + x φ(x)."""
    return torch.ops.qkeel_native.twin_gelu_(x)


def rms_norm(x: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x [runs rows d], gain [runs d] -> gain · x / rms(x) and 1 / rms(x) [runs rows]; d a multiple of 8."""
    return torch.ops.qkeel_native.twin_rms_norm(x, gain, eps)


def rms_norm_backward(dy: Tensor, x: Tensor, inverse: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the gain, [0] without one."""
    return torch.ops.qkeel_native.twin_rms_norm_backward(dy, x, inverse, gain)


def cross_entropy_(logits: Tensor, targets: Tensor, grad: bool) -> Tensor:
    """Each run's mean loss [runs] in nats: logits [runs rows vocab], int64 targets [runs|1 rows].

    With `grad` logits become the gradient of it.
    """
    return torch.ops.qkeel_native.twin_cross_entropy_(logits, targets, grad)


def clip_(gradients: Sequence[Tensor], limit: float) -> Tensor:
    """The norm [runs] of each run's gradients [runs ...], which are cut to the limit, where that is above 0."""
    return torch.ops.qkeel_native.twin_clip_(list(gradients), limit)


def adamw_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    state: tuple[Sequence[Tensor], Sequence[Tensor], Tensor],
    rates: Tensor,
    options: tuple[Sequence[float], float, float, float],
) -> None:
    """A step of AdamW, each run at its own rate and step.

    Args:
        weights, gradients: n of [runs ...]. state: means, variances, and steps done [n runs]. rates: [n runs] float64;
            what has one below 0 is left alone. options: n weight decays; β₁, β₂, ε.
    """
    means, variances, steps = state
    lists = (list(x) for x in (weights, gradients, means, variances))
    torch.ops.qkeel_native.twin_adamw_(*lists, steps, rates, list(options[0]), *options[1:])


def _register() -> None:
    own = "qkeel_native::twin_"
    torch.library.register_fake(own + "linear", lambda x, w: x.new_empty((*x.shape[:2], w.shape[1])))
    torch.library.register_fake(own + "linear_backward", lambda dy, x, w: (torch.empty_like(x), torch.empty_like(w)))
    torch.library.register_fake(own + "gelu_", torch.empty_like)
    torch.library.register_fake(own + "rms_norm", lambda x, *_: (torch.empty_like(x), x.new_empty(x.shape[:2])))
    torch.library.register_fake(own + "rms_norm_backward", _gradients)
    torch.library.register_fake(own + "cross_entropy_", lambda z, *_: z.new_empty(z.shape[:1]))
    torch.library.register_fake(own + "clip_", lambda g, _: g[0].new_empty(g[0].shape[:1]))
    torch.library.register_fake(own + "adamw_", _nothing)


def _gradients(dy: Tensor, x: Tensor, inverse: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((0,) if gain is None else gain.shape)


def _nothing(*_: Any) -> None:
    """It returns nothing."""
