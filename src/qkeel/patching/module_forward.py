"""Replaces the forward of one module by an attribute of the instance."""

from __future__ import annotations

import abc
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from qkeel.handle import Handle

# Forward hooks would not be enough, because compiled code does not detect that a hook was added or removed, whereas it
# has a guard on the instance's own `forward`.

_FORWARD = "forward"


class InstanceForward(abc.ABC):
    """A callable that replaces the forward of `module`. It is copied and pickled with the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: Callable[..., Any] | None = module.__dict__.get(_FORWARD)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The replaced forward, so that inspect.signature shows its parameters."""
        return (
            types.MethodType(type(self.module).forward, self.module)
            if self.before is None
            else self.before
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(args, kwargs)

    def replaced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the replaced forward."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @abc.abstractmethod
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one call of the module's forward."""


def forwards_of(module: nn.Module) -> Iterator[InstanceForward]:
    """Yields the replacements of a module's forward, outermost first."""
    at = module.__dict__.get(_FORWARD)
    while isinstance(at, InstanceForward):
        yield at
        at = at.before


def put_in_place(new: InstanceForward) -> Handle:
    """Installs a replacement and returns a handle that removes it."""
    new.module.__dict__[_FORWARD] = new
    return Handle(lambda: take_out(new))


def take_out(old: InstanceForward) -> None:
    """Removes a replacement, even if later ones are installed on top of it."""
    module = old.module
    outer = next((f for f in forwards_of(module) if f.before is old), None)
    if outer is not None:
        outer.before = old.before
    elif module.__dict__.get(_FORWARD) is old and old.before is not None:
        module.__dict__[_FORWARD] = old.before
    elif module.__dict__.get(_FORWARD) is old:
        del module.__dict__[_FORWARD]
