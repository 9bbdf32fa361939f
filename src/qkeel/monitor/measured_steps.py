"""The choice of passes and steps of a run to measure."""

from __future__ import annotations

from typing import final

from torch import Tensor

from qkeel.monitor.cadence import Cadence
from qkeel.monitor.measure.bound_change import BoundChange
from qkeel.sites.tap import Look, Phase


@final
class MeasuredSteps:
    """Counts the passes and steps of a run and asks the cadence which of them are measured. Training passes belong
    to an optimizer's step where there is an optimizer; each other pass is counted by itself.
    """

    def __init__(self, cadence: Cadence, *, by_optimizer: bool) -> None:
        self.done = 0  # optimizer steps
        self.passes: dict[Phase, int] = {"train": 0, "eval": 0}
        self._cadence, self._by_optimizer = cadence, by_optimizer
        self._last: dict[Phase, int | None] = {"train": None, "eval": None}
        self._bound = BoundChange()

    def due(self, training: bool, compiled: bool) -> Look:
        """The readings of the pass that begins; asked once for each."""
        phase: Phase = "train" if training else "eval"
        self.passes[phase] += 1
        now = self.done if training and self._by_optimizer else self.passes[phase] - 1
        if self._cadence.due(now, self._last[phase], self._bound.factor if training else 1.0):
            if not training:
                self._last["eval"] = now
            return "statistics"
        return "bracket" if self._cadence.brackets and training and not compiled else "nothing"

    @property
    def step_due(self) -> bool:
        """Returns whether the optimizer step that is under way is measured."""
        return self._cadence.due(self.done, self._last["train"], self._bound.factor)

    def bounded(self, bound: Tensor) -> None:
        """Takes the bound on the largest logit of a training pass that was not measured in full."""
        self._bound.see(bound)
        if not self._by_optimizer:
            self._bound.step()

    def measured(self, step: int) -> None:
        """Notes that this training step was measured."""
        self._last["train"] = step
        self._bound.measured()

    def stepped(self) -> None:
        """Counts a step of the optimizer."""
        self.done += 1
        self._bound.step()
