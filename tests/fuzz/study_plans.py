"""A study.json of hostile hands, which a study's command goes on with: nothing outside the directory is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.fuzz.damage import damages, inflict
from tests.fuzz.hunt import Hunt
from tests.fuzz.places import lay_out, scratch, whole

from qkeel.lab import Execution, Grid, RunConfig, make_plan, run_plan
from qkeel.lab.config import DataConfig, ModelConfig

_MODEL = ModelConfig(d_model=8, n_layers=1, n_heads=2)
CONFIG = RunConfig(
    model=_MODEL,
    data=DataConfig(source="topics", context=8, batch=2),
    steps=1,
    eval_sequences=1,
    probe_sequences=1,
    device="cpu",
)
_ELSEWHERE = ['"../../elsewhere"', '"/elsewhere"', '".."', '"a/b"', '"a\\\\u0000b"', '"."', '""']


def _study(place: Path) -> object:
    plan = make_plan("lr", CONFIG, Grid(remedies=["none"], lrs=[0.01], seeds=[0]))
    return run_plan(plan, place / "study", Execution())


def inputs() -> SearchStrategy[tuple[Any, str | None]]:
    """Damage to study.json, or another name of a run."""
    return st.one_of(st.tuples(damages(), st.none()), st.tuples(st.none(), st.sampled_from(_ELSEWHERE)))


def check(case: tuple[Any, str | None]) -> None:
    """Goes on with the study."""
    harm, name = case
    with scratch() as place:
        lay_out(whole(_study), place)
        file = place / "study" / "study.json"
        if name is not None:
            (run,) = (place / "study" / "runs").iterdir()
            file.write_text(file.read_text().replace(f'"{run.name}"', name.replace("\\\\", "\\")))
        else:
            inflict(file, harm)
        try:
            _study(place)
        finally:
            assert sorted(p.name for p in place.iterdir()) == ["study"]


HUNT = Hunt(inputs=inputs, check=check, few=40)
