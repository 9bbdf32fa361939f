"""The end of a step, which passes its numbers on."""

from __future__ import annotations

import sys
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from qkeel import distributed as dist
from qkeel.capture.calls import SiteStatistics
from qkeel.errors import caution
from qkeel.monitor.cadence import MeasuredSteps
from qkeel.monitor.gather import on_host
from qkeel.monitor.journal import PendingStep, Recorder
from qkeel.monitor.measure import WatchedModels
from qkeel.monitor.numbers import Number, NumberKey, Stats
from qkeel.monitor.processes import ProcessGroup
from qkeel.monitor.record import Sample
from qkeel.patching.modes import FaultGuard
from qkeel.patching.roles import Phase

NOT_SEEN = (
    "the optimizer stepped, but no forward pass of the watched model was seen. Call the model itself, model(...), "
    "rather than model.forward(...) or one of its parts, and watch the object that you call: if torch.compile returned "
    "it, pass that object to watch(); if a compiled function calls the model, compile the model instead"
)
NOT_TRAINED = (
    "the optimizer stepped, but no gradient had reached what the watched model returned in any of its {:,} passes, so "
    "none of them counts as trained. Watch the model whose output the loss is computed from"
)
NO_STEP = (
    "the model made training passes, but the optimizer that is watched took no step, so nothing was recorded. If "
    "another optimizer updates the model, pass that one: qkeel.watch(model, optimizer)"
)


@final
class StepEnd:
    """Reads the statistics of a step from the taps, adds the other numbers of the step, and sends everything on.

    Attributes:
        rate: the learning rate of the last step done.
    """

    def __init__(
        self,
        steps: MeasuredSteps,
        models: WatchedModels,
        group: ProcessGroup,
        recorder: Recorder,
        guard: FaultGuard,
    ) -> None:
        self._steps, self._models, self._group = steps, models, group
        self._recorder, self._guard = recorder, guard
        # The latest of which the cadence knows.
        self._noted: Sample | None = None
        # What has been sent of the monitor's own counts.
        self._calls: dict[Phase, float] = {"train": 0, "eval": 0}
        self._seconds = 0.0
        # What was read before the end of its step.
        self._taken: dict[Phase, list[Stats]] = {"train": [], "eval": []}
        self.rate: float | Tensor | None = None
        # The loss of the coming step, if the training program hands it out.
        self.loss: Tensor | None = None
        self._is_warned = False

    def take(self, phase: Phase) -> Stats:
        """Returns the statistics of the current step so far, on the CPU; they remain part of that step's statistics.

        A step that several processes measure together has none before its end.
        """
        if phase == "train" and self._group.records_jointly:
            return {}
        recent = on_host(self._models.read(phase))
        if recent:
            self._taken[phase].append(recent)
        return recent

    def peek(self, phase: Phase | None) -> Stats:
        """Returns the statistics of passes whose role is open, on the CPU."""
        return on_host(self._models.peek(phase))

    def pass_over(self, phase: Phase) -> None:
        """Ends a step when there is no optimizer; such a step is one forward pass of each model."""
        self._close(phase, self._steps.rounds(phase) - 1, None, alone=True)
        self._note_top()

    def before(self, optimizer: Optimizer) -> None:
        """Must be called before each optimizer step."""
        # What no gradient has reached by now, none will: the step changes the weights.
        self._models.settle(decide=True)
        if self._steps.step_due and not self._group.stopped:
            # The factor by which the gradients are still multiplied, because GradScaler lets a fused optimizer unscale.
            scale = vars(optimizer).get("grad_scale")
            self._models.before_step(scale if isinstance(scale, Tensor) else None)

    def after(self, optimizer: Optimizer) -> None:
        """Must be called after each optimizer step. What was measured for a skipped step counts towards the next
        step."""
        # The passes in a closure that the step has called again.
        self._models.settle(decide=True)
        # GradScaler calls a fused optimizer even for a step that it skips.
        infinite = vars(optimizer).get("found_inf")
        if isinstance(infinite, Tensor) and bool(infinite.any()):
            return
        try:
            self.evaluated()
            rate = optimizer.param_groups[0]["lr"]
            rate = rate.detach().clone() if isinstance(rate, Tensor) else rate
            if self._steps.step_due:
                # The weights that this step's forward passes used are the result of the previous step.
                self._train_step(rate if self.rate is None else self.rate)
            self.rate = rate
        finally:
            self.loss = None
            self._steps.stepped()
        self._recorder.settle(wait=False)
        self._note_top()

    def _note_top(self) -> None:
        """Tells the cadence the latest largest logit."""
        sample = self._recorder.before(sys.maxsize)
        if sample is not None and sample is not self._noted:
            self._noted = sample
            self._steps.recorded(sample.step, sample.overall("max_logit"))

    def evaluated(self) -> None:
        """Ends the evaluation passes since the last step, if there were any."""
        if self._models.has("eval") or self._taken["eval"]:
            self._close("eval", self._steps.done, None, alone=True)

    def _train_step(self, rate: float | Tensor) -> None:
        if not self._steps.passed("train") and not self._is_warned:
            self._is_warned = True
            # Passes that were seen but not trained have another cause than passes that were not seen.
            n_untrained = self._steps.passed("eval")
            caution(NOT_TRAINED.format(n_untrained) if n_untrained else NOT_SEEN)
        if self._models.has("train"):
            self._models.after_step()
        self._close("train", self._steps.done, rate, alone=False)

    def _close(
        self, phase: Phase, step: int, rate: float | Tensor | None, *, alone: bool
    ) -> None:
        """Sends the numbers of a phase on; with `alone`, only this process records them."""
        fresh, taken = self._models.read(phase), self._taken[phase]
        self._taken[phase] = []
        # What was read before is on the host, and is merged there.
        if taken:
            fresh = on_host(fresh)
        stats = SiteStatistics([*taken, fresh]) if taken else fresh
        numbers: dict[NumberKey, Tensor | Number] = {}
        if phase == "train":
            numbers |= self._models.take(None if rate is None else as_tensor(rate))
            if self.loss is not None:
                numbers["", "train_loss"] = Number(self.loss, 1)
        if not alone:
            # A process that has stopped joins no exchange.
            self._recorder.settle(wait=self._group.several)
        seconds = self._guard.seconds
        # On the monitor's own work since the previous measured step, as in records.MONITOR_FIELDS.
        counts = self._models.coverage(phase, stats)
        counts["calls"] -= self._calls[phase]
        counts["errors"] += self._recorder.dropped
        # Passes of a step that is also trained: its record has the time of all.
        is_beside = phase == "eval" and self._models.has("train")
        if not is_beside:
            counts["milliseconds"] = 1000 * (seconds - self._seconds)
        transfer = self._group.send(stats, numbers, counts, alone=alone)
        if transfer is not None:
            self._calls[phase] += counts["calls"]
            self._seconds = self._seconds if is_beside else seconds
            # `read` has handed out the rest of this step already.
            unread = fresh if taken else None
            self._recorder.expect(PendingStep(step, phase, transfer, counts, unread))
            if phase == "train":
                self._steps.measured(step)
        self._recorder.settle(wait=False)

    def warn_without_steps(self) -> None:
        """Must be called at the end of training: warns if passes were trained, but no step was seen."""
        self._models.settle(decide=True)
        if not self._steps.done and self._models.has("train") and dist.rank() == 0:
            caution(NO_STEP)


def as_tensor(rate: float | Tensor) -> Tensor:
    """A learning rate as a tensor, which most steps do not need."""
    if isinstance(rate, Tensor):
        return rate
    return torch.scalar_tensor(rate, dtype=torch.float64)
