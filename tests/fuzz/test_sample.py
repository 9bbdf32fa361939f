"""Inputs of any kind are right, or refused with a QkeelError that says why: a sample of each class, and the cases that
once ended in a traceback, a hang or silence."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from qkeel import preset, spec
from qkeel.errors import InvalidValueError, QkeelError
from qkeel.lab import Grid, LongContexts, RunConfig
from qkeel.lab.config import DataConfig, ImagesConfig, ModelConfig, OptimConfig
from qkeel.options import parse
from qkeel.remedies.apply import REMEDIES
from qkeel.remedies.apply import parse as parse_remedies
from qkeel.spec import PRESETS

# Huge, tiny, empty, of the wrong type, hardly printable.
WHOLE = [0, 1, 2, -1, 3, 7, 8, 16, 64, 2**31, 2**53, 2**63, 2**64, 10**30, -(2**63)]
FLOATS = [-0.0, 0.5, 1.0, -1.0, 1e-8, 1e-300, 1e300, math.inf, -math.inf, math.nan, 1e4]
TEXTS = ["", " ", "nan", "inf", "none", "auto", "true", "\n", "\0", "\x7f", "𝄞", "%s"]
TEXTS += ["a" * 300, "..", "/"]
whole = st.sampled_from(WHOLE) | st.integers(-10, 100)
numbers = whole | st.sampled_from(FLOATS) | st.floats(-1e3, 1e3, width=32)
texts = st.sampled_from(TEXTS) | st.text(max_size=12)
plain = st.none() | st.booleans() | numbers | texts


def listed(some, most):
    return st.lists(some, max_size=most)


# Spec strings: of remedies, presets and post-hoc methods.

OPTIONS = "tau cap threshold over gain base factor eps alpha ratio window train_length"
odd = st.sampled_from(["true", "head", "layer", "1e400", "0x1", "1_000"])
named = st.sampled_from(OPTIONS.split()) | texts
option = st.builds("{}={}".format, named, numbers | texts | odd)
options = listed(option, 3).map(",".join)
term = st.builds(
    "{}:{}".format, st.sampled_from([*REMEDIES, *PRESETS]) | texts, options
)
terms = st.lists(term, min_size=1, max_size=3).map("+".join)
signs = st.text(":=,+e1.a ", max_size=15)


def read_terms(text):
    try:
        found = parse(text)
    except InvalidValueError:  # an empty name, or a colon without an option
        return
    assert parse("+".join(map(str, found))) == found or "nan" in text.lower()


def read_preset(text):
    name, _, rest = text.partition(":")
    return preset(name, **parse(f"x:{rest}")[0].options).explain()


READERS = {
    "terms": read_terms,
    "preset": read_preset,
    "method": lambda text: LongContexts(posthoc=[text]),
    "remedies": lambda text: str(parse_remedies(text)),
}

# Constructors: slots take what their annotations say; configurations, which files give, take anything.

SECTIONS = (DataConfig, OptimConfig, ModelConfig, ImagesConfig)

SLOTS = {
    name: getattr(spec, name)
    for name in spec.__all__
    if name not in ("AttentionCall", "AttentionSpec")
    and isinstance(getattr(spec, name), type)
    and dataclasses.is_dataclass(getattr(spec, name))
}
BUILT = {
    **SLOTS,
    **{cls.__name__: cls for cls in (*SECTIONS, RunConfig, Grid, LongContexts)},
}
KINDS = "head layer q k qk qkv none dim one_plus_dim head_dim scalar both power"


def value_of(field):
    kind = str(field.type)
    if "bool" in kind:
        drawn = st.booleans()
    elif "float" in kind or "int" in kind:
        drawn = numbers if "float" in kind else whole
    elif "str" in kind or "Literal" in kind:
        drawn = st.sampled_from(KINDS.split()) | texts
    else:
        return None
    drawn = listed(drawn, 3) if "Sequence" in kind else drawn
    return drawn | st.none() if "None" in kind else drawn


def built(name):
    needed, optional = {}, {}
    for field in dataclasses.fields(BUILT[name]):
        drawn = value_of(field)
        if name not in SLOTS:
            drawn = plain if drawn is None else drawn | plain
        if drawn is not None and field.init:
            missing = (field.default, field.default_factory)
            is_needed = all(x is dataclasses.MISSING for x in missing)
            (needed if is_needed else optional)[field.name] = drawn
    return st.tuples(st.just(name), st.fixed_dictionaries(needed, optional=optional))


def check_object(case):
    """Makes the object; one that is made can be printed, copied, and used for what it is."""
    name, given_options = case
    made = BUILT[name](**given_options)
    repr(made)
    if name in SLOTS:
        hash(made)
    if isinstance(made, RunConfig):
        assert RunConfig.from_dict(made.to_dict()) == made
        assert len(made.run_id) == 12
    if isinstance(made, spec.norm.Norm):
        spec.AttentionSpec(norm=made).explain()


# The inputs of each class, what is done with one, and how many are drawn in the quick tests.
CLASSES = {
    "spec-strings": (
        st.tuples(st.sampled_from(list(READERS)), terms | signs | texts),
        lambda case: READERS[case[0]](case[1]),
        20,
    ),
    "objects": (
        st.sampled_from(sorted(BUILT)).flatmap(built),
        check_object,
        34,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CLASSES)
def test_a_sample_of_cases_is_right_or_refused_with_a_word(name, many, caplog):
    inputs, check, few = CLASSES[name]
    caplog.set_level(logging.CRITICAL, "qkeel")

    @hypothesis.seed(0)
    @settings(
        max_examples=2000 if many else few,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def each(case: Any) -> None:
        try:
            check(case)
        except QkeelError as error:
            if not str(error).strip():
                raise AssertionError("an error without a word") from error

    each()


REFUSED = [
    ("objects", ("RunConfig", {"seed": 2**64})),
    ("objects", ("LongContexts", {"sequences": None})),
    ("objects", ("LongContexts", {"test_lengths": ["512"]})),
    ("objects", ("Grid", {"remedies": ["none"], "lrs": ["fast"], "seeds": [0]})),
]


@pytest.mark.parametrize(("name", "case"), REFUSED)
def test_what_was_a_traceback_is_a_clear_error(name, case):
    with pytest.raises(QkeelError, match=r"\w+"):
        CLASSES[name][1](case)
    CLASSES["spec-strings"][1](("terms", "0\r:"))  # once read as something else
