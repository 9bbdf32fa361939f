"""Replaces the code of functions and the forward of single modules, and hooks the outermost calls of a model."""

from __future__ import annotations

import abc
import contextvars
import dataclasses
import functools
import inspect
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as calls

from qkeel.errors import caution
from qkeel.handle import Handle
from qkeel.patching.modes import (
    Guarded,
    ModuleTree,
    Uncopied,
    compiler_loaded,
    fsdp1_kinds,
    hooks_before,
    inferring_shapes,
    outside_checkpoints,
    recomputing,
    run_uncompiled,
    running_frames,
    uncompiled,
    unguarded,
)

# Replaces the code object of a Python function, so that calls through any alias of it are intercepted.
#
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
            entrance = _entrance_of(function, begin)
            users.append(function.__code__)
            function.__globals__[key] = entrance.enter
            # The signature that callers inspect stays that of the function.
            function.__signature__ = entrance.signature  # type: ignore[attr-defined]
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Entrance:
    """What takes a function's place, and everything that it was made from."""

    source: tuple[object, ...]
    enter: Callable[..., Any]
    signature: inspect.Signature


# Every observed pass exchanges the same few functions, and making an entrance takes 30 µs.
_ENTRANCES: weakref.WeakKeyDictionary[types.FunctionType, _Entrance] = (
    weakref.WeakKeyDictionary()
)


def _entrance_of(function: types.FunctionType, begin: Begin) -> _Entrance:
    """Returns what takes a function's place; the same as before while nothing of the function has changed."""
    source = (
        *(function.__code__, function.__defaults__, function.__kwdefaults__),
        *(function.__closure__, begin, compiler_loaded()),
    )
    entrance = _ENTRANCES.get(function)
    if entrance is None or any(map(operator.is_not, entrance.source, source)):
        entrance = _Entrance(
            source, _entrance(function, begin), inspect.signature(function)
        )
        _ENTRANCES[function] = entrance
    return entrance


def _entrance(function: types.FunctionType, begin: Begin) -> Callable[..., Any]:
    """Returns what the new code of a function calls with the arguments as a tuple and a dict."""
    # A second function with the original code, since the code of the first one is about to be replaced.
    original = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    original.__kwdefaults__ = function.__kwdefaults__
    uncompiled: Any = unguarded
    if compiler_loaded():
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

    if compiler_loaded():
        # If a compiled wrapper calls the function, the compiler should trace the original code, not this entrance.
        run_uncompiled(_forwarding(_NAME + function.__name__, function.__code__))
        run_uncompiled(enter.__code__)
    return enter


@functools.lru_cache(maxsize=32)
def _forwarding(name: str, code: types.CodeType) -> types.CodeType:
    """Returns code that passes its arguments to the global `name`; `code` is what it takes the place of."""
    forward: types.FunctionType = eval(f"lambda *args, **kwargs: {name}(args, kwargs)")
    # Python accepts other code for a function only if it has as many free variables.
    return forward.__code__.replace(co_freevars=code.co_freevars, co_name=code.co_name)


# Replaces one module's forward by an attribute of the instance.
#
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


# Hooks around a model's outermost call, eager or compiled. Copies and pickles of the model do not include them.

_OVERLAP = (
    "several threads call {} at once, and of overlapping passes only the one that began first is measured. To measure "
    "every pass, let one thread at a time call it, or watch a copy of the model for each thread"
)
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def first_adapter(model: nn.Module) -> str | None:
    """Returns the name of the first layer of a model that peft has put an adapter on, or None if there is none."""
    for name, module in model.named_modules():
        is_of_peft = type(module).__module__.startswith("peft.")
        if is_of_peft and any(
            child == "base_layer" for child, _ in module.named_children()
        ):
            return name
    return None


class ForwardPasses(Handle):
    """Calls `before(args, kwargs, compiled)` and `after(output, failed)` around each outermost call of `model`.

    Some calls are skipped: those that gradient checkpointing repeats in the backward pass, those in which a pipeline
    infers shapes, those that overlap with a call in another thread (with a warning), those in a forked process, and
    those inside a larger compiled function. Both functions are called through `guard`, which decides whether their
    exceptions reach the model's caller.

    Args:
        model: the user's model, or the wrapper that torch.compile or DistributedDataParallel has put around it.
        before: called before the pass. `compiled()` is True if the pass runs compiled code. It must not enter a mode
            then, since a mode would make the code recompile and change its results.
        after: called after the pass. `failed` is True if the pass raised an exception. After an interrupt, `after` is
            called when the next pass begins or at `remove()`.
        guard: the guard that calls `before` and `after`.
        owner: the object for which the hooks were installed; see `owners`.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[Args, Kwargs, Callable[[], bool]], None],
        after: Callable[[object, bool], None],
        *,
        guard: Guarded,
        owner: object = None,
    ) -> None:
        self.model, self.inner = model, unwrapped(model)
        self._before, self._after, self._guard = before, after, guard
        self.tree = ModuleTree(model)
        self._pid = os.getpid()
        self._depth = 0
        # The lock guards _depth and _pass.
        self._lock, self._warned = (
            threading.Lock(),
            False,
        )
        self._pass: _Running | None = None
        # Closed at the end of the current pass, even if it fails.
        self.around = ExitStack()
        self.repeated: Callable[[], None] | None = (
            None  # called when a checkpoint repeats a call, with gradients
        )
        enter, leave = (DormantHook(f, owner) for f in (self._enter, self._leave))
        self._hooks = [
            model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(leave, always_call=True),
        ]
        super().__init__(self._unhook)

    def remove(self) -> None:
        """Removes the hooks, or disables them while a pass runs; a later call removes those of a pass that failed."""
        super().remove()
        self._unhook()

    @property
    def busy(self) -> bool:
        """True if a pass of the model, or an extra pass, is running."""
        return self._depth > 0 or bool(_EXTRA.get())

    def _enter(
        self, module: nn.Module, args: Args, kwargs: Kwargs, compiled: bool
    ) -> None:
        if (
            module is self.model
            and self.repeated is not None
            and recomputing()
            and torch.is_grad_enabled()
        ):
            self._guard(self.repeated)
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
        if elsewhere and not self._warned:
            self._warned = True
            self._guard(caution, _OVERLAP.format(type(self.inner).__name__))
        elif not elsewhere and self._depth == 1:
            self.tree.settle()
            is_compiled = lambda: compiled or self.tree.any_compiled()  # noqa: E731
            try:
                # The pass may run inside one, and `before` may make extra passes.
                with outside_checkpoints():
                    self._guard(self._before, args, kwargs, is_compiled)
            finally:
                self.tree.unsettle()

    def _in_another_thread(self) -> bool:
        """True if the running pass belongs to another thread."""
        return self._pass is not None and self._pass.thread != threading.get_ident()

    def _leave(
        self, module: nn.Module, args: object, output: object, compiled: bool
    ) -> None:
        if (
            module is not self.model
            or not self._here()
            or not self._depth
            or self._in_another_thread()
        ):
            return
        if self._depth == 1:
            # Torch calls this hook without an output if the call raised an exception.
            self._end(output, failed=output is None and sys.exception() is not None)
        else:
            self._depth -= 1

    def _end(self, output: object, *, failed: bool) -> None:
        try:
            self._guard(self.around.close)
            self._guard(self._after, output, failed)
        finally:  # also after an interrupt in one of them
            with self._lock:
                self._depth, self._pass = 0, None
        # After a failure torch iterates over the hooks themselves, not over a copy, so for now they stay, but disabled.
        if not self.active and not failed:
            self._unhook()

    def _end_abandoned(self) -> None:
        """Ends a pass that an interrupt has aborted without calling its hooks."""
        if self._depth and self._pass is not None and self._pass.abandoned:
            self._end(None, failed=True)

    def _here(self) -> bool:
        return (
            not recomputing()
            and not _EXTRA.get()
            and os.getpid() == self._pid
            and not inferring_shapes()
        )

    def _unhook(self) -> None:
        # A running pass still needs the hook at its end, which then removes all hooks.
        self._end_abandoned()
        if not self._depth:
            for hook in self._hooks:
                hook.remove()


@contextmanager
def extra_pass(owner: object) -> Iterator[None]:
    """Hides the passes in this context from all ForwardPasses.

    They are extra passes, which `owner` makes to observe a model."""
    token = _EXTRA.set((*_EXTRA.get(), owner))
    try:
        yield
    finally:
        _EXTRA.reset(token)


def in_extra_pass() -> bool:
    """True if this thread runs an extra pass: what happens in it is not the user's training."""
    return bool(_EXTRA.get())


def extra_of_another(owner: object) -> bool:
    """True if the current pass is an extra pass made by a different owner."""
    return bool(_EXTRA.get()) and _EXTRA.get()[-1] is not owner


# Per thread: the owners of the extra passes that are running.
_EXTRA: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar(
    "qkeel_extra_passes", default=()
)


class _Running:
    """The running call of a model."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        # The frame of the innermost running call of a module. This loop needs no Python call per frame.
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != calls.__file__:
            frame = frame.f_back
        self.frame = frame

    @property
    def abandoned(self) -> bool:
        """True if the call has ended without its end hook."""
        return (
            self.frame is not None
            and self.thread == threading.get_ident()
            and not any(f is self.frame for f in running_frames())
            # A thread that has ended runs nothing.
        ) or self.thread not in sys._current_frames()


_REMOVED = object()


class DormantHook(Uncopied):
    """A hook that does nothing inside compiled code, and that is dropped from copies and pickles of a model."""

    def __init__(self, act: Any, owner: object = None) -> None:
        self.act, self.owner = act, owner
        self.uncompiled: Any = torch.compiler.disable(act)
        # Keeps the compiler from inlining the hook and from compiling what it calls.
        run_uncompiled(DormantHook.__call__.__code__)

    def __call__(
        self, module: nn.Module, args: object, last: object = _REMOVED
    ) -> None:
        # A hook that an earlier hook of the same call has removed is still called, but no longer with the keywords.
        if torch.compiler.is_compiling() or last is _REMOVED:
            return
        # Whether the compiler is about to compile this call. This is inlined, because torch.compile would compile the
        # frame of a function.
        ready = torch._C._dynamo.eval_frame.get_eval_frame_callback()  # pyright: ignore[reportAttributeAccessIssue]
        if ready is None or ready is False:
            self.act(module, args, last, False)
        else:
            self.uncompiled(module, args, last, True)


@contextmanager
def joining(model: nn.Module, args: Args, kwargs: Kwargs) -> Iterator[None]:
    """Makes ForwardPasses that are installed in this context, while a pass of the model begins, observe that pass too.

    Otherwise they would miss it, since torch has already made its list of hooks by then."""
    known = set(hooks_before(model))
    yield
    for number, hook in list(hooks_before(model).items()):
        if number not in known and isinstance(hook, DormantHook):
            hook(model, args, kwargs)


def owners(model: nn.Module) -> list[object]:
    """Returns the owners of a model's ForwardPasses, including those on the model inside its wrappers."""
    hooks = [h for m in {model, unwrapped(model)} for h in hooks_before(m).values()]
    return [h.owner for h in hooks if isinstance(h, DormantHook)]


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the user's module inside the wrappers of torch.compile, DistributedDataParallel, DataParallel and
    FullyShardedDataParallel."""
    kinds = nn.parallel.DistributedDataParallel, nn.DataParallel, *fsdp1_kinds()
    while True:
        model = uncompiled(model)
        if not isinstance(model, kinds):
            return model
        model = model.module  # pyright: ignore[reportAssignmentType]
