"""What stands in for a module's forward, as an attribute of the instance: seen by torch.compile, gone without a trace.

Not a forward hook: code compiled before a hook was registered, or while it was there, does not notice that it came or
went; an instance's own `forward` is guarded.
"""

from __future__ import annotations

import abc
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_NAME = "forward"


class StandIn(abc.ABC):
    """Is called in place of the forward of `module`, which `below` is. Copied and pickled with its module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: Callable[..., Any] | None = module.__dict__.get(_NAME)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What it stands in for: inspect.signature shows that one's parameters."""
        return types.MethodType(type(self.module).forward, self.module) if self.before is None else self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(args, kwargs)

    def below(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward that it stands in for."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @abc.abstractmethod
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the module's forward."""


def standing_in(module: nn.Module) -> Iterator[StandIn]:
    """Those that stand in for a module's forward, the outermost first."""
    at = module.__dict__.get(_NAME)
    while isinstance(at, StandIn):
        yield at
        at = at.before


def place(new: StandIn) -> None:
    """Put it before its module's forward."""
    new.module.__dict__[_NAME] = new


def take_out(old: StandIn) -> None:
    """Its module's forward is what it was before, from under others if need be."""
    module = old.module
    above = next((s for s in standing_in(module) if s.before is old), None)
    if above is not None:
        above.before = old.before
    elif module.__dict__.get(_NAME) is old and old.before is not None:
        module.__dict__[_NAME] = old.before
    elif module.__dict__.get(_NAME) is old:
        del module.__dict__[_NAME]
