"""Gradients from q or k to one projection alone, through norms as if these multiplied by a constant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from qkeel.sites.weights.autograd_walk import WHOLE_NORMS, Projection


@contextmanager
def only(one: Projection, among: Sequence[Projection]) -> Iterator[None]:
    """While it lasts gradients do not pass the others: what reaches a projection came to it directly."""
    with ExitStack() as undo:
        for other in among:
            if other.node is not one.node:
                undo.callback(other.node.register_prehook(_nothing).remove)
        yield


@contextmanager
def opened(nodes: Sequence[Node]) -> Iterator[None]:
    """While it lasts gradients pass norms as if these multiplied by a constant."""
    with ExitStack() as undo:
        for node in nodes:
            undo.callback(_pass_through(node).remove)
        yield


def _pass_through(node: Node) -> RemovableHandle:
    if node.name() in WHOLE_NORMS:
        return node.register_hook(_as_factor)
    return node.register_prehook(_nothing)


def _as_factor(inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    first = outputs[0]
    if first is None or inputs[0] is None:
        return inputs
    return (first.reshape(inputs[0].shape), *inputs[1:])


def _nothing(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(g if g is None else torch.zeros_like(g) for g in grads)
