"""Remedies that wait for the model's next forward pass, which shows its attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from qkeel.capture.example import ForwardArguments
from qkeel.errors import QkeelError, RefusedError
from qkeel.handle import Handle, State, compose
from qkeel.patching.forward import ForwardPasses, joining, unwrapped
from qkeel.patching.guards import unguarded
from qkeel.patching.optimizers import StepHooks, hooks_before_step, listed, stepping
from qkeel.remedies.apply_now import GIVE_BATCH, apply_now
from qkeel.remedies.base import Remedy
from qkeel.remedies.optimizer_trials import innermost
from qkeel.remedies.processes import check_wrapper
from qkeel.remedies.saved_state import release, reserve
from qkeel.remedies.step_remedy import StepRemedy


@final
class AtNextPass(Handle):
    """Remedies that are applied when the model's next forward pass begins, with that pass's arguments as the batch.

    If a remedy is refused, the error is raised in the call of the model, or passed to `refused` if that is given. begins:
    what the remedies begin with, as far as it knows their names.
    """

    def __init__(
        self,
        model: nn.Module,
        remedies: Sequence[Remedy],
        optimizer: Optimizer | Sequence[Optimizer] | None,
        *,
        train_length: int | None = None,
        partial: bool = False,
        refused: Callable[[QkeelError], None] | None = None,
        begins: State | None = None,
    ) -> None:
        check_wrapper(unwrapped(model), remedies)
        self.about = "+".join(parsed.name for parsed in remedies)
        self._model, self._optimizers = model, listed(optimizer)
        self._apply = functools.partial(
            apply_now,
            model,
            remedies,
            self._optimizers,
            train_length=train_length,
            partial=partial,
        )
        self._refused = refused
        #: Whether the model was not called since.
        self.waits = True
        self._with_state = [
            parsed.name
            for parsed in remedies
            if isinstance(parsed, StepRemedy) and parsed.saves_state
        ]
        #: A state that is loaded before the remedies are there.
        self._carried: State = {}
        self._begins = begins
        #: Why the search in the pass that is running failed; the pass may be about to fail by itself.
        self._failed: QkeelError | None = None
        self._passes = ForwardPasses(model, self._begin, self._end, guard=unguarded)
        self._steps = [
            StepHooks(self._before_step, lambda _: None, innermost(x))
            for x in self._optimizers
        ]
        #: Hooks of the remedies that the step which is running has missed.
        self._missed: dict[Optimizer, list[Callable[..., object]]] = {}
        self._with_states(reserve)
        super().__init__(
            self._withdraw,
            state=lambda: {**(begins or {}), **self._carried},
            load=self._carried.update,
        )

    def __repr__(self) -> str:
        return (
            f"<Handle of {self.about}: applied when the next pass begins>"
            if self.waits
            else super().__repr__().replace(type(self).__name__, Handle.__name__, 1)
        )

    def or_with(self, optimizer: Optimizer) -> None:
        """Adds another optimizer of the model, unless the remedies have already been applied."""
        if self.waits:
            self._optimizers.append(optimizer)
            self._with_states(reserve)

    def _begin(
        self, args: tuple[Any, ...], kwargs: Mapping[str, object], compiled: object
    ) -> None:
        if not self.waits:
            return
        # A pass inside `step(closure)`: torch has called the hooks of this step already.
        hooks = {optimizer: hooks_before_step(optimizer) for optimizer in stepping()}
        forward = vars(self._model).get("forward")
        batch = ForwardArguments(args, kwargs)
        try:
            with joining(self._model, args, kwargs):
                handle = self._apply(batch=batch)
            # The pass that runs now would not be the changed one.
            if vars(self._model).get("forward") is not forward:
                handle.remove()
                raise RefusedError(
                    f"{self.about} replaces the model's own forward, which is running now. "
                    f"{GIVE_BATCH.format(self.about)}"
                )
        except QkeelError as error:
            # Such an error is the model's own, and the pass that follows may raise it where the program expects it.
            cause = error.__cause__
            if isinstance(cause, Exception) and not isinstance(cause, QkeelError):
                self._failed = error
                return
            self._end_waiting(hooks)
            self._refuse(error)
            return
        self._end_waiting(hooks)
        if self._begins is not None:
            handle.load({**handle.state(), **self._begins})
        if self._carried:
            handle.load(self._carried)
        for optimizer, earlier in hooks.items():
            late = hooks_before_step(optimizer)
            self._missed[optimizer] = [late[key] for key in late if key not in earlier]
        # From here on, this handle is that of the applied remedies. Hooks cannot leave an optimizer during its step.
        self._undo = compose([*self._steps, handle]).remove
        self._state, self._load = handle.state, handle.load

    def _end(self, output: object, failed: bool) -> None:
        """Ends a pass in which the search failed: a program may expect the error of its own pass, such as one that
        looks for the largest batch that fits, and make another one. If the pass is fine, the remedies are refused."""
        error, self._failed = self._failed, None
        if error is not None and not failed:
            self._end_waiting({})
            self._refuse(error)

    def _refuse(self, error: QkeelError) -> None:
        self._with_states(release)
        if self._refused is None:
            raise error
        self._refused(error)

    def _end_waiting(self, hooks: Mapping[Optimizer, object]) -> None:
        self.waits = False
        self._passes.remove()
        # During a step torch iterates over its hooks, so `_before_step` removes them later.
        if not hooks:
            self._wait_no_more()

    def _before_step(self, optimizer: Optimizer) -> None:
        for hook in self._missed.pop(optimizer, ()):
            hook(optimizer, (optimizer,), {})
            self._wait_no_more()
        # A rate of 0 moves no weight: so do programs initialise the state for a checkpoint before they load it.
        if self.waits and any(group.get("lr", 1) for group in optimizer.param_groups):
            self.remove()
            self._refuse(
                RefusedError(
                    f"{self.about} was to be applied when {type(unwrapped(self._model)).__name__} was next called, but "
                    f"its optimizer took a step before that call. {GIVE_BATCH.format(self.about)}"
                )
            )

    def _with_states(self, act: Callable[[Optimizer, str], None]) -> None:
        """Calls `act` with each optimizer and the name of each remedy that has a state in checkpoints."""
        for optimizer in self._optimizers:
            for name in self._with_state:
                act(innermost(optimizer), name)

    def _withdraw(self) -> None:
        self._wait_no_more()
        self._with_states(release)

    def _wait_no_more(self) -> None:
        self.waits = False
        for hooks in (self._passes, *self._steps):
            hooks.remove()
