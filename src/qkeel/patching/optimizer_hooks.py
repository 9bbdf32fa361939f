"""Hooks on the steps of optimizers, and on their making, for which torch has no hook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from qkeel.handle import Handle
from qkeel.patching.compiler_state import running_frames

Act = Callable[[Optimizer], None]


@final
class StepHooks(Handle):
    """Calls `before(optimizer)` and `after(optimizer)` around each step of an optimizer, or of all of them.

    `before` is called as by `before_change`. What they raise reaches the step's caller. In the middle of a step its
    hooks are being gone through and can't be taken away: `remove()` leaves them, idle, and a later one takes them.
    """

    def __init__(self, before: Act, after: Act, optimizer: Optimizer | None = None) -> None:
        # Some compile the optimizer's step; nothing of these is to be compiled with it.
        pre: Any
        post: Any
        idle = self._idle_once_removed
        pre, post = (torch.compiler.disable(hook) for hook in (before_change(idle(before)), idle(after)))
        if optimizer is None:
            self._hooks = [register_optimizer_step_pre_hook(pre), register_optimizer_step_post_hook(post)]
        else:
            self._hooks = [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]
        super().__init__(lambda: None)

    def remove(self) -> None:
        """See the class."""
        super().remove()
        if not stepping():
            for hook in self._hooks:
                hook.remove()

    def come_first(self) -> None:
        """`after` is called before other hooks behind the step that there are now."""
        go_first(self._hooks[1])

    def come_last(self) -> None:
        """`after` is called after other hooks behind the step that there are now; not to be called by one of these."""
        _move(self._hooks[1], last=True)

    def _idle_once_removed(self, act: Act) -> Callable[..., None]:
        return lambda optimizer, *_: act(optimizer) if self.active else None


def go_first(hook: RemovableHandle) -> None:
    """Has torch call a hook before all others of its kind that there are now."""
    _move(hook, last=False)


def _move(hook: RemovableHandle, *, last: bool) -> None:
    hooks = hook.hooks_dict_ref()
    assert hooks is not None
    hooks.move_to_end(hook.id, last=last)


def before_change(act: Act) -> Callable[..., Any]:
    """A hook on an optimizer that calls `act(optimizer)` before each step changes weights.

    Of a step that computes its gradients itself, `step(closure)`, that is when the closure has returned for the first
    time: it has seen the weights as they were, and the gradients are there. Several such hooks keep their order.
    """

    def before(optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        given = args[1:2]  # the first is the optimizer
        closure = given[0] if given else kwargs.get("closure")
        if not callable(closure):
            act(optimizer)
            return None
        closure = _followed(closure, lambda: act(optimizer))
        return ((args[0], closure, *args[2:]), kwargs) if given else (args, {**kwargs, "closure": closure})

    return before


def _followed(closure: Callable[[], object], act: Callable[[], None]) -> Callable[[], object]:
    """The closure, followed by `act` the first time."""
    called = False

    def follow() -> object:
        nonlocal called
        out, first = closure(), not called
        called = True
        if first:
            act()
        return out

    return follow


def when_hooks_are_done(optimizer: Optimizer, act: Act) -> Handle:
    """Calls `act(optimizer)` once, when the optimizer's own hooks after the step under way have all been called.

    To be called by one of these hooks. Then hooks may be put on the optimizer and taken off, which torch does not allow
    while it goes through them. The handle is to be removed later, by such a hook or outside of steps.
    """
    waiting = [act]

    def fire(stepped: Optimizer, *_: object) -> None:
        if stepped is optimizer and waiting:
            waiting.pop()(optimizer)

    post: Any = torch.compiler.disable(fire)
    return Handle(register_optimizer_step_post_hook(post).remove)


def when_made(act: Act) -> Handle:
    """Calls `act(optimizer)` at the end of every `Optimizer.__init__`."""
    before = Optimizer.__init__

    def made(self: Optimizer, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        before(self, params, defaults)
        act(self)

    def undo() -> None:
        Optimizer.__init__ = before

    # Nobody compiles the making of an optimizer.
    Optimizer.__init__ = made
    return Handle(undo)


def runs_step_hooks(optimizer: Optimizer) -> bool:
    """True if it is an optimizer of torch's and not a wrapper that forgot to be one: those run no hooks."""
    return "_optimizer_step_post_hooks" in vars(optimizer)


def stepping() -> bool:
    """True if an optimizer's step is under way in this thread."""
    home = sys.modules[Optimizer.__module__].__file__
    return any(frame.f_code.co_filename == home for frame in running_frames())
