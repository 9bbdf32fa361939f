"""A study in parts: a grid of its own for each kind of attention and each optimizer, side by side in one directory."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from qkeel.errors import QkeelError
from qkeel.lab import Execution, Grid, ModelConfig, RunConfig, make_plan, run_plan
from qkeel.lab.studies import STUDIES, find_study, grids
from qkeel.records import read_json
from qkeel.report import write
from qkeel.report.study.collect import collect

Make = Callable[..., RunConfig]
GRID = Grid(
    remedies=["none", "lalr:tau=0.1"], lrs=[0.1], seeds=[0], blocks=["mla", "mha"], optimizers=["adamw", "muon"]
)
PARTS = ["mla, adamw", "mha, adamw", "mla, muon", "mha, muon"]


def test_the_study_is_attention_by_optimizers_by_remedies_by_rates_by_seeds() -> None:
    made = make_plan("mla")
    assert len(made.runs) == 2 * 2 * 6 * 3 * 3
    assert list(dict.fromkeys(run.role for run in made.runs)) == PARTS
    for run in made.runs:
        assert run.role == f"{run.config.model.block}, {run.config.optim.name}"
    first = made.runs[0].config
    assert (first.model.d_model, first.model.n_heads, first.data.context, first.data.batch) == (64, 4, 32, 8)
    remedies = ("none", "frozen_qk", "qk_norm", "qk_clip:threshold=30", "lalr:tau=0.1", "qk_lr:factor=0.1")
    assert made.grid.remedies == remedies


def test_without_named_parts_there_is_one_grid(tiny: Make) -> None:
    plain = dataclasses.replace(GRID, blocks=(), optimizers=())
    assert {run.role for run in make_plan("mla", tiny(), plain).runs} == {"grid"}
    one = dataclasses.replace(GRID, optimizers=())
    assert [run.role for run in make_plan("mla", tiny(), one).runs] == [p for p in PARTS[:2] for _ in range(2)]


def test_what_one_part_cannot_be_is_refused_before_anything_runs(tiny: Make) -> None:
    # Multi-head attention would rotate pairs of 7 dimensions; MLA has head sizes of its own.
    odd = tiny(model=ModelConfig(d_model=16, n_heads=2, head_dim=7))
    with pytest.raises(QkeelError, match="even number of dimensions"):
        make_plan("mla", odd, GRID)
    assert make_plan("mla", odd, dataclasses.replace(GRID, blocks=["mla"])).runs


def test_parts_are_run_recorded_extended_and_shown_apart(tiny: Make, tmp_path: Path) -> None:
    out, base = tmp_path / "s", tiny(steps=6)
    run_plan(make_plan("mla", base, dataclasses.replace(GRID, blocks=["mla"])), out, Execution())
    before = {p: (p / "summary.json").read_bytes() for p in (out / "runs").iterdir()}
    assert len(before) == 4
    result = run_plan(make_plan("mla", base, GRID), out, Execution())
    assert not result.failures
    for path, summary in before.items():
        assert (path / "summary.json").read_bytes() == summary  # not run twice
    about = read_json(out / "study.json")
    assert about["blocks"] == ["mla", "mha"]
    assert about["optimizers"] == ["adamw", "muon"]
    assert set(about["base"]) == set(PARTS)
    with open(out / "table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert sorted({(r["block"], r["optimizer"]) for r in lines}) == sorted(tuple(p.split(", ")) for p in PARTS)
    study = collect(out)
    assert set(study.parts()) == set(PARTS)
    for name, part in study.parts().items():
        assert [run.config["model"]["block"] for run in part.runs] == [name.split(",")[0]] * 2
        assert len(part.rows()) == 2
    assert study.rows() == []

    write(out, out / "report.html")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Latent-attention study" in page
    assert "losses are not comparable" not in page
    data = json.loads(page.split('id="report-data">')[1].split("</script>")[0])
    assert set(data["parts"]) == set(PARTS)
    for name in PARTS:
        assert f"<h2>{name}</h2>" in page
        assert len(data["parts"][name]["losses"]) == 2


def test_default_axes_are_those_of_the_written_source() -> None:
    assert (grids.MLA_GRID.lrs, grids.MLA_GRID.seeds) == ((0.01, 0.1, 0.3), (0, 1, 2))


def test_no_two_runs_of_a_study_have_the_same_title() -> None:
    for name in STUDIES:
        study = find_study(name)
        axes = dataclasses.replace(study.grid, seeds=study.grid.seeds[:2])  # a seed stands in a title as any other
        runs = {run.config.run_id: run for run in study.plan(name, None, axes).runs}
        titles = [run.title for run in runs.values()]
        assert len({*titles}) == len(titles), name
