"""A Python function whose code object is exchanged, so that calls through every alias of it are seen.

A function is imported by name into other modules and kept in attributes, closures, partials and `torch.compile`
wrappers: replacing one attribute would miss most callers. Here the function object stays what it is. What runs in the
end is the same code object as before, so what was compiled for it is used again.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import threading
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, final

import torch

from qkeel.patching.compiler_state import compiler_loaded, run_uncompiled
from qkeel.patching.guard import Guarded, unguarded

# A global of the function's module as long as its code is exchanged: what the new code calls.
_NAME = "_qkeel_exchanged_"
_LOCK = threading.Lock()

Given = tuple[list[Any], dict[str, Any]]  # by position and by name
# Arguments, what is to be closed when the call is over, what gets the result when it has returned, and what makes of
# that what the caller asked for, where it is something else.
Begun = tuple[Given, ExitStack, Callable[[object], None], Callable[[object], object] | None]
# Gets the function and the arguments of a call.
Begin = Callable[[types.FunctionType, list[Any], dict[str, Any]], Begun | None]

# Per thread: what calls `begin` and the ends; None where nobody looks.
GUARD: contextvars.ContextVar[Guarded | None] = contextvars.ContextVar("qkeel_guard_of_calls", default=None)


@final
class ExchangedCode:
    """A function with other code: where there is a GUARD that calls `begin`, then its own code, then what `begin`
    has returned. Torch's compiler takes no part in what the guard calls.
    """

    def __init__(self, function: types.FunctionType, begin: Begin) -> None:
        self.function, self.code = function, function.__code__
        self.original = types.FunctionType(
            self.code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        self._holders = 0
        name = _NAME + function.__name__
        uncompiled = torch.compiler.disable(unguarded) if compiler_loaded() else unguarded
        forward, enter = _forwarding(self.code, name), self._entrance(begin, uncompiled)
        if compiler_loaded():
            # Called by a compiled wrapper, the compiler is to take up the function itself, not what stands before it.
            run_uncompiled(forward, enter.__code__)
        function.__globals__[name] = enter
        vars(function)[_NAME] = self
        function.__code__ = forward

    def _entrance(self, begin: Begin, uncompiled: Guarded) -> types.FunctionType:
        function, original = self.function, self.original

        def enter(args: list[Any], kwargs: dict[str, Any]) -> Any:
            guard = None if torch.compiler.is_compiling() else GUARD.get()
            begun = guard and uncompiled(guard, begin, function, args, kwargs)
            if not begun:
                return original(*args, **kwargs)
            (given, named), over, report, own = begun
            try:
                out = original(*given, **named)
            finally:
                uncompiled(guard, over.close)
            uncompiled(guard, report, out)
            return out if own is None else uncompiled(own, out)

        return enter  # type: ignore[return-value]

    def release(self) -> None:
        """One holder less; without any the function is as it was."""
        with _LOCK:
            self._holders -= 1
            if self._holders == 0:
                self.function.__code__ = self.code
                del self.function.__globals__[_NAME + self.function.__name__], vars(self.function)[_NAME]

    def hold(self) -> ExchangedCode:
        """One holder more."""
        self._holders += 1
        return self


def exchange(function: types.FunctionType, begin: Begin) -> ExchangedCode:
    """The function with its code exchanged; what it has already, if it is. To be given back by `release()`.

    Args:
        function: whose code is to be exchanged.
        begin: gets its calls, unless an earlier one still does.

    Raises:
        SyntaxError, TypeError, ValueError: its code has a form that is not foreseen.
    """
    with _LOCK:
        held: ExchangedCode = vars(function).get(_NAME) or ExchangedCode(function, begin)
        return held.hold()


@functools.lru_cache(maxsize=32)
def _forwarding(code: types.CodeType, name: str) -> types.CodeType:
    """Code that takes the arguments that `code` takes and gives them to `name`, as a list and a dict."""
    n = code.co_argcount + code.co_kwonlyargcount
    first, named = code.co_varnames[: code.co_argcount], code.co_varnames[code.co_argcount : n]
    rest = list(code.co_varnames[n:])
    more = rest.pop(0) if code.co_flags & inspect.CO_VARARGS else ""
    others = rest.pop(0) if code.co_flags & inspect.CO_VARKEYWORDS else ""
    parameters = [*first, *([f"*{more}"] if more or named else []), *named, *([f"**{others}"] if others else [])]
    args = "".join(f"{x}, " for x in first) + (f"*{more}" if more else "")
    kwargs = ", ".join([*(f"{x!r}: {x}" for x in named), *([f"**{others}"] if others else [])])
    made: types.FunctionType = eval(f"lambda {', '.join(parameters)}: {name}([{args}], {{{kwargs}}})")
    return made.__code__.replace(co_freevars=code.co_freevars, co_name=code.co_name)
