"""Spec strings, the same in Python, TOML and on the command line: parsing them is the inverse of printing them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkeel.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from qkeel.options import Term, build, lookup, parse

few = settings(max_examples=50, derandomize=True, deadline=None)
names = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
words = names.filter(lambda w: w not in ("true", "false", "inf", "nan", "infinity"))
rounded = st.floats(allow_nan=False).map(lambda x: float(f"{x:g}"))
values = st.one_of(st.booleans(), st.integers(-(10**6), 10**6), rounded, words)
terms = st.builds(Term, names, st.dictionaries(names, values, max_size=3))


@few
@given(st.lists(terms, min_size=1, max_size=3))
def test_parsing_what_was_printed_gives_the_same_terms(made: list[Term]) -> None:
    text = "+".join(map(str, made))
    again = parse(text)
    assert list(again) == made
    assert "+".join(map(str, again)) == text


@few
@given(st.floats(0, 1))
def test_no_digit_of_a_float_is_lost(x: float) -> None:
    (term,) = parse(str(Term("lalr", {"tau": x})))
    assert term.options["tau"] == x


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", [("none", {})]),
        ("qk_norm:gain=head", [("qk_norm", {"gain": "head"})]),
        ("softcap:cap=30", [("softcap", {"cap": 30})]),
        ("lalr:tau=0.1+qk_clip", [("lalr", {"tau": 0.1}), ("qk_clip", {})]),
        ("a:x=1e-3,y=true,z=-2", [("a", {"x": 1e-3, "y": True, "z": -2})]),
        ("a:x=1e+2+b", [("a", {"x": 100.0}), ("b", {})]),
        ("a:x=1E+2,y=2+b:z=3", [("a", {"x": 100.0, "y": 2}), ("b", {"z": 3})]),
        (" a:x=1 , y=2 + b ", [("a", {"x": 1, "y": 2}), ("b", {})]),
    ],
)
def test_spec_strings_by_hand(
    text: str, expected: list[tuple[str, dict[str, object]]]
) -> None:
    assert [(term.name, term.options) for term in parse(text)] == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty name"),
        ("+", "empty name"),
        ("a+", "empty name"),
        (":x=1", "empty name"),
        ("a:x", "cannot read 'x'"),
        ("a:x=", "cannot read 'x='"),
        ("a:=1", "cannot read '=1'"),
        ("a:x=1,x=2", "'x' is given twice"),
    ],
)
def test_a_string_that_cannot_be_read_is_refused_with_the_part_that_is_wrong(
    text: str, says: str
) -> None:
    with pytest.raises(InvalidValueError, match=says):
        parse(text)


def test_what_is_not_a_string_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="expected a spec string like"):
        parse(3)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Remedy:
    tau: float = 1.0
    clip: bool = False
    made: int = dataclasses.field(default=0, init=False)


def test_building_takes_options_by_field_name_and_names_the_nearest() -> None:
    assert build("remedy", Remedy, {"tau": 2.0}) == Remedy(tau=2.0)
    with pytest.raises(
        UnknownNameError, match=r"unknown option of remedy 'taus'\. Did you mean 'tau'"
    ):
        build("remedy", Remedy, {"taus": 2.0})
    with pytest.raises(UnknownNameError, match=r"unknown option of remedy 'made'"):
        build("remedy", Remedy, {"made": 2})


def test_looking_up_an_unknown_name_lists_what_is_known() -> None:
    assert lookup("thing", {"a": 1}, "a") == 1
    with pytest.raises(UnknownNameError) as caught:
        lookup("thing", {"alpha": 1, "beta": 2}, "alpah")
    assert (
        str(caught.value)
        == "unknown thing 'alpah'. Did you mean 'alpha'? Known: alpha, beta"
    )
