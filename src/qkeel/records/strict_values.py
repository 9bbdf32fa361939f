"""Values that a file of settings may hold: numbers of bounded size, text that can be printed, bounded nesting."""

from __future__ import annotations

import math

MOST_DEPTH = 64  # tables and lists inside each other
LEAST_INTEGER, MOST_INTEGER = -(1 << 63), (1 << 64) - 1
_MOST_DIGITS = 20  # of MOST_INTEGER


def read_integer(digits: str) -> int:
    """A whole number between -2⁶³ and 2⁶⁴ - 1, as every reader of JSON can hold it.

    >>> read_integer("12")
    12
    """
    if len(digits) > _MOST_DIGITS or not LEAST_INTEGER <= (number := int(digits)) <= MOST_INTEGER:
        raise ValueError(f"expected a whole number of at most 64 bits, got one of {len(digits)} digits")
    return number


def read_float(digits: str) -> float:
    """A number that a float64 can hold; one that would become infinite is refused.

    >>> read_float("1.5")
    1.5
    """
    number = float(digits)
    if math.isinf(number) and "inf" not in digits.lower():
        raise ValueError(f"expected a number of magnitude below 1.8e308, got {digits[:40]}")
    return number


def refuse_strange(value: object, depth: int = 0) -> None:
    """Raises ValueError for tables and lists nested too deep, integers of too many bits, text that is not Unicode."""
    if depth >= MOST_DEPTH and isinstance(value, (dict, list)):
        raise ValueError(f"expected at most {MOST_DEPTH} tables or lists inside each other")
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise ValueError(f"expected Unicode text, got half of a surrogate pair in {value[:40]!r}")
    elif isinstance(value, int):
        if not LEAST_INTEGER <= value <= MOST_INTEGER:
            raise ValueError("expected a whole number of at most 64 bits, got a larger one")
    elif isinstance(value, dict):
        for key, inner in value.items():
            refuse_strange(key, depth + 1)
            refuse_strange(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            refuse_strange(inner, depth + 1)
