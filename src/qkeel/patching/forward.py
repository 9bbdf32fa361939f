"""Hooks around a model's outermost call, and passes that qkeel makes beside the program's own."""

from __future__ import annotations

import contextvars
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as calls

from qkeel.errors import caution
from qkeel.handle import Handle
from qkeel.patching.guards import Guarded, Uncopied
from qkeel.patching.modes import outside_checkpoints
from qkeel.patching.module_tables import ModuleTree, hooks_before
from qkeel.patching.sharded_models import fsdp1_kinds, inferring_shapes
from qkeel.patching.torch_state import (
    recomputing,
    run_uncompiled,
    running_frames,
    uncompiled,
)

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
    infers shapes, those that overlap with a call in another thread (with a warning), and those inside a larger compiled
    function. Both functions are called through `guard`, which decides whether their
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
        self._depth = 0
        # The lock guards _depth and _pass.
        self._lock, self._warned = (
            threading.Lock(),
            False,
        )
        self._pass: _Running | None = None
        # Closed at the end of the current pass, even if it fails.
        self.around = ExitStack()
        # Called when a checkpoint repeats a call, with gradients
        self.repeated: Callable[[], None] | None = None
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
                # The pass may run inside a gradient checkpoint, which would count the tensors of the extra passes that
                # `before` may make.
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
        return not recomputing() and not _EXTRA.get() and not inferring_shapes()

    def _unhook(self) -> None:
        self._end_abandoned()
        # A running pass still needs the hook at its end, which then removes all hooks.
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
        # A thread that has ended runs nothing.
        return (
            self.frame is not None
            and self.thread == threading.get_ident()
            and not any(f is self.frame for f in running_frames())
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
