"""Exact intervals for few seeds, and corrections for looks at growing data and for pages of many rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from qkeel.errors import InvalidValueError, check
from qkeel.metrics.student_t import quantile

_ALL = 18  # differences of which all subsets are taken: 262,143 means
_DRAWN = 1 << 18  # subsets of more
_NODES = 96  # of the integral between the bounds of a look


def exact_interval(differences: Sequence[float] | np.ndarray, level: float) -> tuple[float, float]:
    """Returns the interval of the centre of a symmetric distribution that differences are drawn from.

    The means of all 2ⁿ - 1 subsets, sorted, cut the line into 2ⁿ parts, each of which holds the centre with the same
    probability. The interval from the k-th to the k-th last of them therefore has a coverage of 1 - 2k / 2ⁿ, whatever
    the distribution; it is what a permutation test by signs does not reject. k is the largest that reaches `level`.
    Where none does, as 8 differences reach no level above 0.992, both ends are infinite. Equal differences count as
    drawn from a continuous distribution. Of more than 18 differences as many subsets are drawn as 18 have.

    Args:
        differences: one finite number a seed. level: coverage that is asked for, between 0 and 1.

    Raises:
        InvalidValueError: a difference is not finite, or the level is not between 0 and 1.

    Source: Hartigan 1969, Using subsample values as typical values.

    >>> exact_interval([1.0, 2.0, 4.0], level=0.75)
    (1.0, 4.0)
    >>> exact_interval([1.0, 2.0, 4.0], level=0.9)
    (-inf, inf)
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise InvalidValueError(f"expected finite differences in a row, one per seed, got {differences!r}")
    check(0 < level < 1, "a level between 0 and 1", level)
    means = _subset_means(tuple(values.tolist()))
    k = math.floor((1 - level) * (len(means) + 1) / 2 + 1e-9)
    return (float(means[k - 1]), float(means[-k])) if k else (-math.inf, math.inf)


@functools.lru_cache(maxsize=512)  # a page asks for the same rows at many levels
def _subset_means(differences: tuple[float, ...]) -> np.ndarray:
    """The means of all subsets but the empty one, or of many drawn at random from all of them, sorted."""
    values = np.array(differences)
    if len(values) <= _ALL:
        sums, counts = np.zeros(1), np.zeros(1)
        for value in values:
            sums, counts = np.concatenate([sums, sums + value]), np.concatenate([counts, counts + 1])
        return np.sort(sums[1:] / counts[1:])
    picks = np.random.default_rng(0).integers(0, 2, (_DRAWN - 1, len(values)))
    picks[~picks.any(1)] = 1
    return np.sort(picks @ values / picks.sum(1))


@functools.lru_cache(maxsize=4096)
def nominal(error: float, looks: int) -> float:
    """Returns the two-sided error of each of several looks, at equal steps of the data, that together err so often.

    Pocock's constant boundary c: |Z_k| ≥ c at some k ≤ looks with probability `error`, where Z_k are standardised sums
    of k independent normal steps. The density of sums that stayed inside is carried from look to look on a grid.

    Source: Pocock 1977, Group sequential methods; Armitage, McPherson & Rowe 1969, the recursion.

    >>> round(nominal(0.05, 5), 4), round(nominal(0.05, 1), 4)
    (0.0158, 0.05)
    """
    check(0 < error < 1, "an error between 0 and 1", error)
    low, high = error / looks, error
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _crossing(middle, looks) < error else (low, middle)
    return low


def _crossing(each: float, looks: int) -> float:
    """The probability that some look passes the boundary of which one look has this two-sided error."""
    bound = quantile(1 - each, 10**9)
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    kept, grid, mass = 1.0, np.zeros(1), np.ones(1)
    for k in range(1, looks + 1):
        edge = bound * math.sqrt(k)
        new = edge * nodes
        step = np.exp(-((new[:, None] - grid[None]) ** 2) / 2) / math.sqrt(2 * math.pi)
        mass = (step @ mass) * weights * edge  # of each node, its weight in the integral included
        grid, kept = new, float(mass.sum())
    return 1 - kept


def common_level(decided: Callable[[float], int], rows: int, error: float, looks: int = 1) -> float:
    """Returns the one level of all intervals of a page of which, in the mean, a share `error` of verdicts is wrong.

    With R of the rows decided by intervals at the level 1 - nominal(error · R / rows, looks), R as large as can be, the
    expected share of decided rows whose interval misses the truth is at most `error`. Where none is decided the level
    is that of R = 1.

    Args:
        decided: how many rows intervals at a level decide. rows: how many there are. error: between 0 and 1. looks: how
            often rows are looked at, at most, while seeds are added.

    Raises:
        InvalidValueError: a number is outside of its range.

    Source: Benjamini & Hochberg 1995; for intervals Benjamini & Yekutieli 2005, False coverage rate.
    """
    check(rows >= 1, "at least 1 row", rows)
    for r in range(rows, 0, -1):
        level = 1 - nominal(error * r / rows, looks)
        if decided(level) >= r:
            return level
    return 1 - nominal(error / rows, looks)
