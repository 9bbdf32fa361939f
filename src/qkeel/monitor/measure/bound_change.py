"""The change of the bound on the largest logit since the last measurement, without waiting for the device."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from qkeel import dist

LEAST = 1.0  # nats; bounds under it are all the same: a softmax does not care


@final
class BoundChange:
    """Compares the bounds of later steps with that of the first one after a measurement.

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
