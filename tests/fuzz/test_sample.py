"""Spec strings of any kind are right, or refused with a QkeelError that says why: a sample of them."""

from __future__ import annotations

import logging

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from qkeel import preset
from qkeel.errors import InvalidValueError, QkeelError
from qkeel.lab import LongContexts
from qkeel.options import parse
from qkeel.remedies.apply import REMEDIES
from qkeel.remedies.apply import parse as parse_remedies
from qkeel.spec import PRESETS

# Huge, tiny, empty, hardly printable.
NUMBERS = [0, 1, -1, 64, 2**53, 2**64, -(2**63), -0.0, 1e-300, 1e300, 1e400, 0.5]
TEXTS = ["", " ", "nan", "inf", "none", "auto", "true", "\n", "\0", "\x7f", "𝄞", "%s"]
TEXTS += ["a" * 300, "..", "/", "head", "layer", "1e400", "0x1", "1_000"]
OPTIONS = "tau cap threshold over gain base factor eps alpha ratio window train_length"
texts = st.sampled_from(TEXTS) | st.text(max_size=12)
values = st.sampled_from(NUMBERS) | st.floats(-1e3, 1e3, width=32) | texts
option = st.builds("{}={}".format, st.sampled_from(OPTIONS.split()) | texts, values)
options = st.lists(option, max_size=3).map(",".join)
names = st.sampled_from([*REMEDIES, *PRESETS]) | texts
term = st.builds("{}:{}".format, names, options)
terms = st.lists(term, min_size=1, max_size=3).map("+".join)
signs = st.text(":=,+e1.a ", max_size=15)


def read_terms(text):
    try:
        read = parse(text)
    except InvalidValueError:  # an empty name, or a colon without an option
        return
    assert parse("+".join(map(str, read))) == read or "nan" in text.lower()


def read_preset(text):
    name, _, rest = text.partition(":")
    preset(name, **parse(f"x:{rest}")[0].options).explain()


READERS = {
    "terms": read_terms,
    "preset": read_preset,
    "method": lambda text: LongContexts(posthoc=[text]),
    "remedies": lambda text: str(parse_remedies(text)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("many", [20, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_spec_string_is_read_or_refused_with_a_word(read, many, caplog):
    caplog.set_level(logging.CRITICAL, "qkeel")

    @hypothesis.seed(0)
    @settings(
        max_examples=many,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(terms | signs | texts)
    @hypothesis.example("0\r:")  # once read as something else
    def each(text):
        try:
            read(text)
        except QkeelError as error:
            if not str(error).strip():
                raise AssertionError("an error without a word") from error

    each()
