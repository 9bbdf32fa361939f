"""Nodes of autograd's graph, and torch's checkpointing while a model is probed."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, final

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Private parts of autograd's graph and of tensors: saved operands, the base of a view, versions.

_NORM = "qkeel: a norm"


def saved_operand(node: Node, place: int) -> Tensor | None:
    """An operand of a product or quotient, where the graph keeps it: the first (0) or the second (1)."""
    kept: Any = node
    try:
        value = (kept._saved_self, kept._saved_other)[place] if place else kept._saved_self
    except (AttributeError, RuntimeError):  # not saved, or freed
        return None
    return value if isinstance(value, Tensor) else None


def slice_of(node: Node) -> slice:
    """The places that a slice of one dimension took, as they were given: negative ones count from the end."""
    kept: Any = node
    given = (kept._saved_start, kept._saved_end, kept._saved_step)
    # Negative numbers are read back as those of 64 bits without a sign.
    return slice(*(n if n is None or n < 1 << 63 else n - (1 << 64) for n in given))


def output_like(node: Node) -> Tensor:
    """Zeros like the first output of a node."""
    kept: Any = node
    meta = kept._input_metadata[0]
    return torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)


def is_transposed(node: Node) -> bool:
    """True if a convolution is a transposed one, whose weight has the features of its input first."""
    kept: Any = node
    return bool(kept._saved_transposed)


def normalized_shape(node: Node) -> tuple[int, ...]:
    """The last dimensions over which a layer norm, or an RMS norm, of torch's own ran."""
    kept: Any = node
    return tuple(kept._saved_normalized_shape)


def saved_gain(node: Node) -> Tensor | None:
    """The gain by which such a norm multiplied."""
    kept: Any = node
    return kept._saved_weight


def mark_as_norm(x: Tensor) -> None:
    """Note at the node that made a tensor that a norm did, where no operator of the norm shows it."""
    if x.grad_fn is not None and not torch.compiler.is_compiling():
        x.grad_fn.metadata[_NORM] = True  # type: ignore[index]


def is_marked_norm(node: Node) -> bool:
    """True if `mark_as_norm` noted it at the node."""
    return _NORM in node.metadata  # type: ignore[operator]


def base_of(view: Tensor) -> Tensor | None:
    """The tensor that this one is a view of; None if it is no view."""
    return view._base


def version_of(x: Tensor) -> int:
    """The number of times that the tensor was written to in place."""
    return x._version


def writes_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Of each tensor the same number, and where its numbers lie."""
    return [(x._version, x.data_ptr()) for x in tensors]


def is_wrapper(x: Tensor) -> bool:
    """True if the tensor holds others, as DTensor and quantised ones do."""
    return is_traceable_wrapper_subclass(x)


# Gradient checkpointing in a pass whose graph is read: each part runs once, and is forgotten when it has been read.

# Where torch's other kind of checkpoint is looked up: the second has a name of its own for it, once it is imported.
_HOMES = ("torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation")
# Since torch 2.14 torch calls the second of these itself, and keeps the first for other packages.
_NAMES = tuple("_checkpoint_without_reentrant_generator" + end for end in ("", "_impl"))


class CheckpointedParts:
    """The checkpointed parts of a pass, each of which runs once, with a graph, while `noticed` lasts.

    A reentrant checkpoint would record no graph, the other kind would run twice. What a part saves for backward, which
    it would not have kept, is dropped at its end, after a call of `read`; the nodes of the graph stay. So no more is
    kept than in a backward pass, which computes one part at a time again.

    Args:
        read: called at the end of each part.
        keep: drop nothing: as without checkpoints.

    Attributes:
        any: whether there were such parts.
        missed: whether something asked for numbers that were dropped.
    """

    def __init__(self, read: Callable[[], None] = lambda: None, *, keep: bool = False) -> None:
        self.any = self.missed = False
        self._read, self._keep = read, keep

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """While it lasts checkpointed functions run as parts."""
        token = _NOTICING.set(self)
        try:
            with _PATCH.in_place():
                yield
        finally:
            _NOTICING.reset(token)

    def direct(self, act: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        """What runs in the place of a reentrant checkpoint."""
        with self._part():
            return act(*args)

    def around(self) -> Iterator[None]:
        """What runs in the place of the generator around the other kind."""
        with self._part():
            yield

    @contextmanager
    def _part(self) -> Iterator[None]:
        self.any = True
        if self._keep:
            yield
            return
        saved: list[Tensor] | None = []

        def pack(x: Tensor) -> int:
            assert saved is not None
            saved.append(x)
            return len(saved) - 1

        def unpack(place: int) -> Tensor:
            if saved is None:
                self.missed = True
                raise RuntimeError("a checkpointed part of the model has run and is forgotten")
            return saved[place]

        try:
            with saved_tensors_hooks(pack, unpack):
                yield
            self._read()
        finally:
            saved = None


# Per thread: who notices the checkpointed parts of the pass that runs there.
_NOTICING: contextvars.ContextVar[CheckpointedParts | None] = contextvars.ContextVar("qkeel_parts", default=None)


def _apply(kind: type[torch.autograd.Function], *args: Any) -> Any:
    """CheckpointFunction.apply: a part where this thread notices them, else what the class inherits."""
    parts = _NOTICING.get()
    if parts is not None:
        return parts.direct(*args)
    return super(torch.utils.checkpoint.CheckpointFunction, kind).apply(*args)  # type: ignore[misc]


@final
class _Generator:
    """Torch's generator around a checkpoint that is not reentrant, but where this thread notices such parts.

    A module that is imported meanwhile may keep it for ever: it continues to do what torch's own does.
    """

    def __init__(self, original: Callable[..., Iterator[None]]) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        parts = _NOTICING.get()
        return self.original(*args, **kwargs) if parts is None else parts.around()


@final
class _Patch:
    """What stands in torch.utils.checkpoint's names while any thread notices parts: put there by the first of them and
    taken away by the last, whatever the order in which they end. Threads that notice nothing run torch's own."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._put: list[tuple[ModuleType, str, _Generator]] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._begin()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._end()

    def _begin(self) -> None:
        torch.utils.checkpoint.CheckpointFunction.apply = classmethod(_apply)  # type: ignore[method-assign,assignment]
        for home in [m for name in _HOMES if (m := sys.modules.get(name)) is not None]:
            for name in _NAMES:
                now = vars(home).get(name)
                if now is not None and not isinstance(now, _Generator):
                    self._put.append((home, name, _Generator(now)))
                    setattr(home, name, self._put[-1][2])

    def _end(self) -> None:
        del torch.utils.checkpoint.CheckpointFunction.apply  # the inherited one shows again
        for home, name, mine in self._put:
            if vars(home).get(name) is mine:
                setattr(home, name, mine.original)
        self._put.clear()


_PATCH = _Patch()
