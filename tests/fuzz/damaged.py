"""Damaged files of runs and studies: what reads them goes on, or says which file is damaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.damage import Damage, damages, inflict
from tests.fuzz.hunt import Hunt
from tests.fuzz.places import lay_out, scratch, whole
from tests.report.synthetic_study import Made, make_study
from tests.report.synthetic_watch import Seen, make_watch

from qkeel import report
from qkeel.lab import Execution, Grid, RunConfig, Watcher, make_plan, run, run_plan
from qkeel.lab.config import DataConfig, ModelConfig
from qkeel.records import HeadRecorder, read_heads
from qkeel.records.file_formats import cut_heads

CONFIG = RunConfig(
    model=ModelConfig(d_model=8, n_layers=1, n_heads=2),
    data=DataConfig(source="topics", context=8, batch=2),
    steps=1,
    eval_sequences=1,
    probe_sequences=1,
    device="cpu",
)
_CUT = dataclasses.replace(CONFIG, steps=4, checkpoint_every=2, log_every=1)
_ENDS = (("none", 0.01, "done"), ("lalr", 0.01, "done"), ("lalr", 0.1, "failed"), ("none", 0.1, "started"))
_ELSEWHERE = ['"../../elsewhere"', '"/elsewhere"', '".."', '"a/b"', '"a\\\\u0000b"', '"."', '""']


def _ended(place: Path) -> None:
    make_study(place / "study", [Made(remedy=remedy, lr=lr, status=status) for remedy, lr, status in _ENDS])


def _studied(place: Path) -> object:
    plan = make_plan("lr", CONFIG, Grid(remedies=["none"], lrs=[0.01], seeds=[0]))
    return run_plan(plan, place / "study", Execution())


def _watched(place: Path) -> None:
    make_watch(place / "watch", Seen(layers=2, heads=3, samples=24))


def _half(place: Path) -> None:
    """A run that is cut in its middle."""
    seen: list[int] = []

    def stop() -> bool:
        seen.append(1)
        return len(seen) == 2

    try:
        run(_CUT, place / "run", watcher=Watcher(should_stop=stop))
    except KeyboardInterrupt:
        return
    raise AssertionError("the run did not stop")


def _recorded(place: Path) -> None:
    recorder = HeadRecorder(place, ("max_logit", "entropy"), 2, 3, layers=("a", "b"))
    for step in (0, 10, 20):
        recorder.append(step, np.full((2, 2, 3), float(step)))


@contextmanager
def _damaged(make: Callable[[Path], object], harms: list[tuple[int, Damage]]) -> Iterator[Path]:
    """A directory with the files that `make` writes; each harm is done to the file of its number."""
    files = tuple(item for item in whole(make) if not item[0].endswith("lock"))
    with scratch() as place:
        lay_out(files, place)
        for number, harm in harms:
            path = place / files[number % len(files)][0]
            if path.is_file() and not path.is_symlink():
                inflict(path, harm)
        yield place


def _harms(most: int = 2) -> SearchStrategy[list[tuple[int, Damage]]]:
    """Damage to one file or several, by number."""
    return st.lists(st.tuples(st.integers(0, 200), damages()), min_size=1, max_size=most)


def _is_page(path: Path) -> None:
    assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")


def check_studies(case: tuple[list[tuple[int, Damage]], bool]) -> None:
    """Makes the page of a study, or of one of its runs."""
    harms, single = case
    with _damaged(_ended, harms) as place:
        runs = sorted((place / "study" / "runs").iterdir())
        _is_page(report.write(runs[0] if single else place / "study", place / "page.html"))


def check_watched_runs(case: list[tuple[int, Damage]]) -> None:
    """Makes the page of a watched run."""
    with _damaged(_watched, case) as place:
        _is_page(report.write(place / "watch", place / "page.html"))


def check_resumed_runs(case: tuple[int, Damage]) -> None:
    """Goes on with a run that was cut."""
    with _damaged(_half, [case]) as place:
        assert run(_CUT, place / "run").summary()["steps"] <= 4


def check_study_plans(case: tuple[Any, str | None]) -> None:
    """Goes on with a study whose study.json is of hostile hands: nothing outside the directory is touched."""
    harm, name = case
    with _damaged(_studied, []) as place:
        file = place / "study" / "study.json"
        if name is not None:
            (one,) = (place / "study" / "runs").iterdir()
            file.write_text(file.read_text().replace(f'"{one.name}"', name.replace("\\\\", "\\")))
        else:
            inflict(file, harm)
        try:
            _studied(place)
        finally:
            assert sorted(p.name for p in place.iterdir()) == ["study"]


def check_heads(case: tuple[str, Any, int]) -> None:
    """Reads heads.json and heads.f32, cuts them and reads them again."""
    name, harm, last = case
    with _damaged(_recorded, []) as place:
        inflict(place / name, harm)
        before = read_heads(place)
        assert all(values.shape[0] == len(before.steps) for values in before.values.values())
        cut_heads(place, last)
        assert len(read_heads(place).steps) <= len(before.steps)


def _plans() -> SearchStrategy[tuple[Any, str | None]]:
    return st.one_of(st.tuples(damages(), st.none()), st.tuples(st.none(), st.sampled_from(_ELSEWHERE)))


def _heads() -> SearchStrategy[tuple[str, Any, int]]:
    return st.tuples(st.sampled_from(["heads.json", "heads.f32"]), damages(), st.integers(-1, 30))


CLASSES: dict[str, Hunt] = {
    "studies": Hunt(inputs=lambda: st.tuples(_harms(), st.booleans()), check=check_studies, few=30),
    "study-plans": Hunt(inputs=_plans, check=check_study_plans, few=40),
    "watched-runs": Hunt(inputs=_harms, check=check_watched_runs, few=40),
    "resumed-runs": Hunt(inputs=lambda: _harms(1).map(lambda one: one[0]), check=check_resumed_runs, few=30),
    "heads": Hunt(inputs=_heads, check=check_heads),
}
