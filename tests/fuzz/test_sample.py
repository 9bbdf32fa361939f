"""A small sample of every class of input: what `python -m tests.fuzz` does with ten thousand cases of each."""

from __future__ import annotations

import pytest
from tests.fuzz.classes import CLASSES
from tests.fuzz.hunt import hunt


@pytest.mark.parametrize("name", CLASSES)
def test_a_sample_of_cases_is_right_or_refused_with_a_word(name: str) -> None:
    few = (CLASSES[name].few + 2) // 3
    assert 0 <= hunt(CLASSES[name], few, seed=1) <= few * 2
