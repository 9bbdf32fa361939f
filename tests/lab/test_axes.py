"""Settings as axes of a study, and rates that are tuned on seeds of their own."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from qkeel.cli.app import main
from qkeel.errors import InvalidValueError, QkeelError, RunDirectoryError
from qkeel.lab import Execution, Grid, ModelConfig, RunConfig, make_plan, run_plan
from qkeel.lab.plan import PlannedRun
from qkeel.lab.studies import STUDIES
from qkeel.lab.tuning import tuned_plan, tuning_plan
from qkeel.records import read_json
from qkeel.report import write
from qkeel.report.study_runs import read_study

Make = Callable[..., RunConfig]


def roles(runs: list[PlannedRun]) -> list[str]:
    return list(dict.fromkeys(run.role for run in runs))


def test_every_combination_is_a_part_of_its_own_and_one_value_is_that_of_all_runs(
    tiny: Make,
) -> None:
    sizes = {
        "d_model": (16, 32),
        "n_layers": (1, 2),
        "schedule": ("wsd",),
        "steps": (3,),
    }
    grid = Grid(remedies=("none",), lrs=(0.1,), seeds=(0,), **sizes)  # type: ignore[arg-type]
    runs = list(make_plan("lr", tiny(), grid).runs)
    assert roles(runs) == [
        f"d_model {m}, n_layers {n}" for m in (16, 32) for n in (1, 2)
    ]
    assert {(r.config.model.d_model, r.config.model.n_layers) for r in runs} == {
        (m, n) for m in (16, 32) for n in (1, 2)
    }
    assert {(run.config.optim.schedule, run.config.steps) for run in runs} == {
        ("wsd", 3)
    }
    alone = Grid(
        remedies=("none",), lrs=(0.1,), seeds=(0,), d_model=(32,), head_dim=(8,)
    )
    (run,) = make_plan("lr", tiny(), alone).runs
    assert (run.role, run.config.model.d_model, run.config.model.head_dim) == (
        "grid",
        32,
        8,
    )


def test_a_command_takes_several_values_and_its_table_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--remedies none --lrs 0.01 --seeds 0 --d-model 16 32 --n-heads 2 --context 8 --batch 2 --data topics"
    more = "--eval-sequences 2 --probe-sequences 2 --steps 2 --device cpu --jobs 1"
    assert (
        main(
            ["study", "lr", *flags.split(), *more.split(), "--out", str(tmp_path / "a")]
        )
        == 0
    )
    about = json.loads((tmp_path / "a" / "study.json").read_text())
    assert (about["d_model"], about["n_heads"]) == ([16, 32], [2])
    assert {entry["part"] for entry in about["runs"]} == {"d_model 16", "d_model 32"}
    rows = (tmp_path / "a" / "table.csv").read_text().splitlines()
    assert rows[0].endswith(",part")
    assert [row.rsplit(",", 1)[1] for row in rows[1:]] == ["d_model 16", "d_model 32"]
    assert "d_model 32: mean val_loss" in capsys.readouterr().out
    tune = "--tune lr --tuning-seeds 5 --d-model 16 --n-heads 2 --context 8 --batch 2 --data topics"
    grid = ["--remedies", "none", "--lrs", "0.01", "0.1", "--seeds", "0"]
    assert (
        main(
            [
                "study",
                "lr",
                *grid,
                *tune.split(),
                *more.split(),
                "--out",
                str(tmp_path / "b"),
            ]
        )
        == 0
    )
    told = capsys.readouterr().out
    assert "none: rate 0." in told
    assert "chosen on seeds 5; the " in told
    assert (
        "Rates, chosen on other seeds" in (tmp_path / "b" / "report.html").read_text()
    )


def test_a_rate_is_the_best_of_the_tuning_seeds_and_the_compared_seeds_have_no_say(
    tiny: Make, tmp_path: Path
) -> None:
    grid = Grid(
        remedies=("none", "qk_norm"),
        lrs=(0.001, 0.03, 0.1),
        seeds=(0, 1),
        tuning_seeds=(7, 8),
    )
    plan = make_plan("lr", tiny(steps=4), grid)
    result = run_plan(plan, tmp_path / "a", Execution())
    trial = tuning_plan(plan)
    assert {run.config.seed for run in trial.runs} == {7, 8}
    about = json.loads((tmp_path / "a" / "study.json").read_text())
    assert [choice["remedy"] for choice in about["tuned"]] == ["none", "qk_norm"]
    best = {choice["remedy"]: choice["lr"] for choice in about["tuned"]}
    assert {(row["remedy"], row["lr"]) for row in result.table} == set(best.items())
    assert {row["seed"] for row in result.table} == {0, 1}
    assert all(
        choice["border"] == {0.001: "lowest", 0.1: "highest"}.get(choice["lr"], "")
        for choice in about["tuned"]
    )
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert len(stamps) == 2 * 3 * 2 + 2 * 2
    run_plan(plan, tmp_path / "a", Execution())  # a second time does nothing
    assert {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")
    } == stamps
    untuned = make_plan(
        "lr", tiny(steps=4), Grid(remedies=("none",), lrs=(0.03,), seeds=(0,))
    )
    with pytest.raises(RunDirectoryError, match="tune"):
        run_plan(untuned, tmp_path / "a", Execution())


def test_the_choice_by_hand(tiny: Make, tmp_path: Path) -> None:
    grid = Grid(
        remedies=("none",), lrs=(0.01, 0.03, 0.1), seeds=(0,), tuning_seeds=(7, 8)
    )
    plan = make_plan("lr", tiny(), grid)

    def chosen(*losses: float) -> tuple[float, str, list[float]]:
        trial = tuning_plan(plan).runs
        table = [
            {"run_id": run.config.run_id, "status": "done", "val_loss": loss}
            for run, loss in zip(trial, losses)
        ]
        found = tuned_plan(plan, table)
        (choice,) = found.tuned
        return (
            choice["lr"],
            choice["border"],
            [run.config.optim.lr for run in found.runs],
        )

    assert chosen(3.0, 3.0, 1.0, 4.0, 2.6, 2.6) == (0.03, "", [0.03])
    assert chosen(2.0, 2.0, 2.0, 2.0, 1.0, math.nan) == (0.01, "lowest", [0.01])
    assert chosen(*[math.nan] * 4, 9.0, 9.0) == (0.1, "highest", [0.1])
    with pytest.raises(RunDirectoryError, match="has not finished"):
        tuned_plan(plan, [])
    with pytest.raises(InvalidValueError, match="tuning seeds"):
        Grid(remedies=("none",), lrs=(0.1,), seeds=(0, 1), tuning_seeds=(1,))


GRID = Grid(
    remedies=["none", "lalr:tau=0.1"],
    lrs=[0.1],
    seeds=[0],
    blocks=["mla", "mha"],
    optimizers=["adamw", "muon"],
)
PARTS = ["mla, adamw", "mha, adamw", "mla, muon", "mha, muon"]


def test_the_study_is_attention_by_optimizers_by_remedies_by_rates_by_seeds() -> None:
    made = make_plan("mla")
    assert len(made.runs) == 2 * 2 * 6 * 3 * 3
    assert list(dict.fromkeys(run.role for run in made.runs)) == PARTS
    for run in made.runs:
        assert run.role == f"{run.config.model.block}, {run.config.optim.name}"
    first = made.runs[0].config
    assert (
        first.model.d_model,
        first.model.n_heads,
        first.data.context,
        first.data.batch,
    ) == (64, 4, 32, 8)
    remedies = (
        "none",
        "frozen_qk",
        "qk_norm",
        "qk_clip:threshold=30",
        "lalr:tau=0.1",
        "qk_lr:factor=0.1",
    )
    assert made.grid.remedies == remedies


def test_without_named_parts_there_is_one_grid(tiny: Make) -> None:
    plain = dataclasses.replace(GRID, blocks=(), optimizers=())
    assert {run.role for run in make_plan("mla", tiny(), plain).runs} == {"grid"}
    one = dataclasses.replace(GRID, optimizers=())
    assert [run.role for run in make_plan("mla", tiny(), one).runs] == [
        p for p in PARTS[:2] for _ in range(2)
    ]


def test_what_one_part_cannot_be_is_refused_before_anything_runs(tiny: Make) -> None:
    # Multi-head attention would rotate pairs of 7 dimensions; MLA has head sizes of its own.
    odd = tiny(model=ModelConfig(d_model=16, n_heads=2, head_dim=7))
    with pytest.raises(QkeelError, match="even number of dimensions"):
        make_plan("mla", odd, GRID)
    assert make_plan("mla", odd, dataclasses.replace(GRID, blocks=["mla"])).runs


def test_parts_are_run_recorded_extended_and_shown_apart(
    tiny: Make, tmp_path: Path
) -> None:
    out, base = tmp_path / "s", tiny(steps=6)
    run_plan(
        make_plan("mla", base, dataclasses.replace(GRID, blocks=["mla"])),
        out,
        Execution(),
    )
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
    assert sorted({(r["block"], r["optimizer"]) for r in lines}) == sorted(
        tuple(p.split(", ")) for p in PARTS
    )
    study = read_study(out)
    assert set(study.parts()) == set(PARTS)
    for name, part in study.parts().items():
        assert [run.config["model"]["block"] for run in part.runs] == [
            name.split(",")[0]
        ] * 2

    write(out, out / "report.html")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Latent-attention study" in page
    assert "losses are not comparable" not in page
    data = json.loads(page.split('id="report-data">')[1].split("</script>")[0])
    assert set(data["parts"]) == set(PARTS)
    assert all(len(part["losses"]) == 2 for part in data["parts"].values())


def test_no_two_runs_of_a_study_have_the_same_title() -> None:
    for name in STUDIES:
        study = STUDIES[name]
        axes = dataclasses.replace(
            study.grid, seeds=study.grid.seeds[:2]
        )  # a seed stands in a title as any other
        runs = {run.config.run_id: run for run in study.plan(None, axes).runs}
        titles = [run.title for run in runs.values()]
        assert len({*titles}) == len(titles), name
