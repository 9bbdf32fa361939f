"""Exchanges the code object of a Python function, so that calls through any alias of it are seen."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from qkeel.patching.guards import unguarded
from qkeel.patching.torch_state import compiler_loaded, run_uncompiled

# A function is imported by name into other modules and kept in attributes, closures, partials and `torch.compile`
# wrappers, so replacing one attribute would miss most callers. Here the function object stays the same, and the
# original code object still runs in the end, so code compiled for it is reused.

# Name of a global in the function's module that the new code calls, and of the function's attribute for its users.
_NAME = "_qkeel_exchanged_"
_LOCK = threading.Lock()


@dataclasses.dataclass(slots=True)
class ObservedCall:
    """One call of an observed function: the arguments that the original code receives, and what follows it.

    close: called when the original code has ended, in whatever way. finish: called with its result afterwards; returns
    what the caller receives.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    close: Callable[[], None]
    finish: Callable[[Any], Any]


# Receives a function and the arguments of a call; returns None for a call that is not observed. It must not fail.
Begin = Callable[[types.FunctionType, list[Any], dict[str, Any]], ObservedCall | None]


def exchange(function: types.FunctionType, begin: Begin) -> None:
    """Makes calls of a function, by whatever name, go through `begin`, until as many calls of `give_back`.

    torch.compile does not trace `begin` and what it returns."""
    key = _NAME + function.__name__
    with _LOCK:
        # The original code, and after it one entry for each user.
        users = vars(function).setdefault(_NAME, [])
        if not users:
            users.append(function.__code__)
            function.__globals__[key], signature = _entrance(
                function, function.__code__, begin, compiler_loaded()
            )
            # The signature that callers inspect stays that of the function.
            function.__signature__ = signature  # type: ignore[attr-defined]
            function.__code__ = _forwarding(key, function.__code__)
        users.append(None)


def give_back(function: types.FunctionType) -> None:
    """Undoes one `exchange`."""
    with _LOCK:
        users = vars(function)[_NAME]
        users.pop()
        if len(users) == 1:
            function.__code__ = users[0]
            del function.__globals__[_NAME + function.__name__], vars(function)[_NAME]
            del function.__signature__  # type: ignore[attr-defined]


# Every observed pass exchanges the same few functions, and making an entrance takes 30 µs.
@functools.lru_cache(maxsize=64)
def _entrance(
    function: types.FunctionType,
    code: types.CodeType,
    begin: Begin,
    is_compiler_loaded: bool,
) -> tuple[Callable[..., Any], inspect.Signature]:
    """Returns what the new code of a function calls with the arguments as a tuple and a dict, and its signature."""
    # A second function with the original code, since the code of the first one is about to be replaced.
    original = types.FunctionType(
        code,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    original.__kwdefaults__ = function.__kwdefaults__
    uncompiled: Any = unguarded
    if is_compiler_loaded:
        uncompiled = torch.compiler.disable(unguarded)

    def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = None
        if not torch.compiler.is_compiling():
            call = uncompiled(begin, function, list(args), kwargs)
        if call is None:
            return original(*args, **kwargs)
        try:
            out = original(*call.args, **call.kwargs)
        finally:
            uncompiled(call.close)
        return uncompiled(call.finish, out)

    if is_compiler_loaded:
        # If a compiled wrapper calls the function, the compiler should trace the original code, not this entrance.
        run_uncompiled(_forwarding(_NAME + function.__name__, code))
        run_uncompiled(enter.__code__)
    return enter, inspect.signature(function)


@functools.lru_cache(maxsize=32)
def _forwarding(name: str, code: types.CodeType) -> types.CodeType:
    """Returns code that passes its arguments to the global `name`; `code` is what it takes the place of."""
    forward: types.FunctionType = eval(f"lambda *args, **kwargs: {name}(args, kwargs)")
    # Python accepts other code for a function only if it has as many free variables.
    return forward.__code__.replace(co_freevars=code.co_freevars, co_name=code.co_name)
