"""JSON texts: what the strict parser takes is what Python's takes; what it refuses it refuses with a reason."""

from __future__ import annotations

import json

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.hostile import json_values, values
from tests.fuzz.hunt import Hunt

from qkeel.records.files import FIELDS, check_parts
from qkeel.records.parse import parse_json


def inputs() -> SearchStrategy[tuple[bytes, str]]:
    """A text, and the file whose fields it may have."""
    named = sorted({name for fields in FIELDS.values() for name in fields} - {"*"})
    table = st.dictionaries(st.sampled_from(named), values(), max_size=5).map(json.dumps)
    text = st.one_of(json_values(), table).map(lambda t: t.encode("utf-8", "surrogatepass"))
    raw = st.one_of(text, st.binary(max_size=30), st.text('{}[]",:0123456789.eE+-tfn\\u ', max_size=30).map(str.encode))
    return st.tuples(raw, st.sampled_from(sorted(FIELDS)))


def check(case: tuple[bytes, str]) -> None:
    """Reads the text and checks the fields."""
    text, file = case
    value = parse_json(text, file)
    assert json.dumps(value) == json.dumps(json.loads(text))
    check_parts(value, file, file)


HUNT = Hunt(inputs=inputs, check=check)
