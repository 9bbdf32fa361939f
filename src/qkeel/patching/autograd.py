"""Internals of autograd's graph, and the checkpointed parts of a pass whose graph is read."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Private attributes of graph nodes and tensors: saved operands, the base of a view, versions.


def nodes_of(inputs: Iterable[Tensor]) -> set[Node]:
    """The graph nodes that computed these tensors, at which tracing stops."""
    return {x.grad_fn for x in inputs if x.grad_fn is not None}


def variable_of(node: Node) -> Any:
    """The leaf tensor whose gradient a node accumulates, or None for any other node."""
    return node.variable if node.name() == "torch::autograd::AccumulateGrad" else None  # type: ignore[attr-defined]


def inputs_of(node: Node) -> list[Node]:
    """The nodes that computed the inputs of a node, as far as they have gradients."""
    return [above for above, _ in node.next_functions if above is not None]


def output_like(node: Node) -> Tensor:
    """Returns zeros shaped like a node's first output."""
    kept: Any = node
    meta = kept._input_metadata[0]
    return torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)


def is_transposed(node: Node) -> bool:
    """True for a transposed convolution, whose weight has the input features as its first dimension."""
    kept: Any = node
    return bool(kept._saved_transposed)


def base_of(view: Tensor) -> Tensor | None:
    """Returns the tensor of which `view` is a view, or None if it is not a view."""
    return view._base


def version_of(x: Tensor) -> int:
    """Returns how many times the tensor has been written to in place."""
    return x._version


def writes_to(tensors: Iterable[Tensor]) -> int:
    """Returns how many times any of these tensors has been written to in place."""
    return sum([x._version for x in tensors])


def is_wrapper(x: Tensor) -> bool:
    """True for tensor subclasses that wrap other tensors, such as DTensor and quantised ones."""
    return is_traceable_wrapper_subclass(x)


# Checkpointing in a pass whose graph is read: each part runs once and is freed after it has been read.

# Modules that hold torch's non-reentrant checkpoint. The second imports it into its own namespace.
_HOMES = (
    "torch.utils.checkpoint",
    "torch.distributed._composable.checkpoint_activation",
)
# Since torch 2.14 torch calls the second of these itself, and keeps the first for other packages.
_NAMES = tuple("_checkpoint_without_reentrant_generator" + end for end in ("", "_impl"))


# Per thread: whether checkpointed functions are called directly.
_DIRECT = contextvars.ContextVar("qkeel_direct", default=False)
# Searches in several threads come one after the other, so that each puts back what it has found.
_LOCK = threading.RLock()


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """A context in which checkpointed functions are called directly. Otherwise a reentrant checkpoint would record no
    graph, and a non-reentrant one would run twice. Other threads run torch's own code."""
    with _LOCK, ExitStack() as undo:
        token = _DIRECT.set(True)
        undo.callback(_DIRECT.reset, token)
        function = torch.utils.checkpoint.CheckpointFunction
        if "apply" not in vars(function):
            function.apply = classmethod(_apply)  # type: ignore[method-assign,assignment]
            # Uncovers the inherited method.
            undo.callback(delattr, function, "apply")
        for home in filter(None, map(sys.modules.get, _HOMES)):
            for name in _NAMES:
                original = vars(home).get(name)
                if original is not None:
                    undo.callback(setattr, home, name, original)
                    setattr(home, name, _Generator(original))
        yield


def _apply(kind: type[torch.autograd.Function], *args: Any) -> Any:
    """Replaces CheckpointFunction.apply, which this calls unless checkpointed functions are called directly."""
    if _DIRECT.get():
        # apply gets the function, whether to preserve random states, and the function's own arguments.
        act, _, *arguments = args
        return act(*arguments)
    return super(torch.utils.checkpoint.CheckpointFunction, kind).apply(*args)  # type: ignore[misc]


@final
class _Generator:
    """Replaces torch's generator of a non-reentrant checkpoint, which it calls unless checkpointed functions are called
    directly.

    A module that is imported in the meantime may keep this object forever, so it must keep working like torch's own.
    """

    def __init__(self, original: Callable[..., Iterator[None]]) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        return _call_directly() if _DIRECT.get() else self.original(*args, **kwargs)


def _call_directly() -> Generator[None]:
    # torch advances the generator, runs the function, and advances it again; nothing happens on either side.
    yield
