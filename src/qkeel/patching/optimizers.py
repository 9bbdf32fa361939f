"""Hooks of optimizers, and torch's grouping of the tensors that Adam steps."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from qkeel.handle import Handle
from qkeel.patching.modes import running_frames

# Hooks on the steps of optimizers, and on their making, for which torch has no hook.

Act = Callable[[Optimizer], None]


@final
class StepHooks(Handle):
    """Calls `before(optimizer)` and `after(optimizer)` around each step of an optimizer, or of all of them.

    `before` is called as by `before_change`; neither is called in a step that only fills the optimizer's state. What
    they raise reaches the step's caller. In the middle of a step its hooks are being gone through and can't be taken
    away: `remove()` leaves them, idle, and a later one takes them.
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
        return lambda optimizer, *_: (
            act(optimizer) if self.active and not (_FILLS[0] in sys.modules and filling_state()) else None
        )


def go_first(hook: RemovableHandle) -> None:
    """Has torch call a hook before all others of its kind that there are now."""
    _move(hook, last=False)


def is_last(hook: RemovableHandle) -> bool:
    """Returns whether a hook may be removed in its own call: torch goes through an OrderedDict, which lets its last
    item go and raises an error for any other."""
    hooks = hook.hooks_dict_ref()
    return isinstance(hooks, OrderedDict) and next(reversed(hooks), None) == hook.id


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

    To be called by one of these hooks. Then hooks may be added to the optimizer and removed, which torch forbids
    while it goes through them. The hook is one of every optimizer: it keeps none alive and is removed once called,
    because torch's fast paths step aside wherever such a hook is registered.
    """
    waiting, stepping_now = [act], weakref.ref(optimizer)

    def fire(stepped: Optimizer, *_: object) -> None:
        if stepped is stepping_now() and waiting:
            waiting.pop()(stepped)
            if is_last(registered):
                undo()

    post: Any = torch.compiler.disable(fire)
    registered = register_optimizer_step_post_hook(post)
    undo = weakref.finalize(optimizer, registered.remove)  # called at most once, and forgotten then
    undo.atexit = False
    return Handle(undo)


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


_FILLS = ("torch.distributed.checkpoint.state_dict", "_init_optim_state")


def filling_state() -> bool:
    """Returns whether the step under way is none of training: torch.distributed.checkpoint fills the state of an
    optimizer that has none by a step with gradients of zero and a rate of zero."""
    home = sys.modules.get(_FILLS[0])
    fills = None if home is None else vars(home).get(_FILLS[1])
    if fills is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not fills.__code__:  # no generator: each step comes here
        frame = frame.f_back
    return frame is not None


def in_real_steps(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook on an optimizer's steps that does nothing in one that only fills its state."""
    return functools.wraps(hook)(lambda *args: None if _FILLS[0] in sys.modules and filling_state() else hook(*args))


# The weights that a step of torch's Adam or AdamW works on: asked for, or answered otherwise.
#
# Inside `optimizer.step()` torch calls `_init_group` for each parameter group; it fills lists of the weights that
# have a gradient, of their gradients and of their state. An answer of our own may take weights out that are stepped
# elsewhere.

# A parameter group: its weights and their options, as torch keeps them.
Group = dict[str, Any]
Answer = Callable[..., bool]

_ARGUMENTS = (
    *("self", "group", "params_with_grad", "grads"),
    *("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"),
)


def is_known(optimizer: Optimizer) -> bool:
    """True if it is torch's own Adam or AdamW, of a torch whose step asks what this module answers."""
    return type(optimizer) in (Adam, AdamW) and tuple(inspect.signature(Adam._init_group).parameters) == _ARGUMENTS


def is_answered(optimizer: Optimizer) -> bool:
    """True if another answer than torch's is in place."""
    return "_init_group" in vars(optimizer)


def put_answer(optimizer: Optimizer, answer: Answer) -> None:
    """Let the optimizer's steps ask `answer`, which takes a group and the lists to fill."""
    vars(optimizer)["_init_group"] = answer


def take_answer_back(optimizer: Optimizer, answer: Answer) -> None:
    """Let the optimizer's steps ask torch again, where this answer is in place."""
    if vars(optimizer).get("_init_group") is answer:
        del vars(optimizer)["_init_group"]


def torchs_answer(optimizer: Optimizer, group: Group, lists: Sequence[list[Tensor]]) -> bool:
    """Fill the lists of a group as torch does; whether a weight is complex."""
    return type(optimizer)._init_group(optimizer, group, *lists)  # type: ignore[attr-defined]


def stepped(optimizer: Optimizer) -> set[int]:
    """The ids of the weights that the optimizer's step would step now, by the answer in place."""
    found: set[int] = set()
    for group in optimizer.param_groups:
        lists: list[list[Tensor]] = [[] for _ in _ARGUMENTS[2:]]
        optimizer._init_group(group, *lists)  # type: ignore[attr-defined]
        found.update(map(id, lists[0]))
    return found


def is_fused(group: Group) -> bool:
    """True if a group's step is the fused one, in its usual form."""
    return group.get("fused") is True and not group.get("capturable") and not group.get("differentiable")


def has_hooks_before(optimizer: Optimizer) -> bool:
    """True if hooks of its own come before the optimizer's step."""
    return bool(optimizer._optimizer_step_pre_hooks)


def call_hooks_before(optimizer: Optimizer) -> None:
    """Call the optimizer's own hooks before a step, as its step does."""
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        hook(optimizer, (), {})


def call_hooks_after(optimizer: Optimizer) -> None:
    """Call the optimizer's own hooks after a step, as its step does."""
    for hook in list(optimizer._optimizer_step_post_hooks.values()):
        hook(optimizer, (), {})


def every_optimizer_has_hooks() -> bool:
    """True if hooks are registered that torch calls around the step of every optimizer."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
