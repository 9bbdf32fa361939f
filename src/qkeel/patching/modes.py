"""Modes of torch: objects that see every torch function, or every operator, of a thread while they are entered."""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _pop_torch_function_stack,
    _push_mode,
    _push_on_torch_function_stack,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

from qkeel.patching.guard import Guarded, unguarded
from qkeel.patching.module_tables import put_hooks
from qkeel.patching.parallel_training import collective_of

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Operator = tuple[Function, Args, Kwargs, Any]  # one that ran, with its arguments and what came out

# Operators that are called otherwise in torch's Python functions.
_SAME = {"unsafe_view": "view", "to_copy": "to"}

INSIDE: Literal["inside"] = "inside"  # see FunctionMode.wanted

# What a tensor is asked about itself: nothing is computed, so nobody is asked whether to see it. Two calls of three.
_GETTERS = ("device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_nested", "is_quantized")
_GETTERS += ("is_sparse", "layout", "ndim", "requires_grad", "shape")
_METHODS = ("__len__", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "numel", "size")
_METHODS += ("storage_offset", "stride")
_ASKED = {getattr(Tensor, name).__get__ for name in _GETTERS} | {getattr(Tensor, name) for name in _METHODS}


class FunctionMode(TorchFunctionMode, abc.ABC):
    """A mode that sees calls of torch functions while it is entered, and leaves their results as they are.

    A call is made here, once, with the arguments that it has: `guard` is around what reads it, never around it.
    """

    def __init__(self, guard: Guarded = unguarded) -> None:
        super().__init__()
        self.guard = guard
        self.inside = 0  # calls under way that are wanted
        self.only: frozenset[Function] | None = None  # while it is set, no other function is of interest
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self.begin(undo)
            super().__enter__()
            undo.callback(super().__exit__, None, None, None)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def begin(self, undo: ExitStack) -> None:
        """Called before the mode is entered; `undo` is closed when it was left."""

    def __torch_function__(
        self, func: Function, types: object, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.only is not None and func not in self.only:
            return func(*args, **kwargs)
        if func in _ASKED:
            return func(*args, **kwargs)
        plain = self.guard is unguarded
        wanted = self.wanted(func, args, kwargs) if plain else self.guard(self.wanted, func, args, kwargs)
        if wanted is False or wanted is None:
            return func(*args, **kwargs)
        more = None
        self.inside += 1
        try:
            if isinstance(wanted, str):
                return func(*args, **kwargs)
            if wanted is True:
                out = func(*args, **kwargs)
            else:
                out, more = wanted()
        finally:
            self.inside -= 1
        self.guard(self.saw, func, args, kwargs, out, more)
        return out

    @abc.abstractmethod
    def wanted(self, function: Function, args: Args, kwargs: Kwargs) -> bool | str | Callable[[], tuple[Any, Any]]:
        """Returns whether `saw` is to get this call; or what computes it in its place, and something more for `saw`.
        INSIDE is a call that `saw` need not get, and of whose operators it need not either."""

    @abc.abstractmethod
    def saw(self, function: Function, args: Args, kwargs: Kwargs, out: Any, more: Any) -> None:
        """The call was made and returned `out`; `more` is None but for what was computed in its place."""


class OperatorMode(TorchDispatchMode):
    """A mode that sees every operator after it ran, also inside torch.jit.script, torch.func.vmap and compiled C++, and
    changes nothing.

    Args:
        read: gets the name, arguments and output of an operator; autograd records what is computed of it.
        wanted: whether `read` is to get the operator that has just run. It is asked before anything else is done.
        guard: calls `read`.
        keep: keep every operator in `operations`, and with it every tensor.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        read: Callable[[str, Args, Kwargs, Any], None] = lambda *_: None,
        guard: Guarded = unguarded,
        *,
        wanted: Callable[[], bool] = lambda: False,
        keep: bool = False,
    ) -> None:
        super().__init__()
        self.operations: list[Operator] = []
        self._read, self._guard, self._wanted, self._keep = read, guard, wanted, keep

    def __torch_dispatch__(
        self, func: Function, types: object, args: Args = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            out = func(*args, **kwargs)
            if self._keep:
                self.operations.append((func, args, kwargs, out))
            if self._wanted():
                # What is read of a call is one of the operators too: within its own callback no mode sees any.
                with _recording(), self if self._keep else nullcontext():
                    self._guard(self._read, function_name(func), args, kwargs, out)
        return out


@contextmanager
def no_operators_seen() -> Iterator[None]:
    """While it lasts an OperatorMode, where it is the innermost mode, sees nothing: gradients that are computed in the
    middle of a pass are no part of it."""
    if isinstance(_get_current_dispatch_mode(), OperatorMode):
        with _pop_mode_temporarily():
            yield
    else:
        yield


class CollectiveMode(TorchDispatchMode):
    """A mode that calls `before` with the processes and the name of every collective that is about to begin."""

    def __init__(self, before: Callable[[tuple[int, ...], str], None]) -> None:
        super().__init__()
        self._before = before

    def __torch_dispatch__(
        self, func: Function, types: tuple[type, ...], args: Args = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # what it does with its parts comes here again
        if (ranks := collective_of(func, args)) is not None:
            self._before(ranks, str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def _recording() -> Iterator[None]:
    """Lets autograd record as usual, which it does not under torch's functions: it has done its part there."""
    with torch._C._PreserveDispatchKeyGuard():
        torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality, False)
        yield


@functools.lru_cache(maxsize=1024)
def function_name(function: Function) -> str:
    """The name of a torch function or operator, without underscores around it and without its overload."""
    name = getattr(function, "__name__", "").partition(".")[0].strip("_")
    return _SAME.get(name, name) if isinstance(function, torch._ops.OpOverload) else name


@contextmanager
def suspended(functions: FunctionMode) -> Iterator[None]:
    """While it lasts this mode, where it is the innermost, sees nothing."""
    mine = _get_current_function_mode() is functions
    if mine:
        _pop_mode()
    try:
        yield
    finally:
        if mine:
            _push_mode(functions)


def leave(mode: FunctionMode) -> None:
    """Ends a mode that need not be the innermost: after an interrupt others may have been entered."""
    inner = []
    while _get_current_function_mode() not in (mode, None):
        inner.append(_pop_mode())
    try:
        if _get_current_function_mode() is mode:
            mode.__exit__(None, None, None)
    finally:
        for other in reversed(inner):
            _push_mode(other)


class ModeInModules:
    """A function mode that is entered in the calls of some modules only, each time that one begins, and left at its
    end.

    The rest of a pass runs as it does without a mode. The modules carry hooks from `attach` until its stack is closed;
    they act in the thread that attached them. Which functions are of interest in each module is set as the mode's
    `only`.

    Args:
        mode: what is entered; its `begin` is called by `attach`, once.
        modules: by name the module, and the functions that are of interest in it, None for all.
        before, after: called as a module's call begins and ends, with its name, the module and the call's arguments.
    """

    def __init__(
        self,
        mode: FunctionMode,
        modules: Mapping[str, tuple[torch.nn.Module, frozenset[Function] | None]],
        before: Callable[[str, torch.nn.Module, Args, Kwargs], None] = lambda *_: None,
        after: Callable[[torch.nn.Module], None] = lambda _: None,
    ) -> None:
        self._mode, self._modules, self._before, self._after = mode, modules, before, after
        self._entered: list[frozenset[Function] | None] = []  # the mode's `only` around each call that is under way
        self._thread = threading.get_ident()

    def attach(self, undo: ExitStack) -> None:
        """Hooks onto the modules until `undo` is closed."""
        self._mode.begin(undo)
        undo.callback(self._leave_all)
        tables = []
        undo.callback(lambda: [table.pop(self, None) for table in tables])
        for name, (module, only) in self._modules.items():
            before = functools.partial(self._enter, name, only)
            tables += put_hooks(module, self, before, self._exit)

    def _enter(
        self, name: str, only: frozenset[Function] | None, module: torch.nn.Module, args: Args, kwargs: Kwargs
    ) -> None:
        if threading.get_ident() != self._thread:
            return
        self._entered.append(self._mode.only)
        self._mode.only = only
        self._before(name, module, args, kwargs)
        _push_on_torch_function_stack(self._mode)

    def _exit(self, module: torch.nn.Module, args: object, output: object) -> None:
        if threading.get_ident() != self._thread or not self._entered:
            return
        if (top := _pop_torch_function_stack()) is not self._mode:  # somebody forgot to leave a mode of theirs
            _push_mode(top)
            _take_off(self._mode)
        self._mode.only = self._entered.pop()
        self._after(module)

    def _leave_all(self) -> None:
        """Where an interrupt has ended the pass, no hook was called."""
        while self._entered:
            _take_off(self._mode)
            self._mode.only = self._entered.pop()


def _take_off(mode: FunctionMode) -> None:
    """Takes a mode off the stack of modes, where it is the innermost but for those that somebody forgot to leave."""
    top = _pop_torch_function_stack() if _get_current_function_mode() is not None else None
    if top is mode or top is None:
        return
    _take_off(mode)
    _push_mode(top)
