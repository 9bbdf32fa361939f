"""Student's t distribution: tail, quantile, and the power of a test, without scipy, which the report does without."""

from __future__ import annotations

import functools
import math

import numpy as np

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
