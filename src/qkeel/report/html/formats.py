"""Numbers as people write them."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
