"""Whether the scalar that a pass returned is the loss that is trained.

A model may return a loss that nobody uses: that of its labels while a preference loss is computed from its logits, or
an auxiliary loss. So a scalar is the loss only if backward() was called on it or on a multiple of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import final

import torch.autograd.graph
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

_SCALAR = "qkeel: a scalar that a pass returned"
# What multiplies a scalar (loss scaling, gradient accumulation), or hands it on.
_SCALING = (
    "MulBackward0",
    "DivBackward0",
    "CloneBackward0",
    "ToCopyBackward0",
    "MeanBackward0",
    "SumBackward0",
)
# DistributedDataParallel hands all outputs of a pass on in one node.
_HANDS_ON = "_DDPSinkBackward"
# Both backward() and torch.autograd.grad() run through this function.
_RUNS_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


@final
class ReturnedScalar:
    """A scalar that a pass returned; `is_loss` once backward() was called on it or on a multiple of it.

    >>> x = torch.tensor(3.0, requires_grad=True)
    >>> scalar = ReturnedScalar(y := x * 2)
    >>> scalar.is_loss
    False
    >>> (y / 4).backward()
    >>> scalar.is_loss
    True
    """

    def __init__(self, scalar: Tensor) -> None:
        self.is_loss = False
        node, output = scalar.grad_fn, scalar.output_nr

        def reached(gradients: Sequence[Tensor | None]) -> None:
            # A compiled model is one node, whose other outputs may get a gradient.
            if gradients[output] is not None:
                for root in backward_roots():
                    self.is_loss |= _is_multiple(root, self)

        if node is not None:
            # The node keeps this object alive, not the reverse, so that the graph ends as it would without it.
            node.metadata[_SCALAR] = self  # type: ignore[index]
            node.register_prehook(reached)


def _is_multiple(root: Node | None, scalar: ReturnedScalar) -> bool:
    """Returns whether a backward pass that began at this node began in the scalar, or in a multiple of it."""
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if node.metadata.get(_SCALAR) is scalar:  # type: ignore[attr-defined]
            return True
        operands = [n for n, _ in node.next_functions if n is not None]
        is_scaling = node.name() in _SCALING and len(operands) == 1
        if is_scaling or node.name() == _HANDS_ON:
            nodes += operands
    return False


def backward_roots() -> Iterator[Node | None]:
    """Yields the nodes at which the backward passes began that run now, in any thread.

    The hooks of a GPU run in a thread of its own, while the one that called backward() waits.
    """
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code is _RUNS_BACKWARD:
                for root in frame.f_locals["t_outputs"]:
                    is_edge = isinstance(root, GradientEdge)
                    yield root.node if is_edge else root.grad_fn
            frame = frame.f_back
