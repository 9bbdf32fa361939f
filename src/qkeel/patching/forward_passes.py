"""Hooks around the outermost call of a model, eager or compiled, that its copies and pickles leave behind."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as calls

from qkeel.errors import caution
from qkeel.handle import Handle
from qkeel.patching.compiler_state import (
    compiler_loaded,
    is_compiled,
    recomputing,
    run_uncompiled,
    running_frames,
    uncompiled,
)
from qkeel.patching.guard import Guarded
from qkeel.patching.module_tables import ModuleTree, hooks_before, store_whole, store_without
from qkeel.patching.parallel_training import inferring_shapes

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
        run_uncompiled(_Hook.__call__.__code__)
        enter, leave = (_Hook(torch.compiler.disable(f), owner) for f in (self._enter, self._leave))
        self._hooks = [
            model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
            model.register_forward_hook(leave, always_call=True),
        ]
        store_without(model, _Hook)
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
            compiled = compiled or self._tree.any_compiled() or any(map(is_compiled, self._wrappers()))
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

    def _wrappers(self) -> list[nn.Module]:
        """The modules of the model that torch.compile returned."""
        return [m for _, m in self._tree.of_kind(torch._dynamo.OptimizedModule)] if compiler_loaded() else []

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
        self.frame = next((f for f in running_frames() if f.f_code.co_filename == calls.__file__), None)

    @property
    def failing(self) -> bool:
        """True if an exception is on its way out of it."""
        return sys.exception() not in (None, self.error)

    @property
    def abandoned(self) -> bool:
        """True if it is over, though nobody said so."""
        return (
            self.frame is not None
            and self.thread == threading.get_ident()
            and not any(f is self.frame for f in running_frames())
        ) or self.thread not in sys._current_frames()


class _Hook:
    """A hook that does nothing inside compiled code, and that copies and pickles of a model leave behind."""

    def __init__(self, act: Any, owner: object) -> None:
        self.act, self.owner = act, owner

    def __call__(self, module: nn.Module, args: object, last: object) -> None:
        if torch.compiler.is_compiling():
            return
        # Read here and not in a function, whose frame torch's compiler would compile: whether it stands ready to.
        ready = torch._C._dynamo.eval_frame.get_eval_frame_callback()  # pyright: ignore[reportAttributeAccessIssue]
        self.act(module, args, last, ready is not None and ready is not False)

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
        if number not in known and isinstance(hook, _Hook):
            hook(model, args, kwargs)


def owners(model: nn.Module) -> list[object]:
    """The owners of the ForwardPasses of this model, through a wrapper or not."""
    hooks = [h for m in {model, unwrapped(model)} for h in hooks_before(m).values()]
    return [h.owner for h in hooks if isinstance(h, _Hook)]


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile's, DistributedDataParallel's and DataParallel's wrappers."""
    while True:
        model = uncompiled(model)
        if not isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            return model
        model = model.module
