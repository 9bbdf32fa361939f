"""The modules of a stacked small model by compiled operators: a run's numbers are the same alone and among others."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from qkeel.kernels.native import stacked_ops
from qkeel.lab.stack.stacked_modules import Context, apply
from qkeel.nn.block import MLP


@final
class _Product(torch.autograd.Function):
    """The product y = x Wᵀ by run."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor) -> Tensor:
        """Maps x [runs n in], weight [runs out in] to [runs n out]."""
        ctx.save_for_backward(x, weight)
        return stacked_ops.linear(x, weight)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and W."""
        x, weight = ctx.saved_tensors
        return stacked_ops.linear_backward(grads[0].contiguous(), x, weight)


@final
class CompiledLinear(nn.Module):
    """The product y = x Wᵀ by run: weight [runs out in], sizes multiples of 8."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [runs·b ... in] to [runs·b ... out]."""
        y = apply(_Product, x.reshape(len(self.weight), -1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], -1)


@final
class _Hidden(torch.autograd.Function):
    """The product gelu(x Wᵀ) by run, keeping the slope where the product was: the graph is walked back once."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor) -> Tensor:
        """Maps x [runs n in], weight [runs out in] to [runs n out]."""
        slope = stacked_ops.linear(x, weight)
        y = stacked_ops.gelu_(slope)
        ctx.save_for_backward(x, weight, slope)
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and W."""
        x, weight, slope = ctx.saved_tensors
        return stacked_ops.linear_backward(slope.mul_(grads[0]), x, weight)


@final
class CompiledMLP(nn.Module):
    """W₂ gelu(W₁ x) by run, of stacked W₁ and W₂."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.up, self.down = mlp.up, mlp.down  # exchanged for stacked ones next

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [runs·b t m] to the same."""
        hidden = apply(_Hidden, x.reshape(len(self.up.weight), -1, x.shape[-1]), self.up.weight)
        return self.down(hidden).view_as(x)


@final
class _Norm(torch.autograd.Function):
    """RMS norm with a gain by run, by the compiled operator."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Maps x [runs n d], gain [runs d] to [runs n d]."""
        y, inverse = stacked_ops.rms_norm(x, gain, eps)
        ctx.save_for_backward(x, inverse, gain)
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradients of x and of the gain."""
        x, inverse, gain = ctx.saved_tensors
        return *stacked_ops.rms_norm_backward(grads[0].contiguous(), x, inverse, gain), None


@final
class CompiledNorm(nn.Module):
    """RMS norm with a gain by run: weight [runs d]."""

    def __init__(self, weight: nn.Parameter, eps: float | None) -> None:
        super().__init__()
        self.weight, self.eps = weight, torch.finfo(weight.dtype).eps if eps is None else eps

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [runs·b t d] to the same."""
        return apply(_Norm, x.reshape(len(self.weight), -1, x.shape[-1]), self.weight, self.eps).view_as(x)
