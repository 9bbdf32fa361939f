"""The layers and updates of a stack of runs, except for attention, as compiled operators: see lab.stack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkeel.kernels.native.operator import OperatorSource


def linear(x: Float[Tensor, "runs rows i"], weight: Float[Tensor, "runs o i"]) -> Float[Tensor, "runs rows o"]:
    """Returns x Wᵀ of every run; the widths i and o are multiples of 8."""
    return torch.ops.qkeel_native.stacked_linear(x, weight)


def linear_backward(
    dy: Float[Tensor, "runs rows o"], x: Float[Tensor, "runs rows i"], weight: Float[Tensor, "runs o i"]
) -> tuple[Float[Tensor, "runs rows i"], Float[Tensor, "runs o i"]]:
    """Returns the gradients of x and W."""
    return torch.ops.qkeel_native.stacked_linear_backward(dy, x, weight)


def gelu_(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns gelu(x) = x Φ(x), to 1e-7; x becomes the slope there, Φ(x) + x φ(x)."""
    return torch.ops.qkeel_native.stacked_gelu_(x)


def rms_norm(
    x: Float[Tensor, "runs rows d"], gain: Float[Tensor, "runs d"] | None, eps: float
) -> tuple[Float[Tensor, "runs rows d"], Float[Tensor, "runs rows"]]:
    """Returns gain · x / rms(x) and 1 / rms(x); d is a multiple of 8."""
    return torch.ops.qkeel_native.stacked_rms_norm(x, gain, eps)


def rms_norm_backward(
    dy: Float[Tensor, "runs rows d"],
    x: Float[Tensor, "runs rows d"],
    inverse: Float[Tensor, "runs rows"],
    gain: Float[Tensor, "runs d"] | None,
) -> tuple[Float[Tensor, "runs rows d"], Float[Tensor, " ..."]]:
    """Returns the gradients of x and of the gain, the latter [0] without one; `inverse` is 1 / rms(x)."""
    return torch.ops.qkeel_native.stacked_rms_norm_backward(dy, x, inverse, gain)


def cross_entropy_(
    logits: Float[Tensor, "runs rows vocab"], targets: Int[Tensor, "_ rows"], grad: bool
) -> Float[Tensor, " runs"]:
    """Returns each run's mean loss in nats; targets may be shared by all runs.

    With `grad` the logits become their gradient.
    """
    return torch.ops.qkeel_native.stacked_cross_entropy_(logits, targets, grad)


def clip_(gradients: Sequence[Float[Tensor, "runs ..."]], limit: float) -> Float[Tensor, " runs"]:
    """Returns the norm of each run's gradients, and scales those over the limit, if that is above 0."""
    return torch.ops.qkeel_native.stacked_clip_(list(gradients), limit)


def adamw_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    state: tuple[Sequence[Tensor], Sequence[Tensor], Tensor],
    rates: Tensor,
    options: tuple[Sequence[float], float, float, float],
) -> None:
    """Does a step of AdamW, each run at its own rate and step.

    Args:
        weights, gradients: n of [runs ...]. state: means, variances, and steps done [n runs].
        rates: [n runs] float64; a weight whose rate is below 0 stays unchanged.
        options: n·runs weight decays, those of a weight in a row; β₁, β₂, ε.
    """
    means, variances, steps = state
    lists = (list(x) for x in (weights, gradients, means, variances))
    torch.ops.qkeel_native.stacked_adamw_(*lists, steps, rates, list(options[0]), *options[1:])


OPERATORS = OperatorSource(
    "stacked",
    {
        "stacked_linear": lambda x, w: x.new_empty((*x.shape[:2], w.shape[1])),
        "stacked_linear_backward": lambda dy, x, w: (torch.empty_like(x), torch.empty_like(w)),
        "stacked_gelu_": torch.empty_like,
        "stacked_rms_norm": lambda x, *_: (torch.empty_like(x), x.new_empty(x.shape[:2])),
        "stacked_rms_norm_backward": lambda dy, x, _, gain: (
            torch.empty_like(x),
            x.new_empty((0,) if gain is None else gain.shape),
        ),
        "stacked_cross_entropy_": lambda z, *_: z.new_empty(z.shape[:1]),
        "stacked_clip_": lambda g, _: g[0].new_empty(g[0].shape[:1]),
        "stacked_adamw_": lambda *_: None,
    },
)
ready = OPERATORS.ready
