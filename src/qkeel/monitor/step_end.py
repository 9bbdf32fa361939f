"""The end of a step: what was measured in it goes to where all processes are merged and recorded."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from qkeel.errors import caution
from qkeel.monitor.measure.watched_models import WatchedModels
from qkeel.monitor.measured_steps import MeasuredSteps
from qkeel.monitor.processes.arrivals import Arrivals
from qkeel.monitor.processes.group import ProcessGroup
from qkeel.monitor.processes.transfer import Measurement, Stats, merged, on_host
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
