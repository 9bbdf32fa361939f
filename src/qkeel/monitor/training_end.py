"""The end of a training whose last step nobody knew beforehand: the model that it left is measured once more."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import dist
from qkeel.errors import RefusedError
from qkeel.monitor.measure.watched_models import WatchedModels
from qkeel.monitor.measured_steps import MeasuredSteps
from qkeel.monitor.processes.group import ProcessGroup
from qkeel.monitor.step_end import StepEnd
from qkeel.patching.guard import Guard
from qkeel.patching.optimizer_hooks import StepHooks, stepping


@final
class TrainingEnd:
    """Measures the weights that the last step left, unless that step was measured or the record could be wrong.

    To tell these weights from others that took their place, such as a checkpoint or an average, the norm of one of them
    is taken after each step and after the optimizer's other hooks, which waits for no device.
    """

    def __init__(
        self,
        steps: MeasuredSteps,
        models: WatchedModels,
        group: ProcessGroup,
        step_end: StepEnd,
        optimizer: Optimizer | None,
        *,
        guard: Guard,
    ) -> None:
        self._steps, self._models, self._group, self._step_end = steps, models, group, step_end
        self._optimizer, self._guard = optimizer, guard
        self._asked: int | None = None  # the steps done when the end was asked for
        self._norm = torch.tensor(torch.nan)
        self.hooks: StepHooks | None = None
        if optimizer is not None and dist.world() == 1:
            note = functools.partial(guard, self._note)
            self.hooks = hooks = StepHooks(lambda _: hooks.come_last(), note, optimizer)

    def _note(self, optimizer: Optimizer) -> None:
        self._norm = _norm(optimizer)

    def skip(self) -> None:
        """The end is not asked for."""
        self._asked = self._steps.done

    def measure(self) -> None:
        """Measures the models as they are.

        Raises: RefusedError, see `Monitor.measure_end`.
        """
        self.skip()
        if not self._missing:
            return
        if dist.world() > 1 or self._group.members is not None:
            raise RefusedError(
                "several processes train, and a pass of one alone could wait for the others; a last step that is known "
                "beforehand is measured by planned=PlannedRates.of(rates) or measure_next()"
            )
        if self._optimizer is None or not self._steps.done or stepping():
            raise RefusedError("no finished step of an optimizer was seen")
        try:
            seen = self._models.look_again()
        except Exception as error:
            raise RefusedError(f"the model failed in one more pass: {type(error).__name__}: {error}") from error
        if not seen:
            raise RefusedError("no training pass with attention was seen")
        self._guard(self._step_end.training_over)

    def measure_or_tell(self, tell: Callable[[str], None]) -> None:
        """Measures the weights of the last step; where it can't, `tell` gets one sentence, once."""
        if self._asked == self._steps.done or self._optimizer is None or not self._missing:
            return
        last = self._steps.last
        try:
            if sys.exception() is not None:
                raise RefusedError("an exception is being handled")
            if self.hooks is not None and _changed(self._norm, _norm(self._optimizer)):
                raise RefusedError("its weights were changed after its last step, as by a checkpoint or an average")
            self.measure()
        except RefusedError as error:
            self.skip()
            if last is not None and dist.rank() == 0:
                name = type(self._models.whole).__name__
                tell(f"{name} is measured up to step {last:,} of {self._steps.done:,}: {error}")

    @property
    def _missing(self) -> bool:
        last = self._steps.last
        return last is None or last < self._steps.done - 1


def _norm(optimizer: Optimizer) -> Tensor:
    own = [p for group in optimizer.param_groups for p in group["params"] if type(p) is nn.Parameter]
    return torch.linalg.vector_norm(own[len(own) // 2].detach()) if own else torch.zeros(())


def _changed(before: Tensor, now: Tensor) -> bool:
    then, here = float(before), float(now)
    return here != then and not (here != here and then != then)
