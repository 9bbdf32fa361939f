"""Twins of the parts of small models by compiled operators: a run's numbers are the same alone and among others."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from qkeel.kernels.native import twins
from qkeel.nn.block import MLP


@final
class _Product(torch.autograd.Function):
    """y = x Wᵀ by run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x [runs n in], weight [runs out in] -> [runs n out]."""
        ctx.save_for_backward(x, weight)
        return twins.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        """The gradients of x and W."""
        return twins.linear_backward(grads[0].contiguous(), *ctx.saved_tensors)


@final
class FusedLinear(nn.Module):
    """y = x Wᵀ by run: weight [runs out in], sizes multiples of 8."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """x [runs·b ... in] -> [runs·b ... out]."""
        y = _Product.apply(x.reshape(len(self.weight), -1, x.shape[-1]), self.weight)
        assert isinstance(y, Tensor)
        return y.view(*x.shape[:-1], -1)


@final
class _Hidden(torch.autograd.Function):
    """gelu(x Wᵀ) by run, keeping the slope where the product was: the graph is walked back once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x [runs n in], weight [runs out in] -> [runs n out]."""
        slope = twins.linear(x, weight)
        y = twins.gelu_(slope)
        ctx.save_for_backward(x, weight, slope)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        """The gradients of x and W."""
        x, weight, slope = ctx.saved_tensors
        return twins.linear_backward(slope.mul_(grads[0]), x, weight)


@final
class FusedMLP(nn.Module):
    """W₂ gelu(W₁ x) by run, of stacked W₁ and W₂."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.up, self.down = mlp.up, mlp.down  # until their own twins come

    def forward(self, x: Tensor) -> Tensor:
        """x [runs·b t m] -> the same."""
        hidden = _Hidden.apply(x.reshape(len(self.up.weight), -1, x.shape[-1]), self.up.weight)
        assert isinstance(hidden, Tensor)
        return self.down(hidden).view_as(x)


@final
class _Norm(torch.autograd.Function):
    """RMS norm with a gain by run, by the compiled operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """x [runs n d], gain [runs d] -> [runs n d]."""
        y, inverse = twins.rms_norm(x, gain, eps)
        ctx.save_for_backward(x, inverse, gain)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        """The gradients of x and of the gain."""
        return *twins.rms_norm_backward(grads[0].contiguous(), *ctx.saved_tensors), None


@final
class FusedNorm(nn.Module):
    """RMS norm with a gain by run: weight [runs d]."""

    def __init__(self, weight: nn.Parameter, eps: float | None) -> None:
        super().__init__()
        self.weight, self.eps = weight, torch.finfo(weight.dtype).eps if eps is None else eps

    def forward(self, x: Tensor) -> Tensor:
        """x [runs·b t d] -> the same."""
        y = _Norm.apply(x.reshape(len(self.weight), -1, x.shape[-1]), self.weight, self.eps)
        assert isinstance(y, Tensor)
        return y.view_as(x)


@final
class Factor(torch.autograd.Function):
    """x times a number by run, whose gradient is summed run by run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        """x [runs ...], factor [runs] -> [runs ...]."""
        ctx.save_for_backward(x, factor)
        return x * factor.view(-1, *[1] * (x.ndim - 1))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        """The gradients of x and of the factor."""
        x, factor = ctx.saved_tensors
        of_factor = torch.stack([part.sum() for part in (grads[0] * x).unbind()])
        return grads[0] * factor.view(-1, *[1] * (x.ndim - 1)), of_factor
