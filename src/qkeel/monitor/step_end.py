"""The end of a step, whose numbers go to where all processes are merged, and of a training, measured once more."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qkeel import dist
from qkeel.errors import RefusedError, caution
from qkeel.monitor.cadence import MeasuredSteps
from qkeel.monitor.measure.watched_models import WatchedModels
from qkeel.monitor.processes.arrivals import Arrivals
from qkeel.monitor.processes.group import ProcessGroup
from qkeel.monitor.processes.transfer import Measurement, Stats, merged, on_host
from qkeel.patching.guard import Guard
from qkeel.patching.optimizer_hooks import StepHooks, stepping
from qkeel.sites.tap import Phase

NOT_SEEN = (
    "the optimizer stepped, but no forward pass of the watched model was seen. Call the model itself, model(...), not "
    "model.forward(...) nor one of its parts, and watch what you call: where that is what torch.compile returned, give "
    "watch() that; where a compiled function calls the model, give torch.compile the model instead"
)


@final
class StepEnd:
    """Takes the statistics of a step from the taps, adds the other numbers, and sends them on."""

    def __init__(self, steps: MeasuredSteps, models: WatchedModels, group: ProcessGroup, arrivals: Arrivals) -> None:
        self._steps, self._models, self._group, self._arrivals = steps, models, group, arrivals
        self._taken: dict[Phase, list[Stats]] = {"train": [], "eval": []}  # read before their step was over
        self.rate: Tensor | None = None  # of the step done last
        self._warned = False

    def take(self, phase: Phase) -> Stats:
        """The statistics of the step under way so far, on the CPU, for a reader; they count for the step as well."""
        recent = on_host(self._models.read(phase))
        if recent:
            self._taken[phase].append(recent)
        return self._group.placed(recent)

    def pass_over(self, phase: Phase) -> None:
        """Ends a step that is one forward pass of each model, where there is no optimizer."""
        self._close(phase, self._steps.rounds(phase) - 1, None, alone=True)

    def before(self, optimizer: Optimizer) -> None:
        """Called before each step of the optimizer."""
        if self._steps.step_due and not self._group.stopped:
            # By what the gradients are still multiplied: GradScaler leaves that to a fused optimizer.
            scale = vars(optimizer).get("grad_scale")
            self._models.before_step(scale if isinstance(scale, Tensor) else None)

    def after(self, optimizer: Optimizer) -> None:
        """Called after each step of the optimizer; of one that was skipped, what was measured counts for the next."""
        infinite = vars(optimizer).get("found_inf")  # GradScaler calls a fused optimizer all the same
        if isinstance(infinite, Tensor) and bool(infinite.any()):
            return
        due, begun = self._steps.step_due, self._group.gathers
        try:
            if not self._group.stopped:
                self.evaluated()
            now = _rate(optimizer)
            if due:
                if self._group.stopped:
                    self._group.leave(known=self._arrivals.flagged)
                else:
                    # The step before this one made the weights that this step's forward passes saw.
                    self._train_step(now if self.rate is None else self.rate)
            self.rate = now
        except Exception:
            if due and self._group.waited_for and self._group.gathers == begun:
                self._group.leave(known=False)  # the others wait in the gather of this step
            raise
        finally:
            self._steps.stepped()
        self._arrivals.settle(wait=False)

    def training_over(self) -> None:
        """Called after the last step, when the models were measured once more."""
        self._close("train", self._steps.done, self.rate, alone=False)

    def evaluated(self) -> None:
        """Ends the evaluation passes since the last step, if there were any."""
        if self._models.has("eval") or self._taken["eval"]:
            self._close("eval", self._steps.done, None, alone=True)

    def _train_step(self, rate: Tensor) -> None:
        if not self._steps.passed("train") and not self._warned:
            self._warned = True
            caution(NOT_SEEN)
        if self._models.has("train"):
            self._models.after_step()
        self._close("train", self._steps.done, rate, alone=False)

    def _close(self, phase: Phase, step: int, rate: Tensor | None, *, alone: bool) -> None:
        """Ends the phase; `alone`: it is recorded by this process only."""
        fresh, taken = self._models.read(phase), self._taken[phase]
        self._taken[phase] = []
        if taken:
            fresh = on_host(fresh)
        stats = merged([*taken, fresh])
        numbers = self._models.take(rate) if phase == "train" else {}
        if not alone:
            self._arrivals.settle(wait=self._group.several)  # a process that has stopped takes part in no gather
        transfer = self._group.send(Measurement(stats=stats, numbers=numbers) if stats else None, alone=alone)
        if transfer is not None:
            self._arrivals.add(step, phase, transfer, unread=self._group.placed(fresh) if taken else None)
            if phase == "train":
                self._steps.measured(step)
        self._arrivals.settle(wait=False)


def _rate(optimizer: Optimizer) -> Tensor:
    """The learning rate of the first group, as it is now."""
    rate = optimizer.param_groups[0]["lr"]
    return rate.detach().clone() if isinstance(rate, Tensor) else torch.tensor(rate, dtype=torch.float64)


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
