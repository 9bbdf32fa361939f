"""A forecast of the step at which a logit passes a threshold: a power law of the learning-rate clock, as planned.

No torch: recorded runs can be replayed through it anywhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Self, final

import numpy as np

from qkeel.errors import InvalidValueError, ShapeError
from qkeel.metrics import slope

LEAST_POINTS = 6
LEAST_EXPONENT = 0.05  # below it a logit that doubles needs a million times the training: no drift to speak of
WINDOW = 10.0  # the fit looks at the last decade of the clock: before, in a long warm-up, the logit has not changed yet
VAGUE = 10.0  # times the low end of an interval; beyond it a forecast says only what will not happen so soon
FARTHEST = 50.0  # in ln clock; further than any training goes
# The interval is measured, not derived: residuals of one run are no independent draws, and what bends the curve
# later is not in them. Calibrated on the tuning seeds of research/alarms.md; its coverage is measured on others.
_SLACK = (0.1, 0.12)
_SLACK_PER_DISTANCE = (0.45, 0.55)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """`value` grows like clock^exponent and passes `threshold` at `step`, with 90 % between `low` and `high`.

    Where the schedule is known to the end of the run, step `end`, infinity stands for "not within this run". Where it
    is not, `end` is None and all three hold if the learning rate stays what it is.
    """

    threshold: float
    value: float
    exponent: float
    step: float
    low: float
    high: float
    end: int | None = None

    def __str__(self) -> str:
        """`passes 1e4 at step 2,140 (90 % interval 1,950 to 2,340)`, and on what condition; where the interval is so
        wide that its middle says nothing, the step before which it does not."""
        condition = " if the learning rate stays" if self.end is None else ""
        if not math.isfinite(self.step):
            return f"does not pass {_short(self.threshold)} within this run"
        if self.vague:
            return f"does not pass {_short(self.threshold)} before step {_round(self.low):,}{condition}"
        return f"passes {_short(self.threshold)} at step {_round(self.step):,} ({self.interval}){condition}"

    @property
    def vague(self) -> bool:
        """Returns whether the interval spans more than a factor of VAGUE."""
        return min(self.high, math.inf if self.end is None else float(self.end)) > VAGUE * self.low

    @property
    def interval(self) -> str:
        """`90 % interval 1,950 to 2,340`; `never` is not within this run."""
        low, high = (f"{_round(x):,}" if math.isfinite(x) else "never" for x in (self.low, self.high))
        return f"90 % interval {low} to {high}"


def _short(x: float) -> str:
    text = f"{x:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{x:g}" if x < 1000 or float(text) != x else text


def _round(x: float) -> int:
    """To two or three digits: the rest is noise."""
    digits = max(0, math.floor(math.log10(max(abs(x), 1))) - 2)
    return round(x / 10**digits) * 10**digits


def clock(steps: np.ndarray, rates: np.ndarray | None) -> np.ndarray:
    """The learning rate summed over steps [n], which Adam's weights move with; without rates, the steps.

    A warm-up or decay bends the power law in steps, not in this clock. `rates[i]` is the rate at `steps[i]`; between
    records it counts as what the later one says.
    """
    steps = np.asarray(steps, dtype=np.float64)
    if rates is None:
        return steps
    rates = np.asarray(rates, dtype=np.float64)
    if rates.shape != steps.shape:
        raise ShapeError(f"expected one learning rate per step, got {rates.shape} for {steps.shape}")
    return np.cumsum(rates * np.diff(steps, prepend=0.0))


def forecast(
    steps: np.ndarray,
    values: np.ndarray,
    threshold: float,
    *,
    rates: np.ndarray | None = None,
    planned: PlannedRates | None = None,
) -> Forecast | None:
    """The step at which the power law through `values` [n] passes `threshold`; None if it never does or already has.

    ln v = a + p ln c by least squares over the records of the last tenfold of c (at least 6); from the last record on,
    c* = c · (threshold / v)^(1/p). The clock c goes on as planned; with no plan, or one that the last record does not
    follow, at the last learning rate. Interval in ln c*, with L = ln(c* / c): from -(0.45 L + 0.1) to
    +(0.55 L + 0.12), never before the last record.

    >>> steps = np.arange(100, 1100, 100)
    >>> print(forecast(steps, 2.0 * steps**0.5, 100.0))
    passes 100 at step 2,500 (90 % interval 1,500 to 4,670) if the learning rate stays

    Args:
        steps, values: the recorded logits [n] and their steps [n]. threshold: the logit to reach.
        rates: the learning rates [n] at `steps`. planned: those of the whole run, if known.

    Source: EXPERIMENTS of this project (logits of small runs drift as a power of steps); the clock and the interval
    are this project's, measured in research/alarms.md.
    """
    followed = planned if planned is not None and planned.followed(steps, rates) else None
    ticks = clock(steps, rates) if followed is None else followed.ticks(steps)
    values = np.asarray(values, dtype=np.float64)
    fine = np.flatnonzero((ticks > 0) & (values > 0) & np.isfinite(values))
    if len(fine) < LEAST_POINTS or fine[-1] != len(steps) - 1 or values[-1] >= threshold:
        return None
    late = fine[(ticks[fine] >= ticks[-1] / WINDOW) | (np.arange(len(fine)) >= len(fine) - LEAST_POINTS)]
    exponent = slope(np.log(ticks[late]), np.log(values[late]))
    if not exponent > LEAST_EXPONENT:
        return None
    distance = math.log(threshold / float(values[-1])) / exponent
    if distance > FARTHEST:
        return None
    when = _steady(steps, ticks, rates) if followed is None else followed.when
    if when is None:
        return None
    below, above = (share * distance + least for share, least in zip(_SLACK_PER_DISTANCE, _SLACK))
    step, low, high = (
        when(float(ticks[-1]) * math.exp(max(0.0, far))) for far in (distance, distance - below, distance + above)
    )
    return Forecast(
        threshold=threshold,
        value=float(values[-1]),
        exponent=exponent,
        step=step,
        low=low,
        high=high,
        end=None if followed is None else followed.steps,
    )


def _steady(steps: np.ndarray, ticks: np.ndarray, rates: np.ndarray | None) -> Callable[[float], float] | None:
    """From the clock to the step if the last learning rate stays; None if that is zero."""
    now, tick = float(steps[-1]), float(ticks[-1])
    rate = tick / now if rates is None else float(rates[-1])
    return (lambda then: now + (then - tick) / rate) if rate > 0 else None


_NEAR = 0.01  # a rate this close to the planned one is the planned one


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
        return bool(near.min() * (1 - _NEAR) <= rates[-1] <= near.max() * (1 + _NEAR))
