"""The roles of passes: trained or not, by what a program does with them."""

from __future__ import annotations

import pytest
from tests.monitor.roles import clip_differences, watch_differences


@pytest.mark.parametrize("seed", range(12))
def test_a_record_holds_the_trained_passes_of_its_step_and_the_others_apart(seed: int) -> None:
    assert watch_differences(seed) == []


@pytest.mark.parametrize("seed", range(12))
def test_a_clip_follows_the_trained_passes_alone(seed: int) -> None:
    assert clip_differences(seed) == []
