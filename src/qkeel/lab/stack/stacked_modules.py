"""The modules of a stacked model: each holds the weights of many runs and computes each run's part of the batch by its.

Their operators are torch's, or compiled ones that round otherwise: a run has the same numbers alone and among others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel.kernels.native import stacked_ops
from qkeel.nn.block import MLP


class Context(Protocol):
    """The context of an autograd function, which saves tensors."""

    saved_tensors: Sequence[Tensor]
    needs_input_grad: Sequence[bool]
    compiled: bool

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Remembers tensors for the backward pass."""


@final
class _Product(torch.autograd.Function):
    """The product y = x Wᵀ by run, with its own derivative, since `bmm` lays out the gradient of Wᵀ, not of W."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, compiled: bool) -> Tensor:
        """Maps x [runs n in], weight [runs out in] to [runs n out]."""
        ctx.save_for_backward(x, weight)
        ctx.compiled = compiled
        return stacked_ops.linear(x, weight) if compiled else torch.bmm(x, weight.mT)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The gradients of x and W, each in its own layout."""
        x, weight = ctx.saved_tensors
        if ctx.compiled:
            return *stacked_ops.linear_backward(grads[0].contiguous(), x, weight), None
        of_x = torch.bmm(grads[0], weight) if ctx.needs_input_grad[0] else None
        of_weight = torch.bmm(grads[0].mT, x) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None


@final
class _Factor(torch.autograd.Function):
    """The product of x and a factor by run; its gradient is summed run by run, in the order of a single run."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, factor: Tensor) -> Tensor:
        """Maps x [runs ... d], factor [runs d] or [runs] to [runs ... d]."""
        ctx.save_for_backward(x, factor)
        return x * _wide(factor, x)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x and of the factor."""
        x, factor = ctx.saved_tensors
        summed = tuple(range(x.ndim - factor.ndim))
        of_factor = torch.stack([part.sum(summed) for part in (grads[0] * x).unbind()])
        return grads[0] * _wide(factor, x), of_factor


def _wide(factor: Tensor, x: Tensor) -> Tensor:
    return factor.view(len(factor), *[1] * (x.ndim - factor.ndim), *factor.shape[1:])


def times_by_run(x: Tensor, factor: Tensor) -> Tensor:
    """Returns x [runs ... d] times the factor of its run: [runs d] or [runs]."""
    return apply(_Factor, x, factor)


def apply(function: type[torch.autograd.Function], *inputs: object) -> Tensor:
    """Returns the one tensor that a function of ours computes."""
    y = function.apply(*inputs)
    assert isinstance(y, Tensor)
    return y


@final
class StackedLinear(nn.Module):
    """The layer y = x Wᵀ + b by run: weight [runs out in], compiled only with sizes that are multiples of 8."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, compiled: bool = False) -> None:
        super().__init__()
        self.weight, self.bias, self.compiled = weight, bias, compiled

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [runs·b ... in] to [runs·b ... out]."""
        y = apply(_Product, x.reshape(len(self.weight), -1, x.shape[-1]), self.weight, self.compiled)
        if self.bias is not None:
            y = y + self.bias[:, None]
        return y.view(*x.shape[:-1], -1)


@final
class StackedEmbedding(nn.Module):
    """Rows of a table by run: weight [runs vocab d]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens [runs·b t] to [runs·b t d]."""
        runs, vocab, _ = self.weight.shape
        first = torch.arange(0, runs * vocab, vocab, device=tokens.device)
        rows = tokens.view(runs, -1) + first[:, None]
        return F.embedding(rows.view_as(tokens), self.weight.flatten(0, 1))


@final
class StackedNorm(nn.Module):
    """RMS norm with a gain by run: weight [runs d], or None; compiled only with one of a multiple of 8."""

    def __init__(self, weight: nn.Parameter | None, size: int, eps: float | None, *, compiled: bool = False) -> None:
        super().__init__()
        self.weight, self.size, self.eps, self.compiled = weight, size, eps, compiled

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [runs·b t d] to the same."""
        if self.compiled and self.weight is not None:
            eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
            return apply(_Norm, x.reshape(len(self.weight), -1, x.shape[-1]), self.weight, eps).view_as(x)
        y = F.rms_norm(x, (self.size,), None, self.eps)
        if self.weight is None:
            return y
        return times_by_run(y.unflatten(0, (len(self.weight), -1)), self.weight).flatten(0, 1)


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
