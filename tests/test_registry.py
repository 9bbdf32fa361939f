"""Names, spec strings, and errors that name the nearest."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkeel.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from qkeel.options import Term, build, lookup, parse


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("none", [Term("none", {})]),
        ("lalr:tau=0.1", [Term("lalr", {"tau": 0.1})]),
        (" lalr:tau=0.1 + qk_clip ", [Term("lalr", {"tau": 0.1}), Term("qk_clip", {})]),
        ("a:x=1e+2+b", [Term("a", {"x": 100.0}), Term("b", {})]),
        ("a:x=1e-2", [Term("a", {"x": 0.01})]),
        ("a:x=true,y=false,z=word", [Term("a", {"x": True, "y": False, "z": "word"})]),
        ("a:x=1,y=1.0", [Term("a", {"x": 1, "y": 1.0})]),
        ("a:x=-3,", [Term("a", {"x": -3})]),
    ],
)
def test_a_spec_string_is_read(text, terms):
    found = parse(text)
    assert list(found) == terms
    for ours, theirs in zip(found, terms):
        assert [type(v) for v in ours.options.values()] == [
            type(v) for v in theirs.options.values()
        ]


NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
VALUES = st.one_of(
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["rms", "head", "query"]),
)


@given(
    st.lists(
        st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)),
        min_size=1,
        max_size=3,
    )
)
def test_what_is_written_is_read_back(parts: list[tuple[str, dict]]) -> None:
    terms = [Term(name, options) for name, options in parts]
    assert list(parse("+".join(map(str, terms)))) == terms


@pytest.mark.parametrize(
    "text", ["", "+a", "a++b", "a+", ":x=1", "a:x", "a:x=", "a:=1", "a:x=1,x=2"]
)
def test_what_cannot_be_read_is_refused_with_the_text(text):
    with pytest.raises(InvalidValueError) as error:
        parse(text)
    assert repr(text) in str(error.value)


def test_a_spec_string_is_a_string():
    with pytest.raises(InvalidTypeError, match="got int"):
        parse(3)  # type: ignore[arg-type]


def test_lookup_finds_or_names_the_nearest():
    table = {"softcap": 1, "qk_norm": 2}
    assert lookup("remedy", table, "qk_norm") == 2
    with pytest.raises(
        UnknownNameError, match=r"unknown remedy 'qknorm'\. Did you mean 'qk_norm'"
    ):
        lookup("remedy", table, "qknorm")
    with pytest.raises(KeyError):
        lookup("remedy", table, "zzz")


@dataclasses.dataclass(frozen=True)
class Options:
    tau: float = 0.1
    derived: float = dataclasses.field(init=False, default=0.0)


def test_build_makes_a_value_from_options_and_refuses_unknown_ones():
    assert build("remedy 'x'", Options, {"tau": 0.3}) == Options(tau=0.3)
    with pytest.raises(
        UnknownNameError,
        match=r"unknown option of remedy 'x' 'tua'\. Did you mean 'tau'",
    ):
        build("remedy 'x'", Options, {"tua": 0.3})
    with pytest.raises(UnknownNameError, match="derived"):
        build("remedy 'x'", Options, {"derived": 1.0})
