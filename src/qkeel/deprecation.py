"""Calls as they were written for version 0.1.0. They work for one more release, with a warning that shows the new call.

The model comes first everywhere, then the remedy, then the optimizer; example data is called `batch`.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
# Positional and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]

# The new names of parameters, each in the functions that have it.
RENAMED = {
    "named": "remedy",
    "example": "batch",
    "batches": "batch",
    "fitting": "config",
    "probe": "probe_batch",
    "what": "model_or_path",
    "run": "path",
    "to": "architecture",
    "out": "path",
}


def accepts_earlier_calls(
    reorder: Callable[..., Call | None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a public function accept the names of 0.1.0 and, with `reorder`, its order.

    `reorder` is called with the arguments and returns them in the new order, or None if they are in it already.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        positional = [
            name
            for name, p in parameters.items()
            if p.kind is p.POSITIONAL_OR_KEYWORD and name != "self"
        ]
        renamed = {old: new for old, new in RENAMED.items() if new in parameters}
        call = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def accepting(*args: Any, **kwargs: Any) -> R:
            # The old order is told by the types of the arguments, before their names are looked at.
            reordered = reorder(*args, **kwargs) if reorder is not None else None
            if reordered is not None:
                args, kwargs = reordered
            if reordered is not None or not kwargs.keys().isdisjoint(renamed):
                kwargs = {
                    renamed.get(name, name): value for name, value in kwargs.items()
                }
                keywords = [
                    f"{name}={name}" for name in kwargs if name not in positional
                ]
                warn(
                    f"write {call}({', '.join([*positional, *keywords])})", stacklevel=2
                )
            return function(*args, **kwargs)

        return accepting

    return decorate


def warn(message: str, *, stacklevel: int) -> None:
    """Warns that a form of version 0.1.0 was used; `stacklevel` 1 is the caller of this function."""
    warnings.warn(
        f"{message}; the form of version 0.1.0 works until 0.3.0",
        DeprecationWarning,
        stacklevel + 1,
    )


def earlier_name(package: str, name: str, renamed: dict[str, str]) -> str:
    """Returns the present name of something in a package, with a warning if `name` is an earlier one.

    It is meant for the `__getattr__` of that package, at whose caller the warning points."""
    if name in renamed:
        warn(f"write {package}.{renamed[name]}, which was called {name}", stacklevel=3)
    return renamed.get(name, name)
