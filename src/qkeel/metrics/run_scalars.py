"""Scalars of recorded runs, each defined once: LR sensitivity, collapse, spikes, alarms, paired differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qkeel.errors import InvalidValueError

Row = Mapping[str, Any]  # a record or a line of a table: numbers, text, booleans and null by name
ALARM_THRESHOLD = 100.0  # nats; Kimi K2's clip threshold (arXiv 2507.20534) and, at tiny scale, a clean early sign
HARMFUL_LOGIT = (
    1000.0  # nats; with transplanted logits of 1e3 the loss degrades (Wortsman et al. 2023, arXiv 2309.14322)
)
COLLAPSE_ENTROPY = 0.1  # nats per query row, mean over the model


def lr_sensitivity(losses: Sequence[float], init_loss: float = math.inf) -> float:
    """Returns the mean over learning rates of min(loss, init_loss) - min(losses).

    With `init_loss` = infinity (the default) losses are not clipped, so every loss must be finite.
    NaN counts as `init_loss`.

    Source: Wortsman et al. 2023, arXiv 2309.14322, section 2.1 (they clip at the loss of initialisation).

    Raises:
        InvalidValueError: there is no loss.

    >>> round(lr_sensitivity([3.5, 3.3, 3.2, 3.25, 3.6, 9.0, math.inf], math.log(32101)), 6)
    1.975235
    """
    if not losses:
        raise InvalidValueError("LR sensitivity needs at least one loss, got none")
    clipped = [init_loss if math.isnan(loss) else min(loss, init_loss) for loss in losses]
    best = min(clipped)
    if not math.isfinite(best):
        return math.nan
    return sum(loss - best for loss in clipped) / len(clipped)


def collapsed(entropy: float, val_loss: float, init_loss: float) -> bool:
    """Returns whether attention has collapsed: mean entropy under 0.1 nats, or a loss that is NaN or did not improve.

    Tiny models rarely diverge to NaN; they freeze with one-hot attention, whose entropy is 0.

    >>> collapsed(0.01, 2.0, 5.5), collapsed(1.2, 2.0, 5.5)
    (True, False)
    """
    return not val_loss < init_loss or not entropy >= COLLAPSE_ENTROPY


def alarm_step(records: Sequence[Row], threshold: float = ALARM_THRESHOLD) -> int | None:
    """Returns the first logged step with max_logit above `threshold` (NaN counts as above), or None.

    >>> alarm_step([{"step": 0, "max_logit": 8.0}, {"step": 10, "max_logit": 180.0}])
    10
    """
    for record in records:
        value = record.get("max_logit")
        if value is not None and not value <= threshold:
            return int(record["step"])
    return None


def growth_exponent(steps: Sequence[float], values: Sequence[float], least: int = 6) -> float:
    """Returns the p of values ~ steps^p, by least squares of ln value on ln step over the positive records.

    NaN with fewer than `least` records that can be used: through few points a power law fits anything.

    >>> round(growth_exponent(range(1, 9), [2.0 * step**0.5 for step in range(1, 9)]), 6)
    0.5
    """
    fine = [(math.log(s), math.log(v)) for s, v in zip(steps, values) if s > 0 and v > 0 and math.isfinite(v)]
    if len(fine) < least:
        return math.nan
    points = np.array(fine)
    return slope(points[:, 0], points[:, 1])


def drift(values: Sequence[float] | np.ndarray) -> float:
    """Returns the last measured value over the first one; NaN with fewer than two.

    >>> drift([math.nan, 1.0, 1.2, 1.5])
    1.5
    """
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    return float(known[-1] / known[0]) if len(known) > 1 and known[0] else math.nan


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the slope of the line through points [n], by least squares; NaN where all x are the same.

    >>> slope(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 5.0]))
    2.0
    """
    x = x - x.mean()
    spread = float(x @ x)
    return float(x @ y) / spread if spread > 0 else math.nan


def spike_score(losses: Sequence[float], window: int = 16, deviations: float = 6.0) -> float:
    """Returns the share of losses more than `deviations` standard deviations above the mean of the window before.

    Losses are those of consecutive logged steps; the first `window` are never spikes. NaN is a spike.

    Source: OLMo 2 report (arXiv 2501.00656), section 3, who use windows of 1,000 steps and 7 deviations;
    a short run has fewer points, hence the smaller window here.

    >>> spike_score([1.0, 1.1] * 10 + [9.0] + [1.0] * 4)
    0.04
    """
    if not losses:
        return 0.0
    spikes = 0
    for i, loss in enumerate(losses):
        before = [x for x in losses[max(0, i - window) : i] if math.isfinite(x)]
        if math.isnan(loss):
            spikes += 1
        elif i >= window and len(before) >= 2:
            spikes += loss > statistics.fmean(before) + deviations * max(statistics.stdev(before), 1e-12)
    return spikes / len(losses)


def largest_stable_lr(rows: Sequence[Row]) -> float | None:
    """Returns the largest learning rate below which (it included) no run of `rows` collapsed, or None.

    >>> largest_stable_lr([{"lr": 0.1, "collapsed": False}, {"lr": 0.3, "collapsed": True}])
    0.1
    """
    largest = None
    for lr in sorted({row["lr"] for row in rows}):
        if any(row["collapsed"] for row in rows if row["lr"] == lr):
            break
        largest = lr
    return largest


def paired_gain(rows: Sequence[Row], remedy: str, baseline: str, lr: float) -> list[float]:
    """Returns val_loss(baseline) - val_loss(remedy) for each seed that both have at `lr`; positive: the remedy wins.

    Same seed means same weights and same batches, so the pairing takes the seed spread out.

    Args:
        rows: lines of a study's table.
        remedy: the remedy whose gain it is.
        baseline: the remedy that it is compared with.
        lr: the learning rate of both.

    >>> rows = [{"remedy": r, "lr": 0.1, "seed": 0, "val_loss": v} for r, v in (("qk_norm", 2.0), ("none", 2.5))]
    >>> paired_gain(rows, "qk_norm", "none", lr=0.1)
    [0.5]
    """
    loss = {(row["remedy"], row["seed"]): row["val_loss"] for row in rows if row["lr"] == lr}
    seeds = sorted({s for r, s in loss if r == remedy} & {s for r, s in loss if r == baseline})
    return [loss[baseline, s] - loss[remedy, s] for s in seeds]
