"""Statistics of order and of thresholds, and intervals by resampling seeds, that both predictions are judged by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from experiments.intervals import bootstrap_interval


def kendall(x: np.ndarray, y: np.ndarray) -> float:
    """Returns Kendall's rank correlation with ties (τ-b), -1 to 1; NaN where one side is all ties.

    Source: Kendall 1945, The treatment of ties in ranking problems.

    >>> kendall(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0])).__round__(3)
    0.333
    """
    a, b = (np.sign(v[:, None] - v[None, :]) for v in (x, y))
    size = math.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / size) if size else math.nan


def crossing(lrs: Sequence[float], values: np.ndarray, level: float) -> float:
    """Returns the base-2 logarithm of the rate at which values first pass a level, linear between rates.

    Where the first value is above it, half a grid step under the first rate; where none is, half a step over the last.

    >>> crossing([0.01, 0.02, 0.04], np.array([0.0, 0.0, 1.0]), 0.5) - math.log2(0.02)
    0.5
    """
    x = np.log2(lrs)
    above = np.flatnonzero(~(values <= level))
    if not len(above):
        return float(x[-1] + 0.5)
    i = int(above[0])
    if i == 0:
        return float(x[0] - 0.5)
    return float(x[i - 1] + (x[i] - x[i - 1]) * (level - values[i - 1]) / (values[i] - values[i - 1]))


def over_seeds(n: int, statistic: Callable[[np.ndarray], float]) -> tuple[float, float, float]:
    """Returns a statistic of all n seeds, and its interval at level 0.95 by the bootstrap over them.

    `statistic` is given the numbers of the seeds that are drawn; each set of seeds is computed once.
    """
    known: dict[tuple[int, ...], float] = {}

    def of(picks: np.ndarray) -> float:
        name = tuple(sorted(picks.astype(int).tolist()))
        if name not in known:
            known[name] = statistic(np.array(name))
        return known[name]

    low, high = bootstrap_interval(range(n), lambda drawn, axis: np.array([of(picks) for picks in drawn]))
    return of(np.arange(n)), low, high


def verdict(found: tuple[float, float, float], level: float, above: bool = True) -> str:
    """Returns whether a statistic that was predicted to lie above (or not above) a level does, by its interval.

    >>> verdict((0.5, 0.4, 0.6), 0.3), verdict((0.5, 0.2, 0.6), 0.3), verdict((0.5, 0.4, 0.6), 0.3, above=False)
    ('held', 'undecided', 'refuted')
    """
    _, low, high = found
    if low <= level <= high:
        return "undecided"
    return "held" if (low > level) == above else "refuted"
