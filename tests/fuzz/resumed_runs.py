"""A run that was cut in its middle, with a damaged file: it goes on, or says which file is damaged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.damage import Damage, damages, inflict
from tests.fuzz.hunt import Hunt
from tests.fuzz.places import lay_out, scratch, whole
from tests.fuzz.study_plans import CONFIG

from qkeel.errors import QkeelError
from qkeel.lab import Watcher, run

_CONFIG = dataclasses.replace(CONFIG, steps=4, checkpoint_every=2, log_every=1)


def _half(place: Path) -> None:
    seen: list[int] = []

    def stop() -> bool:
        seen.append(1)
        return len(seen) == 2

    try:
        run(_CONFIG, place / "run", watcher=Watcher(should_stop=stop))
    except KeyboardInterrupt:
        return
    raise AssertionError("the run did not stop")


def inputs() -> SearchStrategy[tuple[int, Damage]]:
    """Which file, and its damage."""
    return st.tuples(st.integers(0, 200), damages())


def check(case: tuple[int, Damage]) -> None:
    """Goes on with the run; where it is refused, nothing but the mark of a failure is new."""
    number, harm = case
    files = tuple(item for item in whole(_half) if not item[0].endswith("lock"))
    with scratch() as place:
        lay_out(files, place)
        name = files[number % len(files)][0]
        inflict(place / name, harm)
        try:
            done = run(_CONFIG, place / "run")
        except QkeelError:
            raise
        assert done.summary()["steps"] <= 4


HUNT = Hunt(inputs=inputs, check=check, few=30)
