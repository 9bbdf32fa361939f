"""Remedies that wait for the model's next forward pass, which shows its attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from qkeel.capture.example import ForwardArguments
from qkeel.errors import QkeelError, RefusedError
from qkeel.handle import Handle, State
from qkeel.patching.forward import ForwardPasses, joining, unwrapped
from qkeel.patching.modes import unguarded
from qkeel.patching.optimizers import StepHooks, listed
from qkeel.remedies.apply_now import GIVE_BATCH, Asked, apply_now
from qkeel.remedies.optimizer_trials import innermost
from qkeel.remedies.processes import (
    check_wrapper,
)
from qkeel.remedies.table import RemedySpec, parse


@final
class AtNextPass(Handle):
    """Remedies that are applied when the model's next forward pass begins, with that pass's arguments as the batch.

    If a remedy is refused, the error is raised in the call of the model, or passed to `refused` if that is given.
    """

    def __init__(
        self,
        model: nn.Module,
        remedy: RemedySpec,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        more: Asked,
        *,
        refused: Callable[[QkeelError], None] | None = None,
    ) -> None:
        remedies = parse(remedy, **more.options)
        check_wrapper(unwrapped(model), remedies)
        self.about = "+".join(parsed.name for parsed in remedies)
        self._remedy, self._model, self._more = remedy, model, more
        self._refused = refused
        self._inner: Handle | None = None
        self._carried: State | None = None
        self._passes = ForwardPasses(
            model, self._begin, lambda *_: None, guard=unguarded
        )
        self._optimizers = listed(optimizer)
        self._steps = [
            StepHooks(self._refuse_step, lambda _: None, innermost(x))
            for x in self._optimizers
        ]
        super().__init__(self._take_off, state=self._own_state, load=self._take_state)

    def __repr__(self) -> str:
        waits = self.active and self._inner is None
        return (
            f"<Handle of {self.about}: applied when the next pass begins>"
            if waits
            else super().__repr__()
        )

    def or_with(self, optimizer: Optimizer) -> None:
        """Adds another optimizer of the model, unless the remedies have already been applied."""
        if self._inner is None and self.active:
            self._optimizers.append(optimizer)

    def _begin(
        self, args: tuple[Any, ...], kwargs: Mapping[str, object], compiled: bool
    ) -> None:
        if not self.active or self._inner is not None:
            return
        self._wait_no_more()
        try:
            with joining(self._model, args, kwargs):
                self._inner = self._applied(ForwardArguments(args, kwargs))
        except QkeelError as error:
            if self._refused is None:
                raise
            self._refused(error)
            return
        if self._carried:  # a state from before the first pass is empty
            self._inner.load(self._carried)

    def _applied(self, batch: ForwardArguments) -> Handle:
        forward = vars(self._model).get("forward")
        handle = apply_now(
            self._model, self._remedy, self._optimizers, self._more, batch=batch
        )
        if vars(self._model).get("forward") is not forward:
            handle.remove()
            raise RefusedError(
                f"{self.about} replaces the model's own forward, which is running now. {GIVE_BATCH.format(self.about)}"
            )
        return handle

    def _refuse_step(self, optimizer: Optimizer) -> None:
        if self.active and self._inner is None and self._passes.active:
            self.remove()
            raise RefusedError(
                f"{self.about} was to be applied when {type(unwrapped(self._model)).__name__} was next called, but "
                f"its optimizer took a step before that call. {GIVE_BATCH.format(self.about)}"
            )

    def _wait_no_more(self) -> None:
        self._passes.remove()
        for hooks in self._steps:
            hooks.remove()

    def _take_off(self) -> None:
        self._wait_no_more()
        if self._inner is not None:
            self._inner.remove()

    def _own_state(self) -> State:
        return (
            self._inner.state()
            if self._inner is not None
            else dict(self._carried or {})
        )

    def _take_state(self, state: State) -> None:
        if self._inner is not None:
            self._inner.load(state)
        else:
            self._carried = dict(state)
