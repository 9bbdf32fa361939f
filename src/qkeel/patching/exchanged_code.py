"""A Python function whose code object is exchanged, so that calls through every alias of it are seen.

A function is imported by name into other modules and kept in attributes, closures, partials and `torch.compile`
wrappers: replacing one attribute would miss most callers. Here the function object stays what it is. What runs in the
end is the same code object as before, so what was compiled for it is used again.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, final

import torch

from qkeel.patching.compiler_state import compiler_loaded, run_uncompiled

# A global of the function's module as long as its code is exchanged: what the new code calls.
_NAME = "_qkeel_exchanged_"
_LOCK = threading.Lock()

Call = Callable[["ExchangedCode", list[Any], dict[str, Any]], Any]


@final
class ExchangedCode:
    """A function with other code, which passes its calls to `call(self, args, kwargs)`; `original` runs its own code.

    `uncompiled(function, *args)` calls a function so that torch's compiler takes no part in it.
    """

    def __init__(self, function: types.FunctionType, call: Call, codes: Iterable[types.CodeType]) -> None:
        self.function, self.code = function, function.__code__
        self.original = types.FunctionType(
            self.code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        self.uncompiled: Callable[..., Any] = _call
        self._holders = 0
        name = _NAME + function.__name__
        forward, enter = _forwarding(self.code, name), self._entrance(call)
        if compiler_loaded():
            # Called by a compiled wrapper, the compiler is to take up the function itself, not what stands before it.
            run_uncompiled(forward, enter.__code__, *codes)
            self.uncompiled = torch.compiler.disable(_call)
        function.__globals__[name] = enter
        vars(function)[_NAME] = self
        function.__code__ = forward

    def _entrance(self, call: Call) -> types.FunctionType:
        original = self.original

        def enter(args: list[Any], kwargs: dict[str, Any]) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            return call(self, args, kwargs)

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


def exchange(function: types.FunctionType, call: Call, codes: Iterable[types.CodeType]) -> ExchangedCode:
    """The function with its code exchanged; what it has already, if it is. To be given back by `release()`.

    Args:
        function: whose code is to be exchanged.
        call: gets its calls, unless an earlier one still does.
        codes: what `call` runs that torch's compiler must not compile.

    Raises:
        SyntaxError, TypeError, ValueError: its code has a form that is not foreseen.
    """
    with _LOCK:
        held: ExchangedCode = vars(function).get(_NAME) or ExchangedCode(function, call, codes)
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


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
