"""Gradient checkpointing, switched off for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint


@contextmanager
def checkpointing_off() -> Iterator[None]:
    """While it lasts checkpointed functions run as they are: a reentrant checkpoint would record no graph, the other
    kind would run them twice."""
    home = torch.utils.checkpoint
    generator = home._checkpoint_without_reentrant_generator

    def direct(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return function(*args)

    def nothing() -> Iterator[None]:
        yield

    home.CheckpointFunction.apply = staticmethod(direct)  # type: ignore[method-assign,assignment]
    home._checkpoint_without_reentrant_generator = lambda *_, **__: nothing()  # type: ignore[assignment]
    try:
        yield
    finally:
        del home.CheckpointFunction.apply  # the inherited one shows again
        home._checkpoint_without_reentrant_generator = generator
