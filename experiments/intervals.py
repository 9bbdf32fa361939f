"""Statistics of the claims: exact intervals for few seeds, and levels for many rows.

What a page of `qkeel report` needs, Student's interval of paired differences, is `qkeel.metrics.paired_effect`.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def largest_stable_lr(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the largest learning rate up to which no run of `rows` collapsed, or None.

    >>> largest_stable_lr([{"lr": 0.1, "collapsed": False}, {"lr": 0.3, "collapsed": True}])
    0.1
    """
    largest = None
    for lr in sorted({row["lr"] for row in rows}):
        if any(row["collapsed"] for row in rows if row["lr"] == lr):
            break
        largest = lr
    return largest


# Exact intervals for few seeds, and corrections for repeated looks at growing data and for many rows on a page.

_ALL = 18  # up to this many differences, all subsets are enumerated: 262,143 means
_DRAWN = 1 << 18  # number of random subsets beyond that
_NODES = 96  # quadrature nodes between the boundaries of one look


def exact_interval(
    differences: Sequence[float] | np.ndarray, level: float
) -> tuple[float, float]:
    """Returns an interval for the centre of a symmetric distribution, given differences drawn from it.

    The means of all 2ⁿ - 1 non-empty subsets, sorted, cut the line into 2ⁿ parts, and each part contains the centre
    with the same probability. The interval from the k-th to the k-th last mean therefore covers the centre with
    probability 1 - 2k / 2ⁿ, for any such distribution; it contains the values that a sign permutation test does not
    reject. k is the largest number with which the coverage is at least `level`. If there is no such k (8 differences
    cannot reach a level above 0.992), both ends are infinite. Ties are treated as if drawn from a continuous
    distribution. With more than 18 differences, random subsets are used.

    Args:
        differences: one finite number per seed.
        level: the required coverage, between 0 and 1.

    Raises:
        ValueError: a difference is not finite.

    Source: Hartigan 1969, Using subsample values as typical values.

    >>> exact_interval([1.0, 2.0, 4.0], level=0.75)
    (1.0, 4.0)
    >>> exact_interval([1.0, 2.0, 4.0], level=0.9)
    (-inf, inf)
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise ValueError(
            f"expected a sequence of differences without NaN or infinity, one per seed, got {differences!r}"
        )
    means = _subset_means(tuple(values.tolist()))
    k = math.floor((1 - level) * (len(means) + 1) / 2 + 1e-9)
    return (float(means[k - 1]), float(means[-k])) if k else (-math.inf, math.inf)


@functools.lru_cache(maxsize=512)  # a page asks for the same rows at many levels
def _subset_means(differences: tuple[float, ...]) -> np.ndarray:
    """Returns the sorted means of all non-empty subsets, or of many random subsets if there are too many."""
    values = np.array(differences)
    if len(values) <= _ALL:
        sums, counts = np.zeros(1), np.zeros(1)
        for value in values:
            sums, counts = (
                np.concatenate([sums, sums + value]),
                np.concatenate([counts, counts + 1]),
            )
        return np.sort(sums[1:] / counts[1:])
    picks = np.random.default_rng(0).integers(0, 2, (_DRAWN - 1, len(values)))
    picks[~picks.any(1)] = 1
    return np.sort(picks @ values / picks.sum(1))


@functools.lru_cache(maxsize=4096)
def nominal(error: float, looks: int) -> float:
    """Returns the two-sided error rate to use at each look so that several looks, at evenly growing amounts of data,
    have a total error rate of `error`.

    Pocock's constant boundary c satisfies P(|Z_k| ≥ c for some k ≤ looks) = error, where Z_k is the standardised sum of
    k independent normal steps. The density of the sums that stayed inside is propagated from look to look on a grid.

    Source: Pocock 1977, Group sequential methods; the recursion: Armitage, McPherson & Rowe 1969.

    >>> round(nominal(0.05, 5), 4), round(nominal(0.05, 1), 4)
    (0.0158, 0.05)
    """
    low, high = error / looks, error
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (
            (middle, high) if _crossing(middle, looks) < error else (low, middle)
        )
    return low


def _crossing(each: float, looks: int) -> float:
    """Returns the probability that at least one look crosses the boundary whose two-sided error per look is `each`."""
    bound = -statistics.NormalDist().inv_cdf(each / 2)
    nodes, weights = _rule()
    kept, grid, mass = 1.0, np.zeros(1), np.ones(1)
    for k in range(1, looks + 1):
        edge = bound * math.sqrt(k)
        new = edge * nodes
        step = np.exp(-((new[:, None] - grid[None]) ** 2) / 2) / math.sqrt(2 * math.pi)
        mass = (
            (step @ mass) * weights * edge
        )  # per node, multiplied by its quadrature weight
        grid, kept = new, float(mass.sum())
    return 1 - kept


@functools.cache
def _rule() -> tuple[np.ndarray, np.ndarray]:
    """Returns the nodes and weights of Gauss–Legendre quadrature between -1 and 1."""
    return np.polynomial.legendre.leggauss(_NODES)


def common_level(
    decided: Callable[[float], int], rows: int, error: float, looks: int = 1
) -> float:
    """Returns one level for all intervals of a page, chosen to control the expected share of wrong verdicts.

    Let R be the largest number such that intervals at level 1 - nominal(error · R / rows, looks) decide at least R
    rows. Then the expected share of decided rows whose interval misses the true value is at most `error`. If no row is
    decided, the level is that for R = 1.

    Args:
        decided: maps a level to the number of rows that intervals at this level decide.
        rows: number of rows.
        error: allowed share of wrong verdicts, between 0 and 1.
        looks: the maximum number of times that the rows are inspected while seeds are added.

    Source: Benjamini & Hochberg 1995; for intervals: Benjamini & Yekutieli 2005, False coverage rate.
    """
    # From the most permissive level down: the first that is consistent with its own number of decisions.
    for r in range(rows, 0, -1):
        level = 1 - nominal(error * r / rows, looks)
        if decided(level) >= r:
            return level
    return 1 - nominal(error / rows, looks)
