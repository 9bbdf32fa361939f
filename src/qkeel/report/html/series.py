"""Numbers for charts, small enough to carry in a page: rounded, and thinned by leaving records out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

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
