"""Inputs of any kind are right, or refused with a QkeelError that says why: a sample of each class, and the cases that
once ended in a traceback, a hang or silence."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fuzz import objects, texts
from tests.fuzz.hunt import Hunt, hunt

from qkeel.errors import QkeelError

CLASSES: dict[str, Hunt] = {**texts.CLASSES, **objects.CLASSES}
REFUSED: list[tuple[str, Any]] = [
    ("recipes", "a = " + "[" * 2000),
    ("objects", ("RunConfig", {"seed": 2**64})),
    ("objects", ("LongContexts", {"sequences": None})),
    ("objects", ("LongContexts", {"test_lengths": ["512"]})),
    ("objects", ("Grid", {"remedies": ["none"], "lrs": ["fast"], "seeds": [0]})),
]
RIGHT: list[tuple[str, Any]] = [
    ("spec-strings", ("terms", "0\r:")),
    ("recipes", '[data]\nsource = "a\\nb\\u007F\\t\\"\\\\"'),
]


@pytest.mark.parametrize("name", CLASSES)
def test_a_sample_of_cases_is_right_or_refused_with_a_word(name: str) -> None:
    few = (CLASSES[name].few + 2) // 3
    assert 0 <= hunt(CLASSES[name], few, seed=1) <= few * 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CLASSES)
def test_many_cases_are_right_or_refused_with_a_word(name: str) -> None:
    assert 0 <= hunt(CLASSES[name], 2000, seed=0) <= 4000


@pytest.mark.parametrize(("name", "case"), REFUSED)
def test_what_was_a_traceback_is_a_clear_error(name: str, case: Any) -> None:
    with pytest.raises(QkeelError, match=r"\w+"):
        CLASSES[name].check(case)


@pytest.mark.parametrize(("name", "case"), RIGHT)
def test_what_was_wrong_is_right(name: str, case: Any) -> None:
    CLASSES[name].check(case)
