"""Updates of many weights as compiled operators: a step of Adam or AdamW with a rate for each line of a weight, and a
factor for each head."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from qkeel.kernels.native.operator import OperatorSource

# Both operators change their arguments and return nothing.
OPERATORS = OperatorSource("adamw", {"adam_lines": lambda *_: None, "scale_heads": lambda *_: None})
ready = OPERATORS.ready


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdamOptions:
    """The options of a parameter group of torch's Adam. `plain`: decoupled decay at its full size at any rate."""

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
    """The n weights of a step, each a dense float32 matrix or vector, what torch's Adam keeps of them, and rates.

    `maxima` is empty without amsgrad. `rates` [lines] float32, `squares` [lines] float64: a line is a row (axis 0) or
    a column (axis 1) of its matrix, or a number of its vector. `grad_scale` and `found_inf` are a GradScaler's, which
    only the kernel for GPUs reads.
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
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None


def adam_lines(tensors: AdamTensors, options: AdamOptions) -> None:
    """Does w ← w + rate · (Adam(w) - w) for each line, in place, and writes each line's new sum of squares.

    The state changes as in torch's step; a rate of 1 gives the weight of that step. With `options.plain` it is
    w' + rate · (Adam(w) - w'), w' = (1 - lr · decay) · w.
    """
    t, o = tensors, options
    torch.ops.qkeel_native.adam_lines(
        *(list(x) for x in (t.weights, t.gradients, t.means, t.variances, t.maxima, t.steps, t.rates, t.squares)),
        list(t.axes), o.lr, o.beta1, o.beta2, o.eps, o.decay, o.decoupled, o.plain, o.maximize,
    )  # fmt: skip


def sum_lines(weights: Sequence[Tensor], squares: Sequence[Tensor], axes: Sequence[int]) -> None:
    """Writes the sums of squares of each line of weights, to the bit those that a step of them leaves: by a step of a
    copy that leaves it as it is."""
    none = AdamOptions(lr=0, beta1=0.9, beta2=0.9, eps=1, decay=0, decoupled=True, maximize=False)
    for weight, own, axis in zip(weights, squares, axes):
        means, variances, gradients = ([torch.zeros_like(weight)] for _ in range(3))
        tensors = AdamTensors(
            weights=[weight.clone()],
            gradients=gradients,
            means=means,
            variances=variances,
            maxima=[],
            steps=[weight.new_zeros(())],
            rates=[weight.new_zeros(len(own))],
            squares=[own],
            axes=[axis],
        )
        adam_lines(tensors, none)


def scale_heads(heads: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Multiplies each of the heads [n r m], float32, by its factor [n], in place; a factor of 1 changes no bit."""
    if heads:  # an operator without tensors has no device
        torch.ops.qkeel_native.scale_heads(list(heads), list(factors))
