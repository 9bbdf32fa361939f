"""Spec strings: of remedies, of presets and of positions."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.hostile import numbers, texts
from tests.fuzz.hunt import Hunt

from qkeel import preset
from qkeel.errors import InvalidValueError
from qkeel.lab import LongContexts
from qkeel.options import parse
from qkeel.remedies.apply import REMEDIES
from qkeel.remedies.apply import parse as parse_remedies
from qkeel.spec import PRESETS

_OPTIONS = [
    "tau",
    "cap",
    "threshold",
    "over",
    "gain",
    "base",
    "factor",
    "eps",
    "alpha",
    "ratio",
    "window",
    "train_length",
]


def inputs() -> SearchStrategy[tuple[str, str]]:
    """Who reads, and the text."""
    name = st.one_of(st.sampled_from([*REMEDIES, *PRESETS]), texts())
    value = st.one_of(numbers().map(str), texts(), st.sampled_from(["true", "head", "layer", "1e400", "0x1", "1_000"]))
    option = st.builds("{}={}".format, st.one_of(st.sampled_from(_OPTIONS), texts()), value)
    term = st.builds(lambda n, options: ":".join([n, ",".join(options)]), name, st.lists(option, max_size=3))
    text = st.one_of(st.lists(term, min_size=1, max_size=3).map("+".join), st.text(":=,+e1.a ", max_size=15), texts())
    return st.tuples(st.sampled_from(["terms", "remedies", "preset", "method"]), text)


def check(case: tuple[str, str]) -> object:
    """Reads the text; what reads it gives a value that can be printed."""
    reader, text = case
    if reader == "terms":
        try:
            terms = parse(text)
        except InvalidValueError:  # an empty name, or a colon without an option
            return None
        assert parse("+".join(map(str, terms))) == terms or "nan" in text.lower()
        return None
    if reader == "preset":
        name, _, rest = text.partition(":")
        return preset(name, **parse(f"x:{rest}")[0].options).explain()
    return LongContexts(posthoc=[text]).posthoc if reader == "method" else str(parse_remedies(text))


HUNT = Hunt(inputs=inputs, check=check)
