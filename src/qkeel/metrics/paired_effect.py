"""Paired differences: their mean with Student's interval, and a verdict. `report.compare` pairs the runs of a study by seed."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, final

import numpy as np

from qkeel.errors import InvalidTypeError, InvalidValueError, check

# Student's t distribution, in closed form, because scipy is not a dependency of the report.


def coverage(t: float, freedom: int) -> float:
    """Returns P(|T| ≤ t) for Student's t with a whole number of degrees of freedom.

    With θ = atan(t / √ν) it is sin θ Σ a_i cos²ⁱ θ for even ν, and 2/π (θ + sin θ cos θ Σ b_i cos²ⁱ θ) for odd ν.

    Source: Abramowitz & Stegun 1964, 26.7.3 and 26.7.4.

    >>> round(coverage(12.706204736, 1), 9)
    0.95
    """
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    cosine = math.cos(angle)
    term, total = cosine if odd else 1.0, 0.0
    for i in range(1, (freedom - odd) // 2 + 1):
        total += term
        term *= cosine * cosine * (2 * i - 1 + odd) / (2 * i + odd)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


@functools.lru_cache(maxsize=4096)
def quantile(level: float, freedom: int) -> float:
    """Returns the t for which P(|T| ≤ t) = level.

    >>> round(quantile(0.95, 7), 6)
    2.364624
    """
    # Bisection on ln t: with one degree of freedom t spans many orders of magnitude.
    low, high = -20.0, 60.0
    # 90 halvings of an interval of 80 end well below the resolution of a float.
    for _ in range(90):
        middle = (low + high) / 2
        if coverage(math.exp(middle), freedom) < level:
            low = middle
        else:
            high = middle
    return math.exp(high)


Verdict = Literal["better", "worse", "equal", "undecided"]
# a spread below this share of the mean is rounding: the differences are all the same
# number.
_SAME = 1e-9


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairedEffect:
    """The mean of paired differences with its interval and verdict; positive means better.

    >>> effect = paired_effect([0.4375, 0.5, 0.5625])
    >>> effect.mean, effect.n, effect.verdict
    (0.5, 3, 'better')
    """

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
    differences: Sequence[float] | np.ndarray,
    margin: float | None = None,
    level: float = 0.95,
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
    return PairedEffect(
        mean=mean, low=mean - half, high=mean + half, n=n, level=level, margin=margin
    )


def _checked(
    differences: Sequence[float] | np.ndarray, margin: float | None, level: float
) -> np.ndarray:
    try:
        values = np.asarray(differences, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(
            f"expected a list of differences, one number per seed, got {differences!r}"
        ) from error
    if values.ndim != 1 or len(values) < 2:
        raise InvalidValueError(
            f"expected 2 or more differences, one per seed (a single seed is not a sample), got shape {values.shape}"
        )
    if not np.isfinite(values).all():
        raise InvalidValueError(
            f"expected finite differences, got {differences!r}; leave out runs without a loss"
        )
    if margin is not None and not 0 < margin < math.inf:
        raise InvalidValueError(f"expected a margin above 0 or None, got {margin}")
    check(0 < level < 1, "a level between 0 and 1", level)
    return values
