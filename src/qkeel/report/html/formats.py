"""Numbers as people write them, and as charts carry them: rounded, and thinned by leaving records out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

MINUS = "\u2212"


def number(value: float | None, digits: int = 3) -> str:
    """A number to `digits` significant digits: 25, 11,000, 1.2e5, NaN; a dash for None.

    >>> [number(x, 2) for x in (24.93, 10_832.0, 117_000.0, 0.0312, -3.0, math.nan, None)]
    ['25', '11,000', '1.2e5', '0.031', '−3', 'NaN', '–']
    """
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if value == 0:
        return "0"
    rounded = float(f"{abs(value):.{digits - 1}e}")
    sign = MINUS if value < 0 else ""
    if not 1e-4 <= rounded < 1e5:
        mantissa, exponent = f"{rounded:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{sign}{mantissa}e{MINUS if int(exponent) < 0 else ''}{abs(int(exponent))}"
    places = max(0, digits - 1 - math.floor(math.log10(rounded)))
    text = f"{rounded:,.{places}f}"
    return sign + (text.rstrip("0").rstrip(".") if "." in text else text)


def loss(value: float | None) -> str:
    """A loss, to three decimals.

    >>> loss(2.82651)
    '2.827'
    """
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{value:.3f}".replace("-", MINUS)


def signed(value: float, places: int = 3) -> str:
    """A difference with its sign.

    >>> [signed(x) for x in (0.0012, -0.0591, 0.0)]
    ['+0.001', '−0.059', '0.000']
    """
    if not math.isfinite(value):
        return number(value)
    rounded = round(value, places)
    sign = "+" if rounded > 0 else MINUS if rounded < 0 else ""
    return f"{sign}{abs(rounded):.{places}f}"


def rate(value: float) -> str:
    """A learning rate, short and exact.

    >>> [rate(x) for x in (0.1, 0.003, 3e-5, 1.0)]
    ['0.1', '0.003', '3e−5', '1']
    """
    text = f"{value:g}"
    if "e" not in text:
        return text
    mantissa, exponent = text.split("e")
    return f"{mantissa}e{MINUS if int(exponent) < 0 else ''}{abs(int(exponent))}"


def count(n: int, noun: str) -> str:
    """A count with its noun.

    >>> count(1, "seed"), count(1200, "step")
    ('1 seed', '1,200 steps')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def listing(words: Sequence[str]) -> str:
    """Words joined as in a sentence.

    >>> listing(["a", "b", "c"])
    'a, b and c'
    """
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else ""


MAX_RECORDS = 300  # per run


def rounded(value: float | None, digits: int = 5) -> float | int | None:
    """Returns a number to a few significant digits; None for what JSON cannot hold.

    >>> rounded(3.14159265), rounded(float("nan")), rounded(1e6)
    (3.1416, None, 1000000)
    """
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def series(values: np.ndarray, digits: int = 4) -> list[float | int | None]:
    """Returns numbers as JSON has them: rounded, None where there is none."""
    return [rounded(float(value), digits) for value in values]


def thin(heights: Sequence[float | None], limit: int = MAX_RECORDS) -> list[int]:
    """Returns at most `limit` indices: the first, the last, and of each stretch between the one of the largest value.

    >>> thin([0.0, 1.0, 5.0, 2.0, 1.0, 0.0], limit=4)
    [0, 2, 3, 5]
    """
    if len(heights) <= limit:
        return list(range(len(heights)))
    edges = np.linspace(1, len(heights) - 1, limit - 1).astype(int)
    middle = [max(range(a, b), key=lambda i: _height(heights[i])) for a, b in itertools.pairwise(edges) if b > a]
    return [0, *middle, len(heights) - 1]


def _height(value: float | None) -> float:
    return -math.inf if value is None else math.inf if math.isnan(value) else value
