"""A forecast of the step at which a logit passes a threshold: a power law in the learning-rate clock, as planned.

It does not use torch, so recorded runs can be replayed through it anywhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Self, final

import numpy as np

from qkeel.errors import InvalidValueError, ShapeError
from qkeel.metrics import slope

LEAST_POINTS = 6
# Of the clock; within less, noise has any slope (records may begin late, in a run that
# was resumed).
LEAST_SPAN = 1.5
# Below it, a logit takes a million times the training to double, which is negligible.
LEAST_EXPONENT = 0.05
# The fit uses the last decade of the clock; in a long warm-up, the logit hardly changes
# before that.
WINDOW = 10.0
# In ln clock; further than any training goes.
FARTHEST = 50.0
# The interval is measured, not derived: residuals of one run are not independent draws, and they do not show what bends
# the curve later. It was calibrated on the tuning seeds of experiments/notes/alarms.md; its coverage is measured on
# other seeds.
_SLACK = (0.1, 0.12)
_SLACK_PER_DISTANCE = (0.45, 0.55)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """`value` grows like clock^exponent and passes `threshold` at `step`, with a 90 % interval from `low` to `high`.

    If the schedule is known up to the end of the run (step `end`), infinity means "not within this run". If the
    schedule is unknown, `end` is None, and the three steps hold only if the learning rate stays the same.
    """

    threshold: float
    value: float
    exponent: float
    step: float
    low: float
    high: float
    end: int | None = None

    def __str__(self) -> str:
        """`will pass 10,000 at step 2,140 (90 % interval 1,950 to 2,340)`, in which `never` means not within this run,
        followed by the condition, if any."""
        if not math.isfinite(self.step):
            return f"will not pass {self.threshold:,g} within this run"
        condition = " if the learning rate stays the same" if self.end is None else ""
        low, high = (
            f"{_round(x):,}" if math.isfinite(x) else "never"
            for x in (self.low, self.high)
        )
        step = f"{_round(self.step):,} (90 % interval {low} to {high})"
        return f"will pass {self.threshold:,g} at step {step}{condition}"


def _round(x: float) -> int:
    """Rounds to two or three digits, because the rest is noise."""
    digits = max(0, math.floor(math.log10(max(abs(x), 1))) - 2)
    return round(x / 10**digits) * 10**digits


def clock(steps: np.ndarray, rates: np.ndarray | None) -> np.ndarray:
    """The learning rate summed over steps [n], which Adam's weights follow, or the steps themselves if no rates are
    given.

    A warm-up or decay bends the power law in steps, not in this clock. `rates[i]` is the rate at `steps[i]`; between
    two records the rate of the later one applies.
    """
    steps = np.asarray(steps, dtype=np.float64)
    if rates is None:
        return steps
    rates = np.asarray(rates, dtype=np.float64)
    if rates.shape != steps.shape:
        raise ShapeError(
            f"expected one learning rate per step, got {rates.shape} for {steps.shape}"
        )
    return np.cumsum(rates * np.diff(steps, prepend=0.0))


def forecast(
    steps: np.ndarray,
    values: np.ndarray,
    threshold: float,
    *,
    rates: np.ndarray | None = None,
    planned: PlannedRates | None = None,
) -> Forecast | None:
    """The step at which the power law through `values` [n] passes `threshold`; None if they never pass it or already
    have.

    ln v = a + p ln c is fitted by least squares to the records in which c is at least a tenth of its last value (at
    least 6 records, over which c grows by a factor of at least 1.5); extrapolated from the last record,
    c* = c · (threshold / v)^(1/p). The clock c continues as planned; without a plan, or if the last record does not
    follow the plan, it continues at the last learning rate. The interval around ln c*, with L = ln(c* / c), is from
    -(0.45 L + 0.1) to +(0.55 L + 0.12), but never before the last record.

    >>> steps = np.arange(100, 1100, 100)
    >>> print(forecast(steps, 2.0 * steps**0.5, 100.0))
    will pass 100 at step 2,500 (90 % interval 1,500 to 4,670) if the learning rate stays the same

    Args:
        steps, values: the steps [n] of the records and their logits [n]. threshold: the logit to reach.
        rates: the learning rates [n] at `steps`. planned: the learning rates of the whole run, if known.

    Source: experiments of this project (logits of small runs drift as a power of steps); the clock and the interval
    were developed in this project and are evaluated in experiments/notes/alarms.md.
    """
    if planned is not None and not planned.followed(steps, rates):
        planned = None
    ticks = clock(steps, rates) if planned is None else planned.ticks(steps)
    values = np.asarray(values, dtype=np.float64)
    fine = np.flatnonzero((ticks > 0) & (values > 0) & np.isfinite(values))
    # A forecast begins at the last record, so that one has to be among them.
    if len(fine) < LEAST_POINTS or fine[-1] != len(steps) - 1:
        return None
    now, tick, value = float(steps[-1]), float(ticks[-1]), float(values[-1])
    late = fine[
        (ticks[fine] >= tick / WINDOW)
        | (np.arange(len(fine)) >= len(fine) - LEAST_POINTS)
    ]
    if value >= threshold or tick < LEAST_SPAN * ticks[late[0]]:
        return None
    exponent = slope(np.log(ticks[late]), np.log(values[late]))
    if not exponent > LEAST_EXPONENT:
        return None
    distance = math.log(threshold / value) / exponent
    rate = tick / now if rates is None else float(rates[-1])
    if distance > FARTHEST or (planned is None and rate <= 0):
        return None

    def when(distance: float) -> float:
        then = tick * math.exp(max(0.0, distance))
        return now + (then - tick) / rate if planned is None else planned.when(then)

    below, above = (
        share * distance + least for share, least in zip(_SLACK_PER_DISTANCE, _SLACK)
    )
    return Forecast(
        threshold=threshold,
        value=value,
        exponent=exponent,
        step=when(distance),
        low=when(distance - below),
        high=when(distance + above),
        end=None if planned is None else planned.steps,
    )


# a rate this close to the planned rate counts as equal to it.
_NEAR = 0.01


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedRates:
    """The cumulative sum of planned learning rates: `clock` [steps + 1] starts at 0, and `clock[s]` is the sum over
    steps 1 to s.

    >>> PlannedRates.of([0.5, 0.25]).clock.tolist()
    [0.0, 0.5, 0.75]
    """

    clock: np.ndarray

    @classmethod
    def of(cls, rates: Sequence[float] | np.ndarray) -> Self:
        """Builds the plan from the learning rate at each step of the run, in the units of the recorded "lr", starting with
        that of step 1.

        Raises: ShapeError if the rates are no series, InvalidValueError if one is negative or not a number.

        >>> PlannedRates.of([0.1, 0.2, 0.2]).clock.round(3).tolist()
        [0.0, 0.1, 0.3, 0.5]
        """
        known = np.asarray(rates, dtype=np.float64)
        if known.ndim != 1 or not len(known):
            raise ShapeError(
                f"expected one learning rate for each step, got shape {known.shape}"
            )
        if not (np.isfinite(known).all() and (known >= 0).all()):
            raise InvalidValueError(
                "expected planned learning rates to be finite and not negative"
            )
        return cls(clock=np.concatenate([[0.0], np.cumsum(known)]))

    @property
    def steps(self) -> int:
        """The length of the run in steps."""
        return len(self.clock) - 1

    def ticks(self, steps: np.ndarray) -> np.ndarray:
        """The clock at `steps` [n], which the plan covers."""
        return self.clock[np.asarray(steps, dtype=np.int64)]

    def when(self, tick: float) -> float:
        """The step, interpolated, at which the clock first reaches `tick`; infinity if it does not in this run."""
        if tick > self.clock[-1]:
            return math.inf
        after = int(np.searchsorted(self.clock, tick))
        if after == 0:
            return 0.0
        before, then = self.clock[after - 1 : after + 1]
        return after - 1 + float((tick - before) / (then - before))

    def followed(self, steps: np.ndarray, rates: np.ndarray | None) -> bool:
        """True if the last record follows this plan: its step is in the plan, with the planned rate of that or a
        neighbouring step. A neighbouring step is accepted because a rate that is read after the scheduler's step is
        that of the next step.
        """
        if not len(steps) or steps[-1] > self.steps or (steps != np.floor(steps)).any():
            return False
        if rates is None:
            return True
        near = np.diff(self.clock)[max(0, int(steps[-1]) - 2) : int(steps[-1]) + 1]
        return bool(near.min() * (1 - _NEAR) <= rates[-1] <= near.max() * (1 + _NEAR))
