"""Attention functions that are no torch functions, watched at their own door.

flex_attention and flash-attn's functions are plain Python: a torch function mode does not see them called. They are
imported by name into other modules and kept in attributes, closures, partials and `torch.compile` wrappers, so that
replacing one attribute would miss most callers. Here the function object stays what it is, and its code is exchanged
while someone watches: every alias passes the door. What runs behind it is the same code object as before, so what was
compiled for it is used again, neither recompiled nor traced through.
"""

from __future__ import annotations

import abc
import contextvars
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Names under which flash-attn, its Hopper version, the versions on the hub and wrappers around them offer it.
FLASH = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
)
_TORCH = (
    ("qkeel.ops", "run"),  # attention that a remedy put in the place of a model's own
    ("qkeel.ops", "run_with_weights"),
    ("torch.nn.attention.flex_attention", "flex_attention"),
    ("torch.nn.attention.varlen", "varlen_attn"),
)


class Watcher(TorchFunctionMode, abc.ABC):
    """Who is told of calls that pass a door. `probing`: it walks gradients from q and k."""

    probing: bool

    @abc.abstractmethod
    def passed(self, name: str, arguments: dict[str, Any]) -> None:
        """The function `name` was called with these arguments (all of them, by name) and has returned."""

    @abc.abstractmethod
    def missed(self, name: str, error: Exception) -> None:
        """The function `name` can't be watched."""

    @abc.abstractmethod
    def aside(self) -> AbstractContextManager[None]:
        """While it lasts the watcher's torch modes are off."""


# A private name of torch; tests/sites/test_forwards.py fails if it moves.
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)
# Per thread. Empty while a watched function runs: what it calls in turn is part of it.
_WATCHERS: contextvars.ContextVar[tuple[Watcher, ...]] = contextvars.ContextVar("qkeel_watchers", default=())
_LOCK = threading.Lock()


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """While it lasts `watcher` is told of this thread's calls. Functions of modules not yet imported are missed."""
    functions = list(_functions())
    with ExitStack() as undo:
        for function in functions:
            try:
                undo.callback(_leave, _open(function))
            except (SyntaxError, TypeError, ValueError) as error:  # code of an unforeseen form
                watcher.missed(function.__name__, error)
        _WATCHERS.set((*_WATCHERS.get(), watcher))
        undo.callback(lambda: _WATCHERS.set(tuple(w for w in _WATCHERS.get() if w is not watcher)))
        yield


def _functions() -> Iterator[types.FunctionType]:
    """Attention functions of modules that are loaded: one that is not, nobody can call."""
    seen: set[int] = set()
    places = [(sys.modules.get(home), name) for home, name in _TORCH]
    for home in [home for home in sys.modules if "flash_att" in home]:
        places += [(sys.modules.get(home), name) for name in FLASH]
    for module, name in places:
        function = None if module is None else vars(module).get(name)
        if isinstance(function, types.FunctionType) and id(function) not in seen:
            seen.add(id(function))
            yield function


def recomputing() -> bool:
    """Whether this runs inside a backward pass, where checkpointing computes a second time what was seen."""
    return _graph_task() != -1


# A global of a watched function's module, as long as it is watched: what its code calls then.
_NAME = "_qkeel_door_of_"


class _Door:
    """A function whose code is exchanged as long as somebody watches it."""

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function
        self.code = function.__code__
        self.inner = types.FunctionType(
            self.code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        self.inner.__kwdefaults__ = function.__kwdefaults__
        self.outside: Callable[..., Any] = _outside
        self.guests = 0
        name = _NAME + function.__name__
        hook, enter = _hook(self.code, name), self._entrance()
        if "torch._dynamo" in sys.modules:
            # Called by a compiled wrapper, the compiler is to take up the function itself, not the door before it.
            for code in (hook, enter.__code__, _Door.through.__code__, recomputing.__code__):
                torch._dynamo.eval_frame.skip_code(code)
            self.outside = torch.compiler.disable(_outside)
        function.__globals__[name] = enter
        vars(function)[_NAME] = self
        function.__code__ = hook

    def _entrance(self) -> types.FunctionType:
        inner, through = self.inner, self.through

        def enter(args: list[Any], kwargs: dict[str, Any]) -> Any:
            if torch.compiler.is_compiling():
                return inner(*args, **kwargs)
            return through(args, kwargs)

        return enter  # type: ignore[return-value]

    def close(self) -> None:
        """The function is as it was."""
        self.function.__code__ = self.code
        del self.function.__globals__[_NAME + self.function.__name__], vars(self.function)[_NAME]

    def through(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """One call."""
        watchers = _WATCHERS.get()
        if not watchers or recomputing():
            return self.inner(*args, **kwargs)
        undo = self.outside(_aside, watchers)
        try:
            given, named = self.outside(_as_taken, watchers, args, kwargs)
            out = self.inner(*given, **named)
        finally:
            self.outside(undo.close)
        self.outside(_tell, self.function, watchers, args, kwargs)
        return out


@functools.lru_cache(maxsize=32)
def _hook(code: types.CodeType, name: str) -> types.CodeType:
    """Code that takes the arguments that `code` takes and gives them to `name`."""
    n = code.co_argcount + code.co_kwonlyargcount
    first, named = code.co_varnames[: code.co_argcount], code.co_varnames[code.co_argcount : n]
    rest = list(code.co_varnames[n:])
    more = rest.pop(0) if code.co_flags & inspect.CO_VARARGS else ""
    others = rest.pop(0) if code.co_flags & inspect.CO_VARKEYWORDS else ""
    parameters = [*first, *([f"*{more}"] if more or named else []), *named, *([f"**{others}"] if others else [])]
    args = "".join(f"{x}, " for x in first) + (f"*{more}" if more else "")
    kwargs = ", ".join([*(f"{x!r}: {x}" for x in named), *([f"**{others}"] if others else [])])
    hook: Any = eval(f"lambda {', '.join(parameters)}: {name}([{args}], {{{kwargs}}})")
    return hook.__code__.replace(co_freevars=code.co_freevars, co_name=code.co_name)


def _open(function: types.FunctionType) -> _Door:
    with _LOCK:
        door: _Door = vars(function).get(_NAME) or _Door(function)
        door.guests += 1
        return door


def _leave(door: _Door) -> None:
    with _LOCK:
        door.guests -= 1
        if door.guests == 0:
            door.close()


def _outside(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _aside(watchers: tuple[Watcher, ...]) -> ExitStack:
    """Until it is closed, nobody watches what a watched function does inside."""
    with ExitStack() as undo:
        _WATCHERS.set(())
        undo.callback(_WATCHERS.set, watchers)
        for watcher in reversed(watchers):
            undo.enter_context(watcher.aside())
        return undo.pop_all()


def _as_taken(
    watchers: tuple[Watcher, ...], args: list[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments; without a graph in a probe: no walk goes through attention, and flex_attention on a CPU refuses
    inputs that need a gradient."""
    if not any(w.probing for w in watchers):
        return args, kwargs
    return [_detached(x) for x in args], {name: _detached(x) for name, x in kwargs.items()}


def _tell(function: types.FunctionType, watchers: tuple[Watcher, ...], args: list[Any], kwargs: dict[str, Any]) -> None:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    undo = _aside(watchers)
    with undo:
        for watcher in watchers:
            watcher.passed(function.__name__, bound.arguments)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
