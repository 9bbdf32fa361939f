"""The statistical judgement of paired differences: interval, test, what could have been seen, and a verdict."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, final

import numpy as np

from qkeel.errors import InvalidTypeError, InvalidValueError, check
from qkeel.metrics.student_t import power, quantile, two_sided

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
            f"expected at least 2 differences in a row, one per seed, got shape {values.shape}: one seed is no sample"
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
