"""The end of a step: what was measured in it goes to where all processes are merged and recorded."""

from __future__ import annotations

from typing import final

from torch import Tensor

from qkeel.errors import caution
from qkeel.monitor.measure.step_numbers import StepNumbers
from qkeel.monitor.measured_steps import MeasuredSteps
from qkeel.monitor.optimizer_steps import NOT_SEEN, Steps
from qkeel.monitor.processes.arrivals import Arrivals
from qkeel.monitor.processes.group import ProcessGroup
from qkeel.monitor.processes.transfer import Measurement, Stats, merged, on_host
from qkeel.sites.tap import Phase, Tap


@final
class StepEnd:
    """Takes the statistics of a step from the tap, adds the other numbers, and sends them on."""

    def __init__(
        self, steps: MeasuredSteps, tap: Tap, numbers: StepNumbers, group: ProcessGroup, arrivals: Arrivals
    ) -> None:
        self._steps, self._tap, self._numbers, self._group, self._arrivals = steps, tap, numbers, group, arrivals
        self._taken: dict[Phase, list[Stats]] = {"train": [], "eval": []}  # read before their step was over
        self._warned = False

    def take(self, phase: Phase) -> Stats:
        """The statistics of the step under way so far, on the CPU, for a reader; they count for the step as well."""
        recent = on_host(self._tap.read(phase))
        if recent:
            self._taken[phase].append(recent)
        return recent

    def pass_over(self, phase: Phase) -> None:
        """Ends a step that is one forward pass, where there is no optimizer."""
        self._close(phase, self._steps.passes[phase] - 1, None, alone=True)

    def before(self, hooks: Steps) -> None:
        """Called before each step of the optimizer."""
        if self._steps.step_due:
            self._numbers.before(hooks.gradient_scale, measuring=self._tap.active)

    def after(self, hooks: Steps) -> None:
        """Called after each step of the optimizer; of one that was skipped, what was measured counts for the next."""
        if hooks.skipped:
            return
        if not self._group.stopped:
            self.evaluated()
        if self._steps.step_due:
            if self._group.stopped:
                self._group.leave(self._steps.done, known=self._arrivals.flagged)
            else:
                self._train_step(hooks.rate)
        self._steps.stepped()
        hooks.taken()
        self._arrivals.settle(wait=False)

    def evaluated(self) -> None:
        """Ends the evaluation passes since the last step, if there were any."""
        if self._tap.has("eval") or self._taken["eval"]:
            self._close("eval", self._steps.done, None, alone=True)

    def _train_step(self, rate: Tensor) -> None:
        if not self._steps.passes["train"] and not self._warned:
            self._warned = True
            caution(NOT_SEEN)
        if self._tap.has("train"):
            self._numbers.after()
        self._close("train", self._steps.done, rate, alone=False)

    def _close(self, phase: Phase, step: int, rate: Tensor | None, *, alone: bool) -> None:
        """Ends the phase; `alone`: it is recorded by this process only."""
        fresh, taken = self._tap.read(phase), self._taken[phase]
        self._taken[phase] = []
        if taken:
            fresh = on_host(fresh)
        stats = merged([*taken, fresh])
        numbers = self._numbers.take(rate) if phase == "train" else {}
        if not alone:
            self._arrivals.settle(wait=self._group.several)  # a process that has stopped takes part in no gather
        transfer = self._group.send(step, Measurement(stats=stats, numbers=numbers) if stats else None, alone=alone)
        if transfer is not None:
            self._arrivals.add(step, phase, transfer, unread=fresh if taken else None)
            if phase == "train":
                self._steps.measured(step)
        self._arrivals.settle(wait=False)
