"""HTML of reports: number formats, cells of tables, and the file that contains everything inline, made by the templates in
`assets`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import lzma
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import jinja2

# Numbers as text and as chart data, which is rounded and thinned by omitting records.

MINUS = "\u2212"


def number(value: float | None, digits: int = 3) -> str:
    """Formats a number with `digits` significant digits, like 25, 11,000, 1.2e5 or NaN, or as a dash for None.

    >>> [number(x, 2) for x in (24.93, 10_832.0, 117_000.0, 0.0312, -3.0, math.nan, None)]
    ['25', '11,000', '1.2e5', '0.031', '−3', 'NaN', '–']
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return {math.inf: "∞", -math.inf: f"{MINUS}∞"}.get(value, "NaN")
    # -0.0 is written as 0.
    short = float(f"{value:.{digits}g}") or 0.0
    if short == 0 or 1e-4 <= abs(short) < 1e5:
        return f"{short:,}".removesuffix(".0").replace("-", MINUS)
    return _short_exponent(f"{value:.{digits}g}")


def loss(value: float | None) -> str:
    """Formats a loss with three decimals.

    >>> loss(2.82651)
    '2.827'
    """
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{value:.3f}".replace("-", MINUS)


def signed(value: float, places: int = 3) -> str:
    """Formats a difference with its sign.

    >>> [signed(x) for x in (0.0012, -0.0591, 0.0)]
    ['+0.001', '−0.059', '0.000']
    """
    if not math.isfinite(value):
        return number(value)
    short = round(value, places) or 0.0
    return f"{short:{'+' if short else ''}.{places}f}".replace("-", MINUS)


def rate(value: float) -> str:
    """Formats a learning rate in short form.

    >>> [rate(x) for x in (0.1, 0.003, 3e-5, 1.0)]
    ['0.1', '0.003', '3e−5', '1']
    """
    return _short_exponent(f"{value:g}")


def _short_exponent(text: str) -> str:
    return re.sub(r"e\+?(-?)0*", r"e\1", text).replace("-", MINUS)


def count(n: int, noun: str) -> str:
    """Formats a count with its noun.

    >>> count(1, "seed"), count(1200, "step")
    ('1 seed', '1,200 steps')
    """
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def listing(words: Sequence[str]) -> str:
    """Joins words into a phrase, with commas and a conjunction.

    >>> listing(["a", "b", "c"])
    'a, b and c'
    """
    if len(words) < 2:
        return "".join(words)
    *others, last = words
    return f"{', '.join(others)} and {last}"


# Per run.
MAX_RECORDS = 300


def rounded(value: float | None, digits: int = 5) -> float | int | None:
    """Rounds to a few significant digits; returns None for values that JSON cannot represent.

    >>> rounded(3.14159265), rounded(float("nan")), rounded(1e6)
    (3.1416, None, 1000000)
    """
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    # Without ".0" the page is shorter; a very large float is shorter with its exponent.
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def series(values: np.ndarray, digits: int = 4) -> list[float | int | None]:
    """Converts numbers to JSON values, rounded, with None for missing values."""
    return [rounded(float(value), digits) for value in values]


def thin(heights: Sequence[float | None], limit: int = MAX_RECORDS) -> list[int]:
    """Returns at most `limit` indices: the first, the last, and that of the largest value in each interval between.

    NaN counts as larger than any number, and a missing value as smaller.

    >>> thin([0.0, 1.0, 5.0, 2.0, 1.0, 0.0], limit=4)
    [0, 2, 3, 5]
    """
    if len(heights) <= limit:
        return list(range(len(heights)))
    levels = np.array([-math.inf if x is None else x for x in heights])
    levels[np.isnan(levels)] = math.inf
    # `limit` - 1 edges bound `limit` - 2 intervals, as the first and the last record stay in any case.
    edges = np.linspace(1, len(heights) - 1, limit - 1).astype(int).tolist()
    # The largest value of each interval preserves spikes, which averaging would hide.
    indices = [0]
    for start, end in itertools.pairwise(edges):
        indices.append(start + int(levels[start:end].argmax()))
    return [*indices, len(heights) - 1]


# Tables of a page, sortable by the numbers in their cells.


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A cell: its text, the number by which its column is sorted, a smaller text below, and its class in the styles."""

    text: str
    sort: str = ""
    small: str = ""
    kind: str = "text"


@dataclasses.dataclass(frozen=True, slots=True)
class Swatch:
    """A name with the colour of its series, which is the same everywhere on the page."""

    text: str
    series: int
    round: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table: the headings of its columns of texts, then of numbers, and each row's name with its cells."""

    title: str
    texts: Sequence[str]
    numbers: Sequence[str]
    rows: Sequence[tuple[str | Swatch, Sequence[Cell]]]


def cell(text: str, key: float, small: str = "", kind: str = "") -> Cell:
    """Returns a number cell, where `key` is the sort key and `small` is shown below the text."""
    # The page sorts by this number, and NaN would have no place in the order.
    sort = "inf" if math.isnan(key) else f"{key:g}"
    return Cell(text, sort, small, f"num {kind}".strip())


def measured(value: float) -> Cell:
    """Returns the cell of a measured value, or a dash for NaN, which means not measured."""
    return NOTHING if math.isnan(value) else cell(number(value), value)


NOTHING = cell("–", math.inf)


# The file, made by a template. It loads nothing else.

ASSETS = Path(__file__).parent / "assets"
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def render(page: Mapping[str, object], *, refresh: float | None = None) -> str:
    """Returns the HTML of a page; with `refresh`, browsers load the file again after this number of seconds.

    Args:
        page: what its template in `assets`, named by "template", fills in.
        refresh: the number of seconds.
    """
    data = json.dumps(page["data"], separators=(",", ":"), allow_nan=False)
    filled = {
        **page,
        # A string that contains "</script>" would end the element.
        "data": data.replace("<", "\\u003c"),
        "refresh": None if refresh is None else f"{refresh:g}",
    }
    return _environment().get_template(str(page["template"])).render(filled)


@functools.cache
def _environment() -> jinja2.Environment:
    # Here, because commands that write no page need not wait for it.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(asset=_asset, policy=POLICY)
    return environment


@functools.cache
def _asset(name: str) -> str:
    """Returns a file of the page's own styles and scripts."""
    stored = (ASSETS / name).read_bytes()
    # The library of charts is compressed, or it would be a tenth of the source distribution.
    if name.endswith(".xz"):
        stored = lzma.decompress(stored)
    return stored.decode("utf-8")
