"""The laws of logits and gains: what the package carries and what the pages say follow from the committed tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from experiments.predictions import drift, drift_law, drift_verdict, gains
from experiments.predictions.law import EVIDENCE

from qkeel.lab.config import ModelConfig, RunConfig
from qkeel.records import read_json


@pytest.fixture(scope="module")
def fitted() -> list[drift_law.Row]:
    return drift_law.read_rows(drift_law.FIT)


def test_the_table_of_the_package_follows_from_the_fitting_grids(fitted: list[drift_law.Row]) -> None:
    law, remedies, carried = (
        drift_law.frozen(fitted),
        gains.frozen(drift_law.read_rows(gains.GAIN_FIT)),
        read_json(EVIDENCE),
    )
    assert law["law"]["form"] == carried["law"]["form"], "run python -m experiments.predictions.drift_law"
    alike({**law, **remedies}, {name: carried[name] for name in (*law, *remedies)})


def alike(made: object, carried: object) -> None:
    """Linear algebra differs in the last digits between processors."""
    if isinstance(made, dict) and isinstance(carried, dict):
        assert list(made) == list(carried)
        for name in made:
            alike(made[name], carried[name])
    elif isinstance(made, list) and isinstance(carried, list):
        assert len(made) == len(carried)
        for one, other in zip(made, carried):
            alike(one, other)
    else:
        assert made == (pytest.approx(carried, abs=2e-4) if isinstance(carried, float) else carried)


def test_the_pages_say_what_the_tables_say() -> None:
    for made in (drift_verdict, gains):
        text = made.PAGE.read_text(encoding="utf-8")
        assert made.page(text) == text, f"run python -m {made.__name__}"


def test_no_run_of_the_tests_was_fitted_on(fitted: list[drift_law.Row]) -> None:
    for rows, parts in ((fitted, ("fit", "test")), (drift_law.read_rows(gains.GAIN_FIT), ("gain-fit", "gain-test"))):
        cells = [{drift.key(config)[:-2] for unit in drift.cells(part, ()) for config in unit} for part in parts]
        assert not cells[0] & cells[1]
        assert {drift.key(row.config)[:-2] for row in rows} <= cells[0]


def test_a_unit_of_runs_becomes_rows_once(tmp_path: Path) -> None:
    base = RunConfig(device="cpu", dtype="fp32", steps=2, eval_sequences=2, model=ModelConfig(d_model=16, head_dim=4))
    unit = [dataclasses.replace(base, seed=seed) for seed in (0, 1)]
    assert drift.train(("fit", unit, str(tmp_path))) == 2
    assert drift.done(tmp_path) == {drift.key(config) for config in unit}
    assert drift.merged(tmp_path, "fit", [unit], tmp_path / "table.csv") == 0
    rows = drift_law.read_rows(tmp_path / "table.csv")
    assert [drift.key(row.config) for row in rows] == [drift.key(config) for config in unit]
    assert rows[0].at == [0, 2]
    assert rows[0].summed[0] == 0 < rows[0].summed[1]


def test_intervals_of_logits_cover_at_least_85_percent_of_the_runs_that_they_were_not_fitted_on() -> None:
    held = drift_verdict.coverage(drift_law.read_rows(drift_law.TEST))
    for name in ("largest logit at the end of a run", "largest logit at each recorded step"):
        n, m = held[name]
        assert n / m >= drift_verdict.COVERED, name


def test_intervals_of_gains_cover_at_least_85_percent_of_the_pairs_that_they_were_not_fitted_on() -> None:
    assert gains.holds(gains.coverage(drift_law.read_rows(gains.GAIN_TEST))), (
        "then recommend may give no gain elsewhere"
    )
