"""Gradient checkpointing in a pass whose graph is read: each part runs once, and is forgotten when it has been read."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, final

import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# Where torch's other kind of checkpoint is looked up: the second has a name of its own for it, once it is imported.
_HOMES = ("torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation")
_NAME = "_checkpoint_without_reentrant_generator"


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

    A module that is imported meanwhile may keep it for ever: it goes on to do what torch's own does.
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
        self._put: list[tuple[ModuleType, _Generator]] = []

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
            now = getattr(home, _NAME)
            if not isinstance(now, _Generator):
                self._put.append((home, _Generator(now)))
                setattr(home, _NAME, self._put[-1][1])

    def _end(self) -> None:
        del torch.utils.checkpoint.CheckpointFunction.apply  # the inherited one shows again
        for home, mine in self._put:
            if getattr(home, _NAME) is mine:
                setattr(home, _NAME, mine.original)
        self._put.clear()


_PATCH = _Patch()
