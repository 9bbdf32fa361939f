"""heads.json and heads.f32 of any content: read, cut back and appended to, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.damage import damages, inflict
from tests.fuzz.hunt import Hunt
from tests.fuzz.places import lay_out, scratch, whole

from qkeel.records import HeadRecorder, read_heads
from qkeel.records.files import cut_heads


def _make(place: Path) -> None:
    recorder = HeadRecorder(place, ("max_logit", "entropy"), 2, 3, layers=("a", "b"))
    for step in (0, 10, 20):
        recorder.append(step, np.full((2, 2, 3), float(step)))


def inputs() -> SearchStrategy[tuple[str, Any, int]]:
    """Which file, its damage, and the last step that is kept."""
    return st.tuples(st.sampled_from(["heads.json", "heads.f32"]), damages(), st.integers(-1, 30))


def check(case: tuple[str, Any, int]) -> None:
    """Reads, cuts and reads again."""
    name, harm, last = case
    with scratch() as place:
        lay_out(whole(_make), place)
        inflict(place / name, harm)
        before = read_heads(place)
        assert all(values.shape[0] == len(before.steps) for values in before.values.values())
        cut_heads(place, last)
        after = read_heads(place)
        assert len(after.steps) <= len(before.steps)


HUNT = Hunt(inputs=inputs, check=check)
