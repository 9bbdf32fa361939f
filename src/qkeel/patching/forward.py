"""How a module's forward is entered, exchanged and given back."""

from __future__ import annotations

import abc
import contextvars
import functools
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.nn.modules import module as calls

from qkeel.errors import caution
from qkeel.handle import Handle
from qkeel.patching.modes import (
    Guarded,
    ModuleTree,
    compiler_loaded,
    hooks_before,
    inferring_shapes,
    recomputing,
    run_uncompiled,
    running_frames,
    store_whole,
    store_without,
    uncompiled,
    unguarded,
)

# A Python function whose code object is exchanged, so that calls through every alias of it are seen.
#
# A function is imported by name into other modules and kept in attributes, closures, partials and `torch.compile`
# wrappers: replacing one attribute would miss most callers. Here the function object stays what it is. What runs in
# the end is the same code object as before, so what was compiled for it is used again.

# A global of the function's module as long as its code is exchanged: what the new code calls.
_NAME = "_qkeel_exchanged_"
_LOCK = threading.Lock()

CallArguments = tuple[list[Any], dict[str, Any]]  # by position and by name
# Arguments, what is to be closed when the call is over, what gets the result when it has returned, and what makes of
# that what the caller asked for, where it is something else.
Begun = tuple[CallArguments, ExitStack, Callable[[object], None], Callable[[object], object] | None]
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


# A replacement of one module's forward, kept as an attribute of the instance: torch.compile sees it come and go.
#
# Not a forward hook: code compiled before a hook was registered, or while it was there, does not notice that it came
# or went; an instance's own `forward` is guarded.

_FORWARD = "forward"


class InstanceForward(abc.ABC):
    """A callable in place of the forward of `module`. Copied and pickled with its module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: Callable[..., Any] | None = module.__dict__.get(_FORWARD)

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
    at = module.__dict__.get(_FORWARD)
    while isinstance(at, InstanceForward):
        yield at
        at = at.before


def put_in_place(new: InstanceForward) -> Handle:
    """Lets its module's calls go to it; the handle takes it out."""
    new.module.__dict__[_FORWARD] = new
    return Handle(lambda: take_out(new))


def take_out(old: InstanceForward) -> None:
    """Lets its module's forward be what it was before, from inside others if need be."""
    module = old.module
    outer = next((f for f in forwards_of(module) if f.before is old), None)
    if outer is not None:
        outer.before = old.before
    elif module.__dict__.get(_FORWARD) is old and old.before is not None:
        module.__dict__[_FORWARD] = old.before
    elif module.__dict__.get(_FORWARD) is old:
        del module.__dict__[_FORWARD]


# Hooks around the outermost call of a model, eager or compiled, that its copies and pickles leave behind.

_OVERLAP = (
    "several threads call {} at once: of passes that overlap, the one that began first is measured and the others are "
    "not. For numbers of every pass let one thread at a time call it, or watch a copy of the model for each thread"
)
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class ForwardPasses(Handle):
    """Calls `before(args, kwargs, compiled)` and `after(output, failed)` around each outermost call of `model`.

    Not around those that gradient checkpointing repeats in the backward pass, nor those by which a pipeline finds out
    shapes, nor those that overlap with one of another thread (a warning says so), nor those of a forked process, nor
    where a larger compiled function calls the model. What `before` and `after` raise never reaches the model's caller.

    Args:
        model: the user's own, or what torch.compile or DistributedDataParallel made of it.
        before: `compiled` says that the pass runs compiled code, which nothing may be put around: a mode would
            recompile it and change its numbers.
        after: `failed` says that the pass ended in an exception; after an interrupt that becomes known when the next
            pass begins, or at `remove()`.
        guard: calls them.
        owner: on whose behalf; see `owners`.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[Args, Kwargs, bool], None],
        after: Callable[[object, bool], None],
        *,
        guard: Guarded,
        owner: object = None,
    ) -> None:
        self.model, self.inner = model, unwrapped(model)
        self._before, self._after, self._guard = before, after, guard
        self._tree = ModuleTree(model)
        self._pid = os.getpid()
        self._depth = 0
        self._lock, self._warned = threading.Lock(), False  # of the two
        self._pass: _Running | None = None
        self.around = ExitStack()  # closed at the end of the pass that is under way, whatever fails
        # The hook runs as it is instead of being compiled away, and nothing that it calls is compiled.
        run_uncompiled(_DormantHook.__call__.__code__)
        enter, leave = (_DormantHook(f, owner) for f in (self._enter, self._leave))
        self._hooks = [
            model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(leave, always_call=True),
        ]
        store_without(model, _DormantHook)
        super().__init__(self._unhook)

    @property
    def busy(self) -> bool:
        """True if a pass of the model, or an extra one, is under way."""
        return self._depth > 0 or bool(_EXTRA.get())

    def _enter(self, module: nn.Module, args: Args, kwargs: Kwargs, compiled: bool) -> None:
        if module is not self.model or not self._here():
            return
        self._end_abandoned()
        if not self.active and not self._depth:
            self._unhook()
            return
        with self._lock:
            elsewhere = self._in_another_thread()
            if not elsewhere:
                self._depth += 1
                self._pass = self._pass or _Running()
        if elsewhere:
            self._tell_overlap()
        elif self._depth == 1:
            compiled = compiled or self._tree.any_compiled()
            self._guard(self._before, args, kwargs, compiled)

    def _in_another_thread(self) -> bool:
        """True if the pass that is under way is one of another thread."""
        return self._pass is not None and self._pass.thread != threading.get_ident()

    def _tell_overlap(self) -> None:
        if not self._warned:
            self._warned = True
            self._guard(caution, _OVERLAP.format(type(self.inner).__name__))

    def _leave(self, module: nn.Module, args: object, output: object, compiled: bool) -> None:
        if module is not self.model or not self._here() or not self._depth or self._in_another_thread():
            return
        if self._depth == 1:
            self._end(output, failed=self._pass is not None and self._pass.failing)
        else:
            self._depth -= 1

    def _end(self, output: object, *, failed: bool) -> None:
        try:
            self._guard(self.around.close)
            self._guard(self._after, output, failed)
        finally:  # an interrupt in one of them ends the pass as well
            with self._lock:
                self._depth, self._pass = 0, None
        # After a failure torch goes through the hooks themselves, not through a copy: they stay, idle, for now.
        if not self.active and not failed:
            self._unhook()

    def _end_abandoned(self) -> None:
        """An interrupt leaves a pass without calling its hooks."""
        if self._depth and self._pass is not None and self._pass.abandoned:
            self._end(None, failed=True)

    def _here(self) -> bool:
        return not recomputing() and not _EXTRA.get() and os.getpid() == self._pid and not inferring_shapes()

    def _unhook(self) -> None:
        # In the middle of a forward pass its end must still be seen; the hooks go then.
        self._end_abandoned()
        if not self._depth:
            for hook in self._hooks:
                hook.remove()
            store_whole(self.model)


@contextmanager
def extra_pass(owner: object) -> Iterator[None]:
    """While it lasts no pass is seen by anyone: it is an extra one, which `owner` makes to observe a model."""
    token = _EXTRA.set((*_EXTRA.get(), owner))
    try:
        yield
    finally:
        _EXTRA.reset(token)


def extra_of_another(owner: object) -> bool:
    """True if what runs now is an extra pass that somebody else makes."""
    return bool(_EXTRA.get()) and _EXTRA.get()[-1] is not owner


# Per thread: whose extra passes are under way.
_EXTRA: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar("qkeel_extra_passes", default=())


class _Running:
    """The call of a model that is under way: whether it still is, and whether it is being left by an exception."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.error = sys.exception()  # one that is being handled around the call
        # The innermost call of a module, without a call of Python's for each frame on the way.
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != calls.__file__:
            frame = frame.f_back
        self.frame = frame

    @property
    def failing(self) -> bool:
        """True if an exception is on its way out of it."""
        return sys.exception() not in (None, self.error)

    @property
    def abandoned(self) -> bool:
        """True if it is over, though nothing reported it."""
        return (
            self.frame is not None
            and self.thread == threading.get_ident()
            and not any(f is self.frame for f in running_frames())
        ) or self.thread not in sys._current_frames()


class _DormantHook:
    """A hook that does nothing inside compiled code, and that copies and pickles of a model leave behind."""

    def __init__(self, act: Any, owner: object) -> None:
        self.act, self.owner = act, owner
        self.uncompiled = torch.compiler.disable(act)

    def __call__(self, module: nn.Module, args: object, last: object) -> None:
        if torch.compiler.is_compiling():
            return
        # Read here and not in a function, whose frame torch's compiler would compile: whether it stands ready to.
        ready = torch._C._dynamo.eval_frame.get_eval_frame_callback()  # pyright: ignore[reportAttributeAccessIssue]
        if ready is None or ready is False:
            self.act(module, args, last, False)
        else:
            self.uncompiled(module, args, last, True)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return idle

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return get_idle, ()


def idle(*_: object) -> None:
    """A hook that does nothing: what copies and pickles of a model have in the place of qkeel's."""


def get_idle() -> Callable[..., None]:
    """Returns `idle`; a pickle refers to this function by its name."""
    return idle


@contextmanager
def joining(model: nn.Module, args: Args, kwargs: Kwargs) -> Iterator[None]:
    """ForwardPasses that are put on a model in here, where a pass of it begins, see this pass too: torch has made its
    list of hooks before."""
    known = set(hooks_before(model))
    yield
    for number, hook in list(hooks_before(model).items()):
        if number not in known and isinstance(hook, _DormantHook):
            hook(model, args, kwargs)


def owners(model: nn.Module) -> list[object]:
    """The owners of the ForwardPasses of this model, through a wrapper or not."""
    hooks = [h for m in {model, unwrapped(model)} for h in hooks_before(m).values()]
    return [h.owner for h in hooks if isinstance(h, _DormantHook)]


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile's, DistributedDataParallel's and DataParallel's wrappers."""
    while True:
        model = uncompiled(model)
        if not isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            return model
        model = model.module
