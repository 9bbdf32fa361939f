"""The learning rate that a run is going to have: with it, forecasts follow the schedule instead of the last rate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Self, final

import numpy as np

from qkeel.errors import InvalidValueError, ShapeError

_SLACK = 0.01  # a rate this close to the planned one is the planned one


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedRates:
    """Planned learning rates, summed: `clock[s]` is the sum over steps 1 to s; [steps + 1], from 0."""

    clock: np.ndarray

    @classmethod
    def of(cls, rates: Sequence[float] | np.ndarray | Callable[[int], float], steps: int | None = None) -> Self:
        """From the rate of each step of the run, in the unit of the recorded "lr".

        rates: [steps], the first one that of step 1; or a function of the step, from 1 to `steps`.

        Raises: InvalidValueError if a rate is negative or no number, or a function comes without `steps`.

        >>> PlannedRates.of([0.1, 0.2, 0.2]).clock.round(3).tolist()
        [0.0, 0.1, 0.3, 0.5]
        """
        if callable(rates):
            if steps is None:
                raise InvalidValueError("expected the run's number of steps with a function of the step; give steps=")
            rates = [rates(step) for step in range(1, steps + 1)]
        known = np.asarray(rates, dtype=np.float64)
        if known.ndim != 1 or not len(known) or (steps is not None and len(known) != steps):
            raise ShapeError(f"expected one learning rate for each of {steps or 'the'} steps, got shape {known.shape}")
        if not (np.isfinite(known).all() and (known >= 0).all()):
            raise InvalidValueError("expected planned learning rates to be finite and not negative")
        return cls(clock=np.concatenate([[0.0], np.cumsum(known)]))

    @property
    def steps(self) -> int:
        """The length of the run in steps."""
        return len(self.clock) - 1

    def ticks(self, steps: np.ndarray) -> np.ndarray:
        """The clock at `steps` [n], which the plan covers."""
        return self.clock[np.asarray(steps, dtype=np.int64)]

    def when(self, tick: float) -> float:
        """The step, interpolated, at which the clock first shows `tick`; infinity if it does not in this run."""
        if tick > self.clock[-1]:
            return math.inf
        after = int(np.searchsorted(self.clock, tick))
        if after == 0:
            return 0.0
        before, then = self.clock[after - 1 : after + 1]
        return after - 1 + float((tick - before) / (then - before))

    def followed(self, steps: np.ndarray, rates: np.ndarray | None) -> bool:
        """True if the last record is one of this plan: a step in it, at its rate or that of a neighbouring step.
        Neighbouring, because a rate that is read after the scheduler's step is that of the next step.
        """
        if not len(steps) or steps[-1] > self.steps or (steps != np.floor(steps)).any():
            return False
        if rates is None:
            return True
        near = np.diff(self.clock)[max(0, int(steps[-1]) - 2) : int(steps[-1]) + 1]
        return bool(near.min() * (1 - _SLACK) <= rates[-1] <= near.max() * (1 + _SLACK))
