"""Gradient checkpointing in a pass whose graph is read: each part runs once, and is forgotten when it has been read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# Where torch's other kind of checkpoint is looked up: the second has a name of its own for it, once it is imported.
_HOMES = ("torch.utils.checkpoint", "torch.distributed._composable.checkpoint_activation")


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
        function, homes = torch.utils.checkpoint.CheckpointFunction, [m for n in _HOMES if (m := sys.modules.get(n))]
        generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator

        def direct(act: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            with self._part():
                return act(*args)

        def around() -> Iterator[None]:
            with self._part():
                yield

        function.apply = staticmethod(direct)  # type: ignore[method-assign,assignment]
        for home in homes:
            home._checkpoint_without_reentrant_generator = lambda *_, **__: around()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del function.apply  # the inherited one shows again
            for home in homes:
                home._checkpoint_without_reentrant_generator = generator  # type: ignore[attr-defined]

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
