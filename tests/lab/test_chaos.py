"""The chaos study: pairs one float32 step apart, their record, the page, and the marks on other pages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from qkeel.lab import Execution, Grid, RunConfig, make_plan, run_plan
from qkeel.lab.build_run import resolve
from qkeel.lab.checkpoint import RunState
from qkeel.metrics import distance, divergence_rate
from qkeel.records import read_json
from qkeel.report.study.collect import chaos_floors, collect
from qkeel.report.study.compare import gains
from qkeel.report.study.page import study_page

Make = Callable[..., RunConfig]


def test_one_weight_differs_by_one_float32_step(tiny: Make) -> None:
    states = [RunState(resolve(tiny(nudge=ulps))) for ulps in (0, 1, 3)]
    weights = [torch.cat([p.detach().flatten() for p in state.model.parameters()]) for state in states]
    steps = [(w.view(torch.int32) - weights[0].view(torch.int32)).abs() for w in weights[1:]]
    assert [(int(s.count_nonzero()), int(s.sum())) for s in steps] == [(1, 1), (1, 3)]
    moved = states[0].model.get_submodule("blocks")
    assert any(torch.equal(p.detach().flatten()[:1], weights[0][steps[0] > 0]) for p in moved.parameters())
    assert RunConfig(nudge=0).run_id == RunConfig().run_id != RunConfig(nudge=1).run_id


def test_the_rate_of_a_known_course_is_found() -> None:
    steps = np.arange(0, 100, 10)
    apart = 1e-7 * np.exp(0.12 * steps)
    assert divergence_rate(steps.tolist(), apart, np.ones(10)) == pytest.approx(0.12, rel=1e-9)
    late = np.where(steps < 30, 0.0, apart)
    late[-2:] = 5.0  # saturated: beyond a tenth of the size
    assert divergence_rate(steps.tolist(), late, np.ones(10)) == pytest.approx(0.12, rel=1e-9)
    assert math.isnan(divergence_rate(steps.tolist(), np.zeros(10), np.ones(10)))
    assert math.isnan(divergence_rate([0, 10], apart[:2], np.ones(2)))
    assert math.isnan(divergence_rate(steps.tolist(), np.full(10, math.nan), np.ones(10)))
    assert distance(np.zeros((2, 1, 2)), np.array([[[3.0, 4.0]], [[0.0, 0.0]]])) == pytest.approx([math.sqrt(12.5), 0])


def test_a_study_records_pairs_and_other_pages_mark_what_is_under_the_floor(tiny: Make, tmp_path: Path) -> None:
    grid = Grid(remedies=["none", "qk_norm"], lrs=[1.0], seeds=[0, 1])
    result = run_plan(make_plan("chaos", tiny(steps=6), grid), tmp_path / "chaos", Execution(stack="auto"))
    assert not result.failures
    assert len(result.table) == 8
    record = read_json(tmp_path / "chaos" / "chaos.json")
    assert [(p["remedy"], p["lr"], p["seed"]) for p in record["pairs"]] == [
        (remedy, 1.0, seed) for remedy in ("none", "qk_norm") for seed in (0, 1)
    ]
    rows = {(r["remedy"], r["lr"], r["seed"]): [] for r in result.table}
    for row in result.table:
        rows[row["remedy"], row["lr"], row["seed"]].append(row["val_loss"])
    for pair in record["pairs"]:
        one, other = rows[pair["remedy"], pair["lr"], pair["seed"]]
        assert pair["loss_difference"] == abs(one - other)
        assert pair["logit_distance"] >= 0
    assert any(pair["loss_difference"] > 0 for pair in record["pairs"])
    page = study_page(collect(tmp_path / "chaos")).html()
    assert "One float32 step in one weight changes the final held-out loss by up to" in page
    assert "What rounding does" in page

    # The same configuration without a move: its runs are those of the chaos study, bit by bit.
    run_plan(make_plan("lr", tiny(steps=6), grid), tmp_path / "lr", Execution())
    base = read_json(tmp_path / "lr" / "study.json")["base"]["grid"]
    floors = chaos_floors(tmp_path / "lr", base)
    assert floors.keys() == {("none", 1.0), ("qk_norm", 1.0)}
    assert chaos_floors(tmp_path / "lr", {**base, "steps": 11}) == {}, "another length has another floor"
    both = [p["loss_difference"] for p in record["pairs"] if (p["remedy"], p["lr"]) == ("none", 1.0)]
    assert floors["none", 1.0] == pytest.approx(math.sqrt((both[0] ** 2 + both[1] ** 2) / 2))
    study = collect(tmp_path / "lr")
    rows_of = [{**row, "chaos_floor": 10.0} for row in study.rows()]
    assert all("under the chaos floor of 14" in one.over() for one in gains(rows_of, study.remedies))
    found = gains(study.rows(), study.remedies)
    assert [one.floor for one in found] == [math.hypot(floors["none", g.lr], floors["qk_norm", g.lr]) for g in found]
    edited = [{**record["pairs"][0], "remedy": "another"}]  # by hand: no remedy of the study
    assert (
        "No pair of runs has finished yet"
        in study_page(dataclasses.replace(collect(tmp_path / "chaos"), chaos=edited)).html()
    )


def test_pairs_of_several_widths_are_told_apart(tiny: Make, tmp_path: Path) -> None:
    grid = Grid(remedies=["none"], lrs=[1.0], seeds=[0], d_model=[8, 16])
    result = run_plan(make_plan("edge", tiny(), grid), tmp_path / "edge", Execution(stack="auto"))
    assert (len(result.failures), len(result.table)) == (0, 4)
    record = read_json(tmp_path / "edge" / "chaos.json")
    assert [pair["part"] for pair in record["pairs"]] == ["d_model 8", "d_model 16"]
    page = study_page(collect(tmp_path / "edge")).html()
    assert "What one float32 step does" in page
    assert "d_model 16" in page
