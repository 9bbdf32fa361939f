"""What changes weights after a backward pass, as compiled operators over many of them: a step of Adam or AdamW with a
rate for each line of a weight, and a factor for each head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qkeel.kernels.native.loader import usable


def ready() -> bool:
    """Whether the operator below can be used here and now."""
    return usable("adamw", _register)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdamOptions:
    """What a parameter group of torch's Adam says. `plain`: decoupled decay at its full size, whatever the rates."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    decoupled: bool
    maximize: bool
    plain: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdamTensors:
    """Of n weights, each a dense float32 matrix or vector: the lists that torch's Adam keeps, and a rate per line.

    `maxima` is empty without amsgrad. `rates` [lines] float32, `squares` [lines] float64: a line is a row (axis 0) or
    a column (axis 1) of its matrix, or a number of its vector.
    """

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    means: Sequence[Tensor]
    variances: Sequence[Tensor]
    maxima: Sequence[Tensor]
    steps: Sequence[Tensor]
    rates: Sequence[Tensor]
    squares: Sequence[Tensor]
    axes: Sequence[int]


def adam_lines(tensors: AdamTensors, options: AdamOptions) -> None:
    """w ← w + rate · (Adam(w) - w) for each line, in place, and the sum of squares of every line's new numbers.

    The state moves as in torch's step; a rate of 1 gives the weight of that step. With `options.plain` it is
    w' + rate · (Adam(w) - w'), w' = (1 - lr · decay) · w.
    """
    t, o = tensors, options
    torch.ops.qkeel_native.adam_lines(
        *(list(x) for x in (t.weights, t.gradients, t.means, t.variances, t.maxima, t.steps, t.rates, t.squares)),
        list(t.axes), o.lr, o.beta1, o.beta2, o.eps, o.decay, o.decoupled, o.plain, o.maximize,
    )  # fmt: skip


def scale_heads(heads: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Each of the heads [n r m], float32, times its factor [n], in place; one at 1 is not touched."""
    if heads:  # an operator without tensors has no device
        torch.ops.qkeel_native.scale_heads(list(heads), list(factors))


def _register() -> None:
    torch.library.register_fake("qkeel_native::adam_lines", _nothing)
    torch.library.register_fake("qkeel_native::scale_heads", _nothing)


def _nothing(*_: Any) -> None:
    """It returns nothing."""
