"""Values and texts that no program expects: huge, tiny, empty, deep, of the wrong type, hardly printable."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

NUMBERS = [0, 1, 2, -1, 3, 7, 8, 16, 64, 2**31, 2**53, 2**63, 2**64, 10**30, -(2**63)]
FLOATS = [
    0.0,
    -0.0,
    0.5,
    1.0,
    -1.0,
    1e-8,
    1e-300,
    1e300,
    1.8e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e4,
]
TEXTS = [
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "none",
    "auto",
    "true",
    "\n",
    "\x00",
    "\x7f",
    "é",
    "𝄞",
    "a" * 300,
    "..",
    "/",
    "%s",
]


def numbers() -> SearchStrategy[int | float]:
    """Whole and other numbers."""
    return st.one_of(
        st.sampled_from(NUMBERS),
        st.sampled_from(FLOATS),
        st.integers(-10, 100),
        st.floats(-1e3, 1e3, width=32),
    )


def texts() -> SearchStrategy[str]:
    """Short texts."""
    return st.one_of(st.sampled_from(TEXTS), st.text(max_size=12))


def plain() -> SearchStrategy[Any]:
    """A value that no file nests."""
    return st.one_of(st.none(), st.booleans(), numbers(), texts())


def values() -> SearchStrategy[Any]:
    """A value as JSON has them."""
    return st.recursive(
        plain(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(texts(), inner, max_size=3)
        ),
        max_leaves=6,
    )
