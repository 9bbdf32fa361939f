"""The heads whose logits are growing, by the records so far."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from qkeel.monitor.alarms import thresholds
from qkeel.monitor.alarms.forecast import Forecast, clock, forecast
from qkeel.monitor.alarms.history import History

FLOOR, FACTOR = thresholds.OUTLOOK_FLOOR, thresholds.OUTLOOK_FACTOR


def at_the_end(history: History, since: int = 0, faster: float = 1.0) -> Float[np.ndarray, "layers heads"]:
    """The largest logit of each head at the end of the run, if it goes on in proportion to the sum of learning rates.

    z_end = z + faster · (z - z_s) (c_end - c) / (c - c_s), from record s = `since` on; the rule "outlook" of each head.
    Where no schedule is known, or the run does not follow it, the end is at four times the clock so far. NaN where a
    head was not measured.

    >>> values = np.array([0.0, 5.0, 10.0]).reshape(3, 1, 1)
    >>> at_the_end(History(steps=np.arange(3), values={}, heads={"max_logit": values})).tolist()
    [[40.0]]
    """
    series = np.asarray(history.series("max_logit"), dtype=np.float64)
    planned = history.planned
    if planned is not None and planned.followed(history.steps, history.rates):
        ticks, end = planned.ticks(history.steps), float(planned.clock[-1])
    else:
        ticks = clock(history.steps, history.rates)
        end = thresholds.HORIZON * float(ticks[-1])
    passed = float(ticks[-1] - ticks[since])
    if passed <= 0:
        return series[-1]
    return series[-1] + faster * (series[-1] - series[since]) * ((end - float(ticks[-1])) / passed)


def growing(history: History, threshold: float) -> Bool[np.ndarray, "layers heads"]:
    """True for heads over 8 nats that have doubled since the first record and will end over `threshold`."""
    series = np.asarray(history.series("max_logit"), dtype=np.float64)
    with np.errstate(invalid="ignore"):
        risen = (series[-1] > FLOOR) & (series[-1] > FACTOR * series[0])
        return risen & ~(at_the_end(history) <= threshold)


def ahead(history: History) -> Forecast | None:
    """The forecast of when the largest logit passes the next threshold of the alarms; None if it does not."""
    top = history.top("max_logit")
    if top is None or not len(top) or not np.isfinite(top[-1]):
        return None
    over = (t for t in (thresholds.CLIPS, thresholds.HARMS, thresholds.DIVERGES) if top[-1] < t)
    found = next(over, None)
    if found is None:
        return None
    return forecast(history.steps, top, found, rates=history.rates, planned=history.planned)
