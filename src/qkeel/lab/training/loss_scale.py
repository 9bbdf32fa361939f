"""The factor on the loss that keeps gradients inside the range of fp16: dynamic, one for each run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

# As torch.amp.GradScaler: powers of two, so that a factor rounds nothing.
START, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
LEAST = 1.0  # below it the forward pass itself overflows, which no factor on the loss helps


@final
class LossScale:
    """The factor: halved when a gradient is not finite, whose step is skipped, doubled after 2000 steps without.

    A run's factor follows from its own gradients alone, so it is the same in whatever company the run trains. Skipped
    steps are counted, and named by `taken_events`: none is silent.

    Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.2; numbers of torch.amp.GradScaler.
    """

    def __init__(self, start: float = START, interval: int = INTERVAL) -> None:
        self.value, self.interval = start, interval
        self.skipped = 0
        self._sound = 0  # steps since the factor last changed
        self._finite = True
        self._events: list[str] = []

    def see(self, norm: Tensor) -> None:
        """Takes the norm of the unscaled gradient; a device is waited for, as by GradScaler."""
        self._finite = math.isfinite(float(norm))

    @property
    def skips(self) -> bool:
        """Returns whether the step to come is left out."""
        return not self._finite

    @property
    def exhausted(self) -> bool:
        """Returns whether steps are skipped although the factor is less than 1."""
        return self.value < LEAST

    def update(self) -> None:
        """Ends a step: counts it, and changes the factor where it is time to."""
        if self._finite:
            self._sound += 1
            if self._sound == self.interval:
                self.value, self._sound = self.value * GROWTH, 0
            return
        self._events.append(f"skipped: the loss or a gradient overflowed fp16 at loss scale {self.value:g}")
        self.value, self._sound, self.skipped = self.value * BACKOFF, 0, self.skipped + 1

    def taken_events(self) -> list[str]:
        """Returns what happened since the last call."""
        events, self._events = self._events, []
        return events

    def record(self) -> dict[str, float]:
        """The fields of records.TASK_FIELDS."""
        return {"loss_scale": self.value, "skipped_steps": self.skipped}

    def state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint keeps."""
        return {"numbers": torch.tensor([self.value, self._sound, self.skipped], dtype=torch.float64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state` returned.

        Raises: KeyError or ValueError for anything else.
        """
        value, sound, skipped = state["numbers"].tolist()
        self.value, self._sound, self.skipped = value, int(sound), int(skipped)
