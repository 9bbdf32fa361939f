"""When a drifting logit will pass a threshold: a power law of the learning-rate clock, with a measured interval.

No torch: recorded runs can be replayed through it anywhere.
"""

from __future__ import annotations

import dataclasses
import math
from typing import final

import numpy as np

from qkeel.errors import ShapeError

LEAST_POINTS = 6
LEAST_EXPONENT = 0.05  # below it a logit that doubles needs a million times the training: no drift to speak of
# The interval is measured, not derived: residuals of one run are no independent draws, and what bends the curve
# later is not in them. Calibrated on seeds 0-3 of docs/alarms.md; its coverage is measured on seeds 10-13.
_SLACK = (0.1, 0.12)
_SLACK_PER_DISTANCE = (0.45, 0.55)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """`value` grows like clock^exponent and passes `threshold` at `step`, with 90 % between `low` and `high`."""

    threshold: float
    value: float
    exponent: float
    step: float
    low: float
    high: float

    def __str__(self) -> str:
        """`passes 1e4 at step 2,140 ± 200`, the larger of both sides."""
        side = max(self.high - self.step, self.step - self.low)
        return f"passes {_short(self.threshold)} at step {_round(self.step):,} ± {_round(side):,}"


def _short(x: float) -> str:
    text = f"{x:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{x:g}" if x < 1000 or float(text) != x else text


def _round(x: float) -> int:
    """To two or three digits: the rest is noise."""
    if not math.isfinite(x):
        return 0
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
    steps: np.ndarray, values: np.ndarray, threshold: float, *, rates: np.ndarray | None = None
) -> Forecast | None:
    """Where the power law through `values` [n] passes `threshold`; None if it does not grow or has passed already.

    ln v = a + p ln c by least squares over all records with c > 0, v > 0; from the last record on,
    c* = c · (threshold / v)^(1/p), and the last learning rate is taken to stay. Interval in ln step, with
    L = ln(step* / step): from -(0.45 L + 0.1) to +(0.55 L + 0.12), never before the last record.

    Source: EXPERIMENTS of this project (logits of small runs drift as a power of steps); the clock and the interval
    are this project's, measured in docs/alarms.md.
    """
    ticks = clock(steps, rates)
    values = np.asarray(values, dtype=np.float64)
    fine = (ticks > 0) & (values > 0) & np.isfinite(values)
    if fine.sum() < LEAST_POINTS or not fine[-1] or values[-1] >= threshold:
        return None
    exponent = _slope(np.log(ticks[fine]), np.log(values[fine]))
    if not exponent > LEAST_EXPONENT:
        return None
    now, tick, value = float(steps[-1]), float(ticks[-1]), float(values[-1])
    growth = math.log(threshold / value) / exponent
    if growth > 50:  # further than any training goes
        return None
    rate = tick / now if rates is None else float(rates[-1])
    if not rate > 0:
        return None
    step = now + tick * math.expm1(growth) / rate
    distance = math.log(step / now)
    low = step * math.exp(-_SLACK_PER_DISTANCE[0] * distance - _SLACK[0])
    high = step * math.exp(_SLACK_PER_DISTANCE[1] * distance + _SLACK[1])
    return Forecast(threshold=threshold, value=value, exponent=exponent, step=step, low=max(now, low), high=high)


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    x = x - x.mean()
    spread = float(x @ x)
    return float(x @ y) / spread if spread > 0 else math.nan
