"""Whether a difference between paired runs is shown: its mean, interval, p-value and verdict."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Literal, final

import numpy as np

from qkeel.errors import InvalidTypeError, InvalidValueError, check

# Student's t distribution: tail, quantile, and the power of a test, without scipy, which the report does without.

_TINY = 1e-300


def two_sided(t: float, freedom: int) -> float:
    """Returns P(|T| ≥ |t|) of Student's t, exact to 12 digits: I_x(ν/2, 1/2) at x = ν / (ν + t²).

    >>> round(two_sided(12.706204736, 1), 9)
    0.05
    """
    square = min(t * t, 1e300)
    x, y = freedom / (freedom + square), square / (freedom + square)
    if not y:
        return 1.0
    a, b = freedom / 2, 0.5
    whole = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(whole + a * math.log(x) + b * math.log(y))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, y) / b


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function by Lentz's method.

    Source: Abramowitz & Stegun 1964, 26.5.8.
    """
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / ((1 + term * d) or _TINY)
            c = (1 + term / c) or _TINY
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


@functools.lru_cache(maxsize=4096)
def quantile(level: float, freedom: int) -> float:
    """Returns the t with P(|T| ≤ t) = level.

    >>> round(quantile(0.95, 7), 6)
    2.364624
    """
    low, high = -20.0, 60.0  # logarithms of t
    for _ in range(90):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(math.exp(middle), freedom) > 1 - level else (low, middle)
    return math.exp(high)


def power(shift: float, freedom: int, level: float) -> float:
    """Returns P(T' > t) of the noncentral t: a test at `level` sees an effect of `shift` standard errors in its
    direction. The mean of Φ(shift - t·s) over the sample's standard deviation s, in units of the true one.

    >>> round(power(2.802, 10_000, 0.95), 2)
    0.8
    """
    t, width = quantile(level, freedom), 9 / math.sqrt(2 * freedom)
    s = np.linspace(max(0.0, 1 - width), 1 + width, 401)[1:]
    weight = (freedom - 1) * np.log(s) - freedom * s * s / 2
    weight = np.exp(weight - weight.max())
    passed = np.array([math.erfc((t * x - shift) / math.sqrt(2)) / 2 for x in s])
    return float(weight @ passed / weight.sum())


# Intervals over seeds by the bootstrap, for what is no mean of differences.

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


# Exact intervals for few seeds, and corrections for looks at growing data and for pages of many rows.

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
    bound = -statistics.NormalDist().inv_cdf(each / 2)
    nodes, weights = _rule()
    kept, grid, mass = 1.0, np.zeros(1), np.ones(1)
    for k in range(1, looks + 1):
        edge = bound * math.sqrt(k)
        new = edge * nodes
        step = np.exp(-((new[:, None] - grid[None]) ** 2) / 2) / math.sqrt(2 * math.pi)
        mass = (step @ mass) * weights * edge  # of each node, its weight in the integral included
        grid, kept = new, float(mass.sum())
    return 1 - kept


@functools.cache
def _rule() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss and Legendre between -1 and 1."""
    return np.polynomial.legendre.leggauss(_NODES)


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


# The statistical judgement of paired differences: interval, test, what could have been seen, and a verdict.

Verdict = Literal["better", "worse", "equal", "undecided"]
POWER = 0.8  # the probability with which an effect is to be seen, where the number of seeds is asked for
_MOST = 100_000  # seeds; more are no answer
_SAME = 1e-9  # a spread below this share of the mean is rounding: the differences are one number


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairedEffect:
    """The mean of paired differences with its interval and what follows from it; positive is better."""

    mean: float  #: of the differences
    spread: float
    """Standard deviation of the differences, n - 1 in the denominator."""
    low: float
    """Lower end of the interval of the mean."""
    high: float
    """Upper end of it."""
    p: float
    """Two-sided p value of the hypothesis that the mean is 0; not corrected for other tests."""
    n: int
    """Number of differences, one per seed."""
    level: float
    """Coverage of the interval, and 1 minus the share of false verdicts where nothing differs."""
    margin: float | None
    """The largest difference that counts as none."""

    @property
    def verdict(self) -> Verdict:
        """Better or worse: the interval leaves 0. Equal: it lies inside ±margin. Else undecided."""
        if self.low > 0 or self.high < 0:
            return "better" if self.low > 0 else "worse"
        inside = self.margin is not None and -self.margin < self.low and self.high < self.margin
        return "equal" if inside else "undecided"

    @property
    def detectable(self) -> float:
        """The smallest true mean that n seeds of this spread tell from 0 in 80 % of studies."""
        return math.inf if math.isinf(self.high) else _shift(self.n, self.level) * self.spread / math.sqrt(self.n)

    @property
    def seeds(self) -> int | None:
        """The number of seeds that decide in 80 % of studies if mean and spread are as seen: n where it is decided,
        None where 100,000 do not suffice."""
        if self.verdict != "undecided":
            return self.n
        if math.isinf(self.high):
            return math.ceil(1 - math.log2(1 - self.level))
        return _needed(self) if self.spread else None


def paired_effect(
    differences: Sequence[float] | np.ndarray, margin: float | None = None, level: float = 0.95
) -> PairedEffect:
    """Judges differences of pairs, one per seed, positive where the first is better: by Student's t.

    The interval is mean ± t · s / √n with n - 1 degrees of freedom. It covers the true mean, and a verdict of better or
    worse errs where nothing differs, at the stated level for normal differences at every n from 2 on; symmetric heavy
    tails err less often, a uniform distribution in up to 8 % at n ≤ 5 instead of 5 %. What leaves 0 is not equal,
    however small it is. A test of equality at `level` is two one-sided tests, each at half of what level leaves.

    Differences that are all 0 are of runs that are the same: the interval is [0, 0]. Differences that are all one other
    number are no sample of a continuous quantity: their signs alone decide, which takes 6 seeds at level 0.95.

    Args:
        differences: at least 2 finite numbers. margin: the largest difference that counts as none, above 0; without one
            nothing is called equal. level: between 0 and 1.

    Raises: InvalidTypeError or InvalidValueError for anything else.

    Source: Student 1908; equality: Schuirmann 1987, two one-sided tests.

    >>> effect = paired_effect([0.155, 0.198, 0.171], margin=0.01)
    >>> effect.verdict, round(effect.low, 3), round(effect.high, 3), effect.seeds
    ('better', 0.121, 0.229, 3)
    """
    values = _checked(differences, margin, level)
    n, mean, spread = len(values), float(values.mean()), float(values.std(ddof=1))
    if spread > _SAME * abs(mean):
        error = spread / math.sqrt(n)
        half, p = quantile(level, n - 1) * error, two_sided(mean / error, n - 1)
        low, high = mean - half, mean + half
    else:
        spread, p = 0.0, 2.0 ** (1 - n) if mean else 1.0
        low, high = (mean, mean) if not mean or p <= 1 - level else (-math.inf, math.inf)
    return PairedEffect(mean=mean, spread=spread, low=low, high=high, p=p, n=n, level=level, margin=margin)


def planned_power(expected: float, spread: float, n: int, level: float = 0.95) -> float:
    """The probability that n pairs show a difference: that the interval of `paired_effect` leaves 0 on its side.

    Args:
        expected: the true mean of the differences. spread: their standard deviation, above 0. n: pairs, at least 2.
        level: of the interval.

    Raises: InvalidValueError for anything else.

    Source: the noncentral t distribution, as in Cohen 1988, Statistical Power Analysis, chapter 2.

    >>> round(planned_power(0.1, 0.1, 10), 2)
    0.8
    """
    check(0 < spread < math.inf, "a standard deviation above 0", spread)
    check(n >= 2, "at least 2 pairs", n)
    check(0 < level < 1, "a level between 0 and 1", level)
    return power(abs(expected) / spread * math.sqrt(n), n - 1, level)


def paired_effects(
    several: Sequence[Sequence[float]] | np.ndarray, margin: float | None = None, level: float = 0.95
) -> list[PairedEffect]:
    """Judges many comparisons at once: with probability `level` none is called better or worse where nothing differs.

    Holm's procedure: the i-th smallest of m p values is tested at (1 - level) / (m - i), up to the first that fails.
    Each interval stands at the level of its own test, so that it leaves 0 exactly where the verdict says so.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.

    >>> [e.verdict for e in paired_effects([[0.1, 0.11, 0.12, 0.1], [0.1, -0.1, 0.2, 0.1]])]
    ['better', 'undecided']
    """
    p = [paired_effect(differences, margin, level).p for differences in several]
    levels, test = [level] * len(p), 1 - (1 - level) / max(1, len(p))
    failed = False
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        if not failed:
            test = 1 - (1 - level) / (len(p) - rank)
            failed = p[i] > 1 - test
        levels[i] = test
    return [paired_effect(differences, margin, own) for differences, own in zip(several, levels)]


def _checked(differences: Sequence[float] | np.ndarray, margin: float | None, level: float) -> np.ndarray:
    try:
        values = np.asarray(differences, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(f"expected a list of differences, one number per seed, got {differences!r}") from error
    if values.ndim != 1 or len(values) < 2:
        raise InvalidValueError(
            f"expected 2 or more differences in a row, one per seed, got shape {values.shape}: one seed is not a sample"
        )
    if not np.isfinite(values).all():
        raise InvalidValueError(f"expected finite differences, got {differences!r}: leave runs without a loss out")
    if margin is not None and not 0 < margin < math.inf:
        raise InvalidValueError(f"expected a margin above 0 or None, got {margin}")
    check(0 < level < 1, "a level between 0 and 1", level)
    return values


@functools.lru_cache(maxsize=4096)
def _shift(n: int, level: float) -> float:
    """The true mean, in standard errors, that a test of n differences sees with probability POWER."""
    low, high = 0.0, 4 * quantile(level, n - 1)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, n - 1, level) < POWER else (low, middle)
    return high


def _needed(effect: PairedEffect) -> int | None:
    """The number of differences that decide, in either direction or that there is none."""
    size, level = abs(effect.mean) / effect.spread, effect.level
    found = [_first(effect.n, lambda m: power(size * math.sqrt(m), m - 1, level) >= POWER)]
    room = -1.0 if effect.margin is None else effect.margin / effect.spread - size
    if room > 0:
        # Both sides must hold: each with half of what POWER leaves.
        found.append(_first(effect.n, lambda m: power(room * math.sqrt(m), m - 1, level) >= (1 + POWER) / 2))
    return min((m for m in found if m is not None), default=None)


def _first(above: int, holds: Callable[[int], bool]) -> int | None:
    """The smallest number above this one for which it holds, where it holds for all that are larger."""
    low, high = above, 2 * above
    while not holds(high):
        low, high = high, 2 * high
        if high > _MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
