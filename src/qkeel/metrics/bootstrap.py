"""Intervals over seeds by the bootstrap, for what is no mean of differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from qkeel.errors import InvalidValueError
from qkeel.metrics.student_t import quantile

RESAMPLES = 10_000


def bootstrap_interval(
    values: Sequence[float],
    statistic: Callable[..., np.ndarray] = np.mean,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Returns the interval of a statistic over seeds: percentiles over samples drawn with replacement, the same bits
    for the same values.

    The percentiles are the expanded ones, Φ(±t·√(n / (n - 1))) with Student's t in place of the normal: plain ones are
    too narrow for few seeds. For 3 seeds and less the interval is all that resampling can give.

    Args:
        values: one number per seed, infinity allowed. statistic: reduces [samples n] along `axis`, like numpy.mean or
            numpy.min. level: between 0 and 1. seed: of the samples.

    Raises: InvalidValueError for fewer than 2 values or NaN.

    Source: Efron 1979; Hesterberg 2015, What Teachers Should Know About the Bootstrap.

    >>> [round(x, 2) for x in bootstrap_interval([0.10, 0.12, 0.11, 0.13])]
    [0.1, 0.13]
    """
    known = np.asarray(values, dtype=np.float64)
    if known.ndim != 1 or len(known) < 2 or np.isnan(known).any():
        raise InvalidValueError(f"expected at least 2 numbers, one per seed, got {values!r}")
    n = len(known)
    picks = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))
    drawn = np.sort(statistic(known[picks], axis=1))
    share = math.erfc(quantile(level, n - 1) * math.sqrt(n / (n - 1) / 2)) / 2
    at = math.floor(share * RESAMPLES)
    return float(drawn[at]), float(drawn[RESAMPLES - 1 - at])
