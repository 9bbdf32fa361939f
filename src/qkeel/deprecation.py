"""Calls as they were written for version 0.1.0. They work for one more release, with a warning that shows the new call.

The model comes first everywhere, then the remedy, then the optimizer; example data is called `batch`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


def accepts_earlier_calls(
    call: str, *, renamed: Mapping[str, str] | None = None, reorder: Callable[..., Call | None] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a public function, or the constructor of a class, accept the calls of version 0.1.0.

    Args:
        call: the new call, for the warning.
        renamed: the new names of keywords, by their earlier names.
        reorder: is called with the arguments, and returns them in the new order, or None if they are in it already.
    """
    names = renamed or {}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def accepting(*args: Any, **kwargs: Any) -> R:
            used = [f"{names[name]} was called {name}" for name in kwargs if name in names]
            if used:
                kwargs = {names.get(name, name): value for name, value in kwargs.items()}
            reordered = reorder(*args, **kwargs) if reorder is not None else None
            if reordered is not None:
                args, kwargs = reordered
                used.insert(0, "the order of its arguments has changed")
            if used:
                warn(f"write {call}: {' and '.join(used)}", stacklevel=2)
            return function(*args, **kwargs)

        return accepting

    return decorate


def warn(message: str, *, stacklevel: int) -> None:
    """Warns that a form of version 0.1.0 was used; `stacklevel` 1 is the caller of this function."""
    warnings.warn(f"{message}; the form of version 0.1.0 works until 0.3.0", DeprecationWarning, stacklevel + 1)


def earlier_name(package: str, name: str, renamed: Mapping[str, str]) -> str | None:
    """Returns the new name of something in a package, with a warning, or None if `name` is not an earlier name.

    It is meant for the `__getattr__` of that package, at whose caller the warning points."""
    if name not in renamed:
        return None
    warn(f"write {package}.{renamed[name]}, which was called {name}", stacklevel=3)
    return renamed[name]
