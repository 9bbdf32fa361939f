"""Statistical tests of paired differences: mean, interval, p-value and verdict."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Literal, final

import numpy as np

from qkeel.errors import InvalidTypeError, InvalidValueError, check

# Student's t distribution: tail, quantile and power. Written out because scipy is not a dependency of the report.

_TINY = 1e-300  # replaces 0 as a denominator in Lentz's method


def two_sided(t: float, freedom: int) -> float:
    """Returns P(|T| ≥ |t|) for Student's t with `freedom` degrees of freedom, accurate to 12 digits.

    The value is the regularised incomplete beta function I_x(ν/2, 1/2) at x = ν / (ν + t²).

    >>> round(two_sided(12.706204736, 1), 9)
    0.05
    """
    square = min(t * t, 1e300)
    x, y = freedom / (freedom + square), square / (freedom + square)
    if not y:
        return 1.0
    a, b = freedom / 2, 0.5
    # The continued fraction converges fast only below the mean of the distribution; above it I_x(a, b) = 1 - I_y(b, a).
    whole = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(whole + a * math.log(x) + b * math.log(y))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, y) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Continued fraction of the incomplete beta function, by Lentz's method.

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
    """Returns the t for which P(|T| ≤ t) = level.

    >>> round(quantile(0.95, 7), 6)
    2.364624
    """
    # Bisection on ln t: with one degree of freedom t spans many orders of magnitude.
    low, high = -20.0, 60.0
    for _ in range(90):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(math.exp(middle), freedom) > 1 - level else (low, middle)
    return math.exp(high)


def power(shift: float, freedom: int, level: float) -> float:
    """Returns the probability that a t test at `level` detects an effect of `shift` standard errors, in its direction.

    This is P(T' > t) for the noncentral t distribution, computed as the mean of Φ(shift - t·s) over the distribution of
    the sample's standard deviation s, in units of the true one.

    >>> round(power(2.802, 10_000, 0.95), 2)
    0.8
    """
    # s has a standard deviation of about 1/√(2ν), so the grid spans 9 of them on each side.
    t, width = quantile(level, freedom), 9 / math.sqrt(2 * freedom)
    s = np.linspace(max(0.0, 1 - width), 1 + width, 401)[1:]
    weight = (freedom - 1) * np.log(s) - freedom * s * s / 2
    weight = np.exp(weight - weight.max())  # the largest weight is 1, so nothing underflows
    passed = np.array([math.erfc((t * x - shift) / math.sqrt(2)) / 2 for x in s])
    return float(weight @ passed / weight.sum())


# Bootstrap intervals over seeds, for statistics other than a mean of differences.

RESAMPLES = 10_000


def bootstrap_interval(
    values: Sequence[float],
    statistic: Callable[..., np.ndarray] = np.mean,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Returns a bootstrap interval of a statistic over seeds; the result is bit-identical for the same values.

    Percentiles are expanded to Φ(±t·√(n / (n - 1))), with Student's t in place of the normal quantile, because plain
    percentiles are too narrow for few seeds. With 3 seeds or fewer, the interval spans all values that resampling can
    produce.

    Args:
        values: one number per seed; infinity is allowed.
        statistic: reduces [samples n] along `axis`, like numpy.mean or numpy.min.
        level: coverage, between 0 and 1.
        seed: seed of the resampling.

    Raises:
        InvalidValueError: there are fewer than 2 values, or a value is NaN.

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


# Exact intervals for few seeds, and corrections for repeated looks at growing data and for many rows on a page.

_ALL = 18  # up to this many differences, all subsets are enumerated: 262,143 means
_DRAWN = 1 << 18  # number of random subsets beyond that
_NODES = 96  # quadrature nodes between the boundaries of one look


def exact_interval(differences: Sequence[float] | np.ndarray, level: float) -> tuple[float, float]:
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
        InvalidValueError: a difference is not finite, or the level is not between 0 and 1.

    Source: Hartigan 1969, Using subsample values as typical values.

    >>> exact_interval([1.0, 2.0, 4.0], level=0.75)
    (1.0, 4.0)
    >>> exact_interval([1.0, 2.0, 4.0], level=0.9)
    (-inf, inf)
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise InvalidValueError(
            f"expected a sequence of differences without NaN or infinity, one per seed, got {differences!r}"
        )
    check(0 < level < 1, "a level between 0 and 1", level)
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
            sums, counts = np.concatenate([sums, sums + value]), np.concatenate([counts, counts + 1])
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
    check(0 < error < 1, "an error between 0 and 1", error)
    low, high = error / looks, error
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _crossing(middle, looks) < error else (low, middle)
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
        mass = (step @ mass) * weights * edge  # per node, multiplied by its quadrature weight
        grid, kept = new, float(mass.sum())
    return 1 - kept


@functools.cache
def _rule() -> tuple[np.ndarray, np.ndarray]:
    """Returns the nodes and weights of Gauss–Legendre quadrature between -1 and 1."""
    return np.polynomial.legendre.leggauss(_NODES)


def common_level(decided: Callable[[float], int], rows: int, error: float, looks: int = 1) -> float:
    """Returns one level for all intervals of a page, chosen to control the expected share of wrong verdicts.

    Let R be the largest number such that intervals at level 1 - nominal(error · R / rows, looks) decide at least R
    rows. Then the expected share of decided rows whose interval misses the true value is at most `error`. If no row is
    decided, the level is that for R = 1.

    Args:
        decided: maps a level to the number of rows that intervals at this level decide.
        rows: number of rows.
        error: allowed share of wrong verdicts, between 0 and 1.
        looks: the maximum number of times that the rows are inspected while seeds are added.

    Raises:
        InvalidValueError: a number is out of range.

    Source: Benjamini & Hochberg 1995; for intervals: Benjamini & Yekutieli 2005, False coverage rate.
    """
    check(rows >= 1, "at least 1 row", rows)
    # From the most permissive level down: the first that is consistent with its own number of decisions.
    for r in range(rows, 0, -1):
        level = 1 - nominal(error * r / rows, looks)
        if decided(level) >= r:
            return level
    return 1 - nominal(error / rows, looks)


# Paired differences: interval, test, detectable effect and verdict.

Verdict = Literal["better", "worse", "equal", "undecided"]
POWER = 0.8  # probability of detecting the effect, for which numbers of seeds are computed
_MOST = 100_000  # a larger number of seeds is not a useful answer
_SAME = 1e-9  # a spread below this share of the mean is rounding: the differences are all the same number


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairedEffect:
    """The mean of paired differences with its interval and verdict; positive means better."""

    mean: float  #: mean of the differences
    spread: float  #: standard deviation of the differences, with n - 1 in the denominator
    low: float  #: lower end of the interval of the mean
    high: float  #: upper end of the interval of the mean
    p: float  #: two-sided p-value of the hypothesis that the mean is inside ±margin (or 0), without correction
    n: int  #: number of differences, one per seed
    level: float  #: coverage of the interval; the rate of false verdicts of better or worse is at most 1 - level
    margin: float | None  #: the largest difference that counts as zero

    @property
    def verdict(self) -> Verdict:
        """ "better" or "worse" if the interval lies beyond ±margin, "equal" if it lies inside, otherwise
        "undecided"."""
        margin = self.margin or 0.0
        if self.low > margin or self.high < -margin:
            return "better" if self.low > margin else "worse"
        return "equal" if -margin < self.low and self.high < margin else "undecided"

    @property
    def detectable(self) -> float:
        """The smallest true mean that a study with this n and spread finds to be beyond the margin in 80 % of cases."""
        shift = math.inf if math.isinf(self.high) else _shift(self.n, self.level) * self.spread / math.sqrt(self.n)
        return (self.margin or 0.0) + shift

    @property
    def seeds(self) -> int | None:
        """The number of seeds with which 80 % of studies reach a verdict, if mean and spread are as observed.

        The result is n if the verdict is already decided, and None if 100,000 seeds are not enough.
        """
        if self.verdict != "undecided":
            return self.n
        if math.isinf(self.high):
            return math.ceil(1 - math.log2(1 - self.level))
        return _needed(self) if self.spread else None


def paired_effect(
    differences: Sequence[float] | np.ndarray, margin: float | None = None, level: float = 0.95
) -> PairedEffect:
    """Judges paired differences, one per seed and positive where the first run is better, with Student's t.

    The interval is mean ± t · s / √n with n - 1 degrees of freedom. For normal differences it has the stated coverage,
    and if nothing differs, a verdict of better or worse has the stated error, for every n from 2 on. The error is
    smaller for symmetric distributions with heavy tails, and up to 8 % instead of 5 % for a uniform distribution and n
    ≤ 5. The verdict depends on one interval, in this order: beyond the margin, inside it, or undecided; a difference
    whose interval lies above 0 but inside the margin is therefore called equal. The test of equality at `level`
    consists of two one-sided tests, each at half of 1 - level.

    If all differences are 0, the runs are identical and the interval is [0, 0]. If all differences are the same number
    other than 0, they are not a sample of a continuous quantity, so only their signs count, and a verdict takes 6 seeds
    at level 0.95.

    Args:
        differences: at least 2 finite numbers.
        margin: the largest difference that counts as zero, above 0; without a margin, every difference from 0 counts
            and no verdict is "equal".
        level: coverage, between 0 and 1.

    Raises:
        InvalidTypeError: the differences are not a list of numbers.
        InvalidValueError: a number is out of range, or there are fewer than 2 differences.

    Source: Student 1908; equality: Schuirmann 1987, two one-sided tests.

    >>> effect = paired_effect([0.155, 0.198, 0.171], margin=0.01)
    >>> effect.verdict, round(effect.low, 3), round(effect.high, 3), effect.seeds
    ('better', 0.121, 0.229, 3)
    """
    values = _checked(differences, margin, level)
    n, mean, spread = len(values), float(values.mean()), float(values.std(ddof=1))
    beyond = max(0.0, abs(mean) - (margin or 0.0))
    if spread > _SAME * abs(mean):
        error = spread / math.sqrt(n)  # standard error of the mean
        half, p = quantile(level, n - 1) * error, two_sided(beyond / error, n - 1)
        low, high = mean - half, mean + half
    else:
        # Equal differences: a two-sided sign test, whose p-value is 2 · 2⁻ⁿ.
        spread, signs = 0.0, 2.0 ** (1 - n)
        low, high = (mean, mean) if not mean or signs <= 1 - level else (-math.inf, math.inf)
        p = signs if beyond else 1.0
    return PairedEffect(mean=mean, spread=spread, low=low, high=high, p=p, n=n, level=level, margin=margin)


def planned_power(expected: float, spread: float, n: int, level: float = 0.95, margin: float | None = None) -> float:
    """Returns the probability that `paired_effect`, applied to n pairs, finds a difference in the expected direction.

    The difference counts as found if the interval lies entirely beyond the margin on the expected side.

    Args:
        expected: true mean of the differences.
        spread: standard deviation of the differences, above 0.
        n: number of pairs, at least 2.
        level: coverage of the interval.
        margin: the largest difference that counts as zero; None means 0.

    Raises:
        InvalidValueError: an argument is out of range.

    Source: the noncentral t distribution, as in Cohen 1988, Statistical Power Analysis, chapter 2.

    >>> round(planned_power(0.1, 0.1, 10), 2)
    0.8
    """
    check(0 < spread < math.inf, "a standard deviation above 0", spread)
    check(n >= 2, "at least 2 pairs", n)
    check(0 < level < 1, "a level between 0 and 1", level)
    return power((abs(expected) - (margin or 0.0)) / spread * math.sqrt(n), n - 1, level)


def paired_effects(
    several: Sequence[Sequence[float]] | np.ndarray, margin: float | None = None, level: float = 0.95
) -> list[PairedEffect]:
    """Judges several comparisons together; with a probability of at least `level`, no comparison is falsely called
    better or worse.

    Holm's procedure tests the i-th smallest of m p-values at (1 - level) / (m - i) and stops at the first failure. Each
    interval has the level of its own test, so it lies beyond the margin if and only if the test rejects.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.

    >>> [e.verdict for e in paired_effects([[0.1, 0.11, 0.12, 0.1], [0.1, -0.1, 0.2, 0.1]])]
    ['better', 'undecided']
    """
    p = [paired_effect(differences, margin, level).p for differences in several]
    levels, test = [level] * len(p), 1 - (1 - level) / max(1, len(p))
    failed = False
    for rank, i in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        if not failed:  # after the first failure all larger p-values fail too, at the level of the first
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
            f"expected 2 or more differences, one per seed (a single seed is not a sample), got shape {values.shape}"
        )
    if not np.isfinite(values).all():
        raise InvalidValueError(f"expected finite differences, got {differences!r}; leave out runs without a loss")
    if margin is not None and not 0 < margin < math.inf:
        raise InvalidValueError(f"expected a margin above 0 or None, got {margin}")
    check(0 < level < 1, "a level between 0 and 1", level)
    return values


@functools.lru_cache(maxsize=4096)
def _shift(n: int, level: float) -> float:
    """Returns the true mean, in standard errors, that a test of n differences detects with probability POWER."""
    low, high = 0.0, 4 * quantile(level, n - 1)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, n - 1, level) < POWER else (low, middle)
    return high


def _needed(effect: PairedEffect) -> int | None:
    """Returns the number of differences after which the verdict is decided: better, worse or equal."""
    beyond, level = (abs(effect.mean) - (effect.margin or 0.0)) / effect.spread, effect.level
    # Inside the margin both one-sided tests must succeed, so each may fail with half of 1 - POWER.
    needed = POWER if beyond > 0 else (1 + POWER) / 2
    return _first(effect.n, lambda m: power(abs(beyond) * math.sqrt(m), m - 1, level) >= needed) if beyond else None


def _first(above: int, holds: Callable[[int], bool]) -> int | None:
    """Returns the smallest number above `above` for which the monotone predicate `holds`; None beyond _MOST."""
    low, high = above, 2 * above
    while not holds(high):
        low, high = high, 2 * high
        if high > _MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
