"""Paired differences: their mean with Student's interval, and a verdict."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, final

import numpy as np

from qkeel.errors import InvalidTypeError, InvalidValueError, check

# Student's t distribution. Written out because scipy is not a dependency of the report.

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


Verdict = Literal["better", "worse", "equal", "undecided"]
_SAME = 1e-9  # a spread below this share of the mean is rounding: the differences are all the same number


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairedEffect:
    """The mean of paired differences with its interval and verdict; positive means better."""

    mean: float  #: mean of the differences
    low: float  #: lower end of the interval of the mean
    high: float  #: upper end of the interval of the mean
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


def paired_effect(
    differences: Sequence[float] | np.ndarray, margin: float | None = None, level: float = 0.95
) -> PairedEffect:
    """Judges paired differences, one per seed, by the interval mean ± t · s / √n of Student's t with n - 1 degrees of
    freedom.

    If all differences are equal, they are judged by their signs instead: the interval is the mean itself if
    2 · 2⁻ⁿ ≤ 1 - level, and infinite otherwise.

    Args:
        differences: one finite number per seed, at least 2.
        margin: the largest difference that counts as zero, above 0; None means that every difference counts.
        level: coverage, between 0 and 1.

    Raises:
        InvalidTypeError: the differences are not a list of numbers.
        InvalidValueError: a number is out of range, or there are fewer than 2 differences.

    Source: Student 1908; equality: Schuirmann 1987, two one-sided tests.

    >>> effect = paired_effect([0.155, 0.198, 0.171], margin=0.01)
    >>> effect.verdict, round(effect.low, 3), round(effect.high, 3)
    ('better', 0.121, 0.229)
    """
    values = _checked(differences, margin, level)
    n, mean, spread = len(values), float(values.mean()), float(values.std(ddof=1))
    if spread > _SAME * abs(mean):
        half = quantile(level, n - 1) * spread / math.sqrt(n)
    else:
        half = 0.0 if not mean or 2.0 ** (1 - n) <= 1 - level else math.inf
    return PairedEffect(mean=mean, low=mean - half, high=mean + half, n=n, level=level, margin=margin)


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
