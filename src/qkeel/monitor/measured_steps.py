"""The choice of passes and steps of a run to measure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final, get_args

import torch
from torch import Tensor

from qkeel import dist
from qkeel.monitor.cadence import Cadence
from qkeel.sites.tap import Look, Phase

LEAST = 1.0  # nats; bounds under it are all the same: a softmax does not care


@final
class MeasuredSteps:
    """Counts the passes and steps of a run and asks the cadence which of them are measured. Training passes belong
    to an optimizer's step where there is an optimizer; each other pass is counted by itself, that of each model apart.
    """

    def __init__(self, cadence: Cadence, models: Iterable[str] = ("",), *, by_optimizer: bool) -> None:
        self.done = 0  # optimizer steps
        self.closer: int | None = None  # besides what the cadence says, every so many steps
        self.besides: set[int] = set()  # training steps that are measured whatever the cadence says
        self._passes: dict[tuple[Phase, str], int] = {(p, name): 0 for p in get_args(Phase) for name in models}
        self._cadence, self._by_optimizer = cadence, by_optimizer
        self._last: dict[tuple[Phase, str], int] = {}
        self._bound = BoundChange()

    def due(self, model: str, training: bool, compiled: bool) -> Look:
        """The readings of the pass of a model that begins; asked once for each."""
        phase: Phase = "train" if training else "eval"
        self._passes[phase, model] += 1
        now = self.done if training and self._by_optimizer else self._passes[phase, model] - 1
        if self._measures(now, phase, "" if training else model):
            if not training:
                self._last["eval", model] = now
            return "statistics"
        return "bracket" if self._cadence.brackets and training and not compiled else "nothing"

    def passed(self, phase: Phase) -> int:
        """The passes of all models."""
        return sum(n for (of, _), n in self._passes.items() if of == phase)

    def rounds(self, phase: Phase) -> int:
        """The passes that every model has made, so many or more."""
        return min(n for (of, _), n in self._passes.items() if of == phase)

    @property
    def step_due(self) -> bool:
        """Returns whether the optimizer step that is under way is measured."""
        return self._measures(self.done, "train")

    def _measures(self, step: int, phase: Phase, model: str = "") -> bool:
        if phase == "train" and step == self.last and self._by_optimizer:
            return False  # it is on record
        if phase == "train" and (step in self.besides or (self.closer is not None and step % self.closer == 0)):
            return True
        return self._cadence.due(step, self._last.get((phase, model)), self._bound.factor if phase == "train" else 1.0)

    @property
    def last(self) -> int | None:
        """The training step that was measured last."""
        return self._last.get(("train", ""))

    def bounded(self, bound: Tensor) -> None:
        """Takes the bound on the largest logit of a training pass that was not measured in full."""
        self._bound.see(bound)
        if not self._by_optimizer:
            self._bound.step()

    def measured(self, step: int) -> None:
        """Notes that this training step was measured."""
        self._last["train", ""] = step
        self.besides.discard(step)
        self._bound.measured()

    def stepped(self) -> None:
        """Counts a step of the optimizer."""
        self.done += 1
        self._bound.step()


@final
class BoundChange:
    """The change of the bound on the largest logit since the first step after a measurement, without waiting for the
    device.

    Bounds are compared with bounds: lse and the maximum are up to ln n apart. They are read one step late, when they
    have come from the device by themselves. Where several processes train, `factor` stays 1: all must decide alike.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._now: Tensor | None = None
        self._before: float | None = None
        self._coming: tuple[Tensor, torch.cuda.Event | None] | None = None

    def see(self, bound: Tensor) -> None:
        """The bound of one more pass of this step."""
        self._now = bound if self._now is None else torch.maximum(self._now, bound)

    def measured(self) -> None:
        """This step was measured in full: what comes next is compared with the first bound after it."""
        self.factor = 1.0
        self._before, self._now, self._coming = None, None, None

    def step(self) -> None:
        """The step is over."""
        self._arrive()
        now, self._now = self._now, None
        if now is None or dist.world() > 1:
            return
        if now.device.type == "cuda":
            host = torch.empty(now.shape, dtype=now.dtype, pin_memory=True).copy_(now, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._coming = host, event
        else:
            self._coming = now.cpu(), None
            self._arrive()

    def _arrive(self) -> None:
        if self._coming is None or (self._coming[1] is not None and not self._coming[1].query()):
            return
        bound = max(float(self._coming[0]), LEAST)
        self._coming = None
        if self._before is None:
            self._before = bound
        self.factor = bound / self._before
