"""The rate at which two runs part that differ by rounding: a finite-time Lyapunov exponent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qkeel.metrics.run_scalars import slope

SATURATED = 0.1  # share of the size of what is compared: beyond it a distance cannot grow as it did
_LEAST = 3  # points of a line


def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the root mean square difference of two courses [steps ...] at each step [steps].

    >>> distance(np.zeros((2, 2)), np.array([[3.0, 3.0], [0.0, 0.0]]))
    array([3., 0.])
    """
    apart = (np.asarray(other, np.float64) - np.asarray(one, np.float64)).reshape(len(one), -1)
    return np.sqrt(np.square(apart).mean(axis=1))


def divergence_rate(steps: Sequence[float], distances: np.ndarray, sizes: np.ndarray) -> float:
    """Returns the slope of ln distance against steps, per step, from the first distance above 0 until one passes a
    tenth of the size of what is compared; NaN with fewer than 3 such steps.

    Positive: the runs part exponentially, which is what chaos means. Its inverse is the number of steps in which the
    distance grows e-fold.

    Source: Wolf et al. 1985, Determining Lyapunov exponents from a time series, for the quantity.

    >>> round(divergence_rate(range(6), 1e-6 * np.exp(0.5 * np.arange(6)), np.ones(6)), 6)
    0.5
    """
    points = []
    for step, apart, size in zip(steps, distances, sizes):
        if not apart <= SATURATED * size:
            break
        if apart > 0:
            points.append((float(step), math.log(apart)))
    if len(points) < _LEAST:
        return math.nan
    line = np.array(points)
    return slope(line[:, 0], line[:, 1])
