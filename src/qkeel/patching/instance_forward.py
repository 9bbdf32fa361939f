"""A replacement of one module's forward, kept as an attribute of the instance: torch.compile sees it come and go.

Not a forward hook: code compiled before a hook was registered, or while it was there, does not notice that it came or
went; an instance's own `forward` is guarded.
"""

from __future__ import annotations

import abc
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from qkeel.handle import Handle

_NAME = "forward"


class InstanceForward(abc.ABC):
    """A callable in place of the forward of `module`. Copied and pickled with its module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: Callable[..., Any] | None = module.__dict__.get(_NAME)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward that it replaces: inspect.signature shows that one's parameters."""
        return types.MethodType(type(self.module).forward, self.module) if self.before is None else self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(args, kwargs)

    def replaced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the forward that it replaces."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @abc.abstractmethod
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of the module's forward."""


def forwards_of(module: nn.Module) -> Iterator[InstanceForward]:
    """The replacements of a module's forward, the outermost first."""
    at = module.__dict__.get(_NAME)
    while isinstance(at, InstanceForward):
        yield at
        at = at.before


def put_in_place(new: InstanceForward) -> Handle:
    """Lets its module's calls go to it; the handle takes it out."""
    new.module.__dict__[_NAME] = new
    return Handle(lambda: take_out(new))


def take_out(old: InstanceForward) -> None:
    """Lets its module's forward be what it was before, from inside others if need be."""
    module = old.module
    outer = next((f for f in forwards_of(module) if f.before is old), None)
    if outer is not None:
        outer.before = old.before
    elif module.__dict__.get(_NAME) is old and old.before is not None:
        module.__dict__[_NAME] = old.before
    elif module.__dict__.get(_NAME) is old:
        del module.__dict__[_NAME]
