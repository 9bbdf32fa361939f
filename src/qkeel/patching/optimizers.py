"""Hooks on optimizer steps and on the creation of optimizers."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from qkeel.errors import InvalidTypeError
from qkeel.handle import Handle
from qkeel.patching.torch_state import running_frames

# Hooks on optimizer steps, and on the creation of optimizers, for which torch has no hook.

Act = Callable[[Optimizer], None]
# a parameter group: its weights and options, as torch stores them.
Group = dict[str, Any]


def listed(optimizer: object) -> list[Optimizer]:
    """Returns one optimizer or several as a list, and none as an empty one.

    Raises: InvalidTypeError if something else is given.
    """
    if optimizer is None:
        return []
    several: list[Any] = (
        list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    )
    if not several:
        raise InvalidTypeError("expected at least one optimizer, got an empty list")
    for i, entry in enumerate(several):
        inner: Any = entry
        # Fabric's wrapper is of the optimizer's class, and has the optimizer as a property; DeepSpeed's is no Optimizer.
        # Both hold groups of parameters, which a scheduler, that has an optimizer too, does not.
        while inner is not None and not _is_stepped(inner):
            has_groups = getattr(inner, "param_groups", None) is not None
            inner = getattr(inner, "optimizer", None) if has_groups else None
        if inner is None:
            # A class that was not called, a scheduler, or a wrapper that does not call Optimizer.__init__.
            what = (
                f"the class {entry.__name__}"
                if isinstance(entry, type)
                else type(entry).__name__
            )
            raise InvalidTypeError(
                f"expected a torch.optim.Optimizer or a list of them, got {what}; of a wrapper pass the optimizers inside"
            )
        several[i] = _stepped_within(inner)
    return several


def _stepped_within(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer inside another one of the same groups that a method besides `step` steps, as SAM's
    `second_step` does: a program may never call `step` of the outer one."""
    kinds = itertools.takewhile(
        lambda cls: cls is not Optimizer, type(optimizer).__mro__
    )
    methods = {
        k: inspect.unwrap(x)
        for cls in kinds
        for k, x in vars(cls).items()
        if callable(x)
    }
    codes = [getattr(x, "__code__", None) for k, x in methods.items() if k != "step"]
    if any(code is not None and "step" in code.co_names for code in codes):
        for inner in vars(optimizer).values():
            if isinstance(inner, Optimizer) and shares_groups(inner, optimizer):
                return inner
    return optimizer


def shares_groups(first: Optimizer, second: Optimizer) -> bool:
    """True if two optimizers hold the very same groups, as a wrapper and what it wraps do."""
    groups, others = first.param_groups, second.param_groups
    return [*map(id, groups)] == [*map(id, others)]


def _is_stepped(entry: object) -> bool:
    """True for an optimizer whose steps run torch's hooks, and for a wrapper that holds one."""
    return isinstance(entry, Optimizer) and (
        runs_step_hooks(entry) or isinstance(vars(entry).get("optimizer"), Optimizer)
    )


@final
class StepHooks(Handle):
    """Calls `before(optimizer)` and `after(optimizer)` around each step of one optimizer, or of all optimizers.

    `before` is called at the time described in `before_change`. If it is None, nothing is called before the step. Steps
    that only initialise the optimizer's state are skipped. Exceptions reach the caller of the step. Hooks cannot be
    removed while torch iterates over them, so during a step `remove()` only disables them, and a later `remove()`
    deletes them.
    """

    def __init__(
        self, before: Act | None, after: Act, optimizer: Optimizer | None = None
    ) -> None:
        register_before: Any = register_optimizer_step_pre_hook
        register_after: Any = register_optimizer_step_post_hook
        if optimizer is not None:
            register_before = optimizer.register_step_pre_hook
            register_after = optimizer.register_step_post_hook
        self._hooks: list[RemovableHandle] = []
        # Optimizer steps may be compiled; these hooks must not be compiled with them.
        if before is not None:
            pre: Any = torch.compiler.disable(before_change(self._acting(before)))
            self._hooks.append(register_before(pre))
        post: Any = torch.compiler.disable(self._acting(after))
        self._hooks.append(register_after(post))
        super().__init__(lambda: None)

    def remove(self) -> None:
        """Disables the hooks, and deletes them unless a step is running."""
        super().remove()
        if not stepping():
            for hook in self._hooks:
                hook.remove()

    def _acting(self, act: Act) -> Callable[..., None]:
        """Calls `act` in steps that train, until the hooks are removed."""
        return in_real_steps(
            lambda optimizer, *_: act(optimizer) if self.active else None
        )


def go_first(hook: RemovableHandle) -> None:
    """Moves a hook ahead of all other hooks of its kind."""
    hooks = hook.hooks_dict_ref()
    assert hooks is not None
    hooks.move_to_end(hook.id, last=False)


def is_last(hook: RemovableHandle) -> bool:
    """True if a hook may be removed inside its own call.

    While torch iterates over the OrderedDict of hooks, only its last item can be deleted without an error."""
    hooks = hook.hooks_dict_ref()
    return isinstance(hooks, OrderedDict) and next(reversed(hooks), None) == hook.id


def before_change(act: Act) -> Callable[..., Any]:
    """Returns an optimizer pre-hook that calls `act(optimizer)` before each step changes weights.

    In `step(closure)`, the call happens when the closure has returned for the first time, so that the closure has used
    the old weights and the gradients exist. Several such hooks keep their order.
    """

    def before(
        optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        # Args[0] is the optimizer.
        positional = args[1:2]
        closure = positional[0] if positional else kwargs.get("closure")
        if not callable(closure):
            act(optimizer)
            return None
        closure = _followed(closure, lambda: act(optimizer))
        return (
            ((args[0], closure, *args[2:]), kwargs)
            if positional
            else (args, {**kwargs, "closure": closure})
        )

    return before


def _followed(
    closure: Callable[[], object], act: Callable[[], None]
) -> Callable[[], object]:
    """Returns a closure that calls `act` after its first run."""
    called = False

    def follow() -> object:
        nonlocal called
        out, first = closure(), not called
        called = True
        if first:
            act()
        return out

    return follow


def steps_taken(optimizer: Optimizer) -> int:
    """Returns the number of steps in the optimizer's state, which a checkpoint may have set, or 0 if none is recorded.

    torch records 1 if it has only initialised the state for a checkpoint, so 1 counts as no step.
    """
    counts = [
        int(state["step"]) for state in optimizer.state.values() if "step" in state
    ]
    return n if (n := max(counts, default=0)) > 1 else 0


def when_hooks_are_done(optimizer: Optimizer, act: Act) -> Handle:
    """Calls `act(optimizer)` once, after all of the optimizer's own post-step hooks have run for the current step.

    Call this function from one of these hooks. `act` may then add and remove hooks of the optimizer, which torch
    forbids while it iterates over them. This is implemented by a global hook, which does not keep the optimizer alive.
    It is removed after its call, because torch disables its fast paths while a global hook is registered.
    """
    waiting, stepping_now = [act], weakref.ref(optimizer)

    def fire(stepped: Optimizer, *_: object) -> None:
        if stepped is stepping_now() and waiting:
            waiting.pop()(stepped)
            if is_last(registered):
                undo()

    post: Any = torch.compiler.disable(fire)
    registered = register_optimizer_step_post_hook(post)
    # Runs at most once.
    undo = weakref.finalize(optimizer, registered.remove)
    undo.atexit = False
    return Handle(undo)


def when_made(act: Act) -> Handle:
    """Calls `act(optimizer)` at the end of every `Optimizer.__init__`."""
    before: Any = Optimizer.__init__

    # Safe under torch.compile, since constructors of optimizers are not compiled.
    @functools.wraps(before)
    def made(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        if handle.active:
            act(self)

    def undo() -> None:
        # Under a later replacement, which calls this one, it stays and is idle.
        if Optimizer.__init__ is made:
            Optimizer.__init__ = before  # type: ignore[method-assign]

    handle = Handle(undo)
    Optimizer.__init__ = made  # type: ignore[method-assign]
    return handle


def runs_step_hooks(optimizer: Optimizer) -> bool:
    """True for torch optimizers. Wrappers that skip Optimizer.__init__ run no hooks."""
    return "_optimizer_step_post_hooks" in vars(optimizer)


def stepping() -> list[Optimizer]:
    """Returns the optimizers whose steps are running in this thread."""
    home = sys.modules[Optimizer.__module__].__file__
    callers = [
        frame.f_locals.get("self")
        for frame in running_frames()
        if frame.f_code.co_filename == home
    ]
    return [caller for caller in callers if isinstance(caller, Optimizer)]


def hooks_before_step(optimizer: Optimizer) -> dict[int, Callable[..., Any]]:
    """Returns the optimizer's own pre-hooks by their numbers."""
    return dict(optimizer._optimizer_step_pre_hooks)


_FILLS = ("torch.distributed.checkpoint.state_dict", "_init_optim_state")


def filling_state() -> bool:
    """True if the current step does not train but only initialises the optimizer's state.

    torch.distributed.checkpoint fills an empty state by taking a step with zero gradients and a learning rate of
    zero."""
    home = sys.modules.get(_FILLS[0])
    fills = None if home is None else vars(home).get(_FILLS[1])
    if fills is None:
        return False
    return any(frame.f_code is fills.__code__ for frame in running_frames())


def in_real_steps(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an optimizer hook so that it skips steps that only initialise the state."""

    @functools.wraps(hook)
    def act(*args: object) -> Any:
        return None if filling_state() else hook(*args)

    return act
