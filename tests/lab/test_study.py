from __future__ import annotations

import collections
import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.lab.recorded import table

from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    RefusedError,
    RunDirectoryError,
    UnknownNameError,
)
from qkeel.lab import (
    Execution,
    Grid,
    Plan,
    RunConfig,
    checkpoint,
    execute,
    make_plan,
    run_plan,
    study,
    train,
)
from qkeel.lab.checkpoint import RunState
from qkeel.lab.execute import rows
from qkeel.lab.executors import Job, Outcome, work
from qkeel.lab.plan import Primary
from qkeel.lab.quick_demo import quick_demo
from qkeel.records import TABLE_COLUMNS, read_json, write_json

Make = Callable[..., RunConfig]
GRID = Grid(remedies=["none", "quack:tau=0.1"], lrs=[0.1, 0.01], seeds=[1, 0])
FOUR = Grid(remedies=["none", "quack:tau=0.1"], lrs=[0.1], seeds=[1, 0])


def plan(tiny: Make, grid: Grid = GRID, **fields: object) -> Plan:
    """Runs that end two steps after their first checkpoint."""
    return make_plan("lr", tiny(**{"steps": 6, **fields}), grid)


def test_a_study_is_the_product_in_grid_order(tiny: Make, tmp_path: Path) -> None:
    seen: list[Outcome] = []
    result = run_plan(
        plan(tiny),
        tmp_path / "s",
        Execution(on_outcome=seen.append, command="qkeel study lr"),
    )
    assert len(seen) == 8
    assert not result.failures
    assert [(r["remedy"], r["lr"], r["seed"]) for r in result.table] == [
        (remedy, lr, seed)
        for remedy in ("none", "lalr:tau=0.1")
        for lr in (0.01, 0.1)
        for seed in (0, 1)
    ]
    with open(tmp_path / "s" / "table.csv") as file:
        assert file.readline().strip().split(",") == list(TABLE_COLUMNS)
    first = table(tmp_path / "s")[0]
    assert float(first["val_loss"]) == result.table[0]["val_loss"]
    assert first["collapsed"] in ("true", "false")
    assert first["alarm_step"] == ""
    about = read_json(tmp_path / "s" / "study.json")
    assert about["study"] == "lr"
    assert about["command"] == "qkeel study lr"
    assert (about["remedies"], about["lrs"], about["seeds"]) == (
        ["none", "lalr:tau=0.1"],
        [0.01, 0.1],
        [0, 1],
    )
    assert about["runs"][0] == {
        "run_id": result.table[0]["run_id"],
        "remedy": "none",
        "lr": 0.01,
        "seed": 0,
        "role": "grid",
    }


def test_two_workers_give_the_table_of_one_and_what_is_done_is_skipped(
    tiny: Make, tmp_path: Path
) -> None:
    run_plan(plan(tiny, FOUR), tmp_path / "one", Execution())
    run_plan(plan(tiny, FOUR), tmp_path / "two", Execution(workers=2))
    assert table(tmp_path / "one") == table(tmp_path / "two")
    seen: list[Outcome] = []
    before = (tmp_path / "two" / "table.csv").read_bytes()
    run_plan(
        plan(tiny, FOUR), tmp_path / "two", Execution(workers=2, on_outcome=seen.append)
    )
    assert not seen
    assert (tmp_path / "two" / "table.csv").read_bytes() == before


def test_a_study_takes_more_seeds_but_not_another_length(
    tiny: Make, tmp_path: Path
) -> None:
    small = Grid(remedies=["none"], lrs=[0.1], seeds=[1])
    run_plan(plan(tiny, small), tmp_path / "s", Execution(command="first"))
    seen: list[Outcome] = []
    more = dataclasses.replace(small, seeds=[0, 1], remedies=["qk_norm", "none"])
    result = run_plan(
        plan(tiny, more),
        tmp_path / "s",
        Execution(command="second", on_outcome=seen.append),
    )
    assert len(seen) == 3
    assert [(r["remedy"], r["seed"]) for r in result.table] == [
        ("none", 0),
        ("none", 1),
        ("qk_norm", 0),
        ("qk_norm", 1),
    ]
    assert read_json(tmp_path / "s" / "study.json")["command"] == "first\nsecond"
    run_plan(plan(tiny, small), tmp_path / "s", Execution(command="third"))
    assert read_json(tmp_path / "s" / "study.json")["command"] == "first\nsecond", (
        "a repeat adds no command"
    )
    before = (tmp_path / "s" / "study.json").read_bytes()
    with pytest.raises(
        RunDirectoryError, match=r"these differ: optim.schedule, steps\)"
    ):
        run_plan(
            plan(tiny, small, steps=14, optim_schedule="constant"),
            tmp_path / "s",
            Execution(),
        )
    assert (tmp_path / "s" / "study.json").read_bytes() == before


def test_a_failed_run_is_listed_and_does_not_stop_the_rest(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = train.set_rate

    def set_rate(run: RunState, number: int) -> None:
        if run.config.seed == 1 and number == 5:
            raise MemoryError("no memory left")
        real(run, number)

    monkeypatch.setattr(train, "set_rate", set_rate)
    result = run_plan(plan(tiny, FOUR), tmp_path / "s", Execution())
    assert [f.error for f in result.failures] == ["MemoryError: no memory left"] * 2
    assert [r["status"] for r in result.table] == ["done", "failed"] * 2
    failed = table(tmp_path / "s")[1]
    assert (failed["remedy"], failed["seed"], failed["val_loss"]) == ("none", "1", "")
    monkeypatch.undo()
    result = run_plan(plan(tiny, FOUR), tmp_path / "s", Execution())
    assert not result.failures
    run_plan(plan(tiny, FOUR), tmp_path / "fresh", Execution())
    assert table(tmp_path / "s") == table(tmp_path / "fresh")


def test_a_study_refuses_to_mix_what_was_computed_otherwise(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 20)
    data = type(tiny().data)(source=str(text), context=8, batch=2)
    small, more = (
        Grid(remedies=["none"], lrs=[0.1], seeds=[0]),
        Grid(remedies=["none"], lrs=[0.1], seeds=[0, 1]),
    )
    out = tmp_path / "s"
    assert not run_plan(plan(tiny, small, data=data), out, Execution()).failures
    env = read_json(out / "runs" / os.listdir(out / "runs")[0] / "env.json")
    assert {"torch", "cpu", "device", "compiled_kernels"} < set(env)
    before = (out / "study.json").read_bytes()

    def refused(says: str) -> None:
        with pytest.raises(RunDirectoryError, match=re.escape(says)) as found:
            run_plan(plan(tiny, more, data=data), out, Execution())
        assert str(found.value).endswith(
            "choose another directory; nothing was changed."
        )
        assert (out / "study.json").read_bytes() == before
        # Finished runs are read as they are, whatever computes here.
        assert not run_plan(plan(tiny, small, data=data), out, Execution()).failures

    real = checkpoint.computed_with
    for name, value in (
        ("compiled_kernels", not env["compiled_kernels"]),
        ("torch", "0.1"),
        ("cpu", "abacus"),
    ):
        monkeypatch.setattr(
            checkpoint,
            "computed_with",
            lambda config, change=(name, value): dict([*real(config).items(), change]),
        )
        refused(f"{name}: {env[name]} there, {value} here")
    monkeypatch.setattr(checkpoint, "computed_with", real)
    text.write_bytes(bytes(range(32, 127)) * 21)
    refused("corpus SHA-256: ")
    text.write_bytes(bytes(range(32, 127)) * 20)
    # An earlier version did not record the processor.
    env.pop("cpu")
    env.pop("crc32", None)
    write_json(out / "runs" / os.listdir(out / "runs")[0] / "env.json", env)
    refused("cpu: not recorded there")
    config = plan(tiny, more, data=data).runs[1].config
    outcome = work(Job(config.to_dict(), str(out / "runs" / config.run_id), ""))
    assert "cpu: not recorded there" in outcome.error, (
        "a worker on another machine finds out too"
    )


def test_a_directory_of_something_else_is_left_alone(
    tiny: Make, tmp_path: Path
) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(RunDirectoryError, match=r"has no study.json"):
        run_plan(plan(tiny), tmp_path, Execution())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"study": "lr"}'])
def test_a_damaged_study_file_is_one_clear_error(
    tiny: Make, tmp_path: Path, content: str
) -> None:
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(RunDirectoryError, match=r"study.json"):
        run_plan(plan(tiny), tmp_path, Execution())


def test_a_plan_is_checked_before_anything_is_written(tiny: Make) -> None:
    for remedies, kind, message in (
        (["none", "qk_nrom"], UnknownNameError, "Did you mean 'qk_norm'"),
        (["none", "qk_norm+lalr"], RefusedError, "lalr"),
    ):
        with pytest.raises(kind, match=message):
            plan(tiny, Grid(remedies=remedies, lrs=[0.1], seeds=[0]))
    with pytest.raises(UnknownNameError, match="unknown study 'lrs'"):
        make_plan("lrs")
    with pytest.raises(InvalidValueError, match="at least one of seeds"):
        Grid(remedies=["none"], lrs=[0.1], seeds=[])
    with pytest.raises(InvalidTypeError, match="expected a list of remedies"):
        Grid(remedies="none", lrs=[0.1], seeds=[0])
    with pytest.raises(InvalidValueError, match="above 0 for lr"):
        plan(tiny, Grid(remedies=["none"], lrs=[0.0], seeds=[0]))


def test_two_spellings_of_a_remedy_are_one_run(tiny: Make) -> None:
    made = plan(
        tiny, Grid(remedies=["quack:tau=0.1", "lalr:tau=0.10"], lrs=[0.1], seeds=[0])
    )
    assert [run.config.remedy for run in made.runs] == ["lalr:tau=0.1"]
    assert made.grid.remedies == ("lalr:tau=0.1",)


def test_the_demo_has_all_seeds_where_it_decides_and_one_elsewhere() -> None:
    plan = make_plan("demo")
    arms = collections.Counter(
        (run.config.remedy, run.config.optim.lr) for run in plan.runs
    )
    assert len(plan.runs) == 24
    assert {arm for arm, seeds in arms.items() if seeds > 1} == {
        ("none", 0.04),
        ("qk_norm", 0.04),
    }
    assert arms["qk_norm", 0.04] == 8
    assert {lr for remedy, lr in arms if remedy == "none"} == {0.015, 0.04, 0.2}
    assert {lr for remedy, lr in arms if remedy == "softcap:cap=50"} == {0.2}


def test_the_demo_begins_with_the_two_sides_of_its_comparison_seed_by_seed(
    tmp_path: Path,
) -> None:
    begins = [
        (run.config.optim.lr, run.config.seed)
        for run in execute.pending(make_plan("demo"), tmp_path)
    ]
    assert begins[:16] == [(0.04, seed) for seed in range(8) for _ in range(2)]


def test_the_quick_demo_shows_a_collapse_with_its_forecast_and_a_healthy_model(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    quick_demo(lines.append)
    remedied = lines.index("with qk_norm:")
    without = lines[:remedied]
    assert any("will pass 1,000 at step" in line for line in without)
    assert any("collapsed" in line for line in without)
    assert any("healthy" in line for line in lines[remedied:])
    assert not any(" at step " in line for line in lines[remedied:])  # no alarm


def test_the_demo_names_its_comparison_if_both_sides_are_in_the_grid() -> None:
    assert make_plan("demo").primary == Primary(
        remedy="qk_norm", baseline="none", lr=0.04
    )
    assert (
        make_plan("demo", grid=Grid(remedies=["none"], lrs=[0.04], seeds=[0])).primary
        is None
    )
    assert make_plan("lr").primary is None


def test_the_primary_comparison_is_recorded_and_kept_where_more_runs_join(
    tiny: Make, tmp_path: Path
) -> None:
    grid = Grid(remedies=["none", "qk_norm"], lrs=[0.04], seeds=[0])
    out = tmp_path / "s"
    for seeds in ([0], [0, 1]):
        plan = make_plan("demo", tiny(steps=4), dataclasses.replace(grid, seeds=seeds))
        result = run_plan(plan, out, Execution())
        assert read_json(out / "study.json")["primary"] == {
            "remedy": "qk_norm",
            "baseline": "none",
            "lr": 0.04,
        }
        assert [row["primary"] for row in result.table] == [True] * 2 * len(seeds)
    assert "primary" in (out / "table.csv").read_text().splitlines()[0].split(",")
    about = {k: v for k, v in read_json(out / "study.json").items() if k != "primary"}
    write_json(out / "study.json", about)
    with pytest.raises(RunDirectoryError, match="primary: the primary comparison"):
        run_plan(plan, out, Execution())


def test_the_python_entry_runs_a_study(tiny: Make, tmp_path: Path) -> None:
    result = study(
        "lr", remedies=["none"], lrs=[0.1], seeds=[0], out=tmp_path / "s", base=tiny()
    )
    assert result.path == tmp_path / "s"
    assert result.table[0]["status"] == "done"


def test_a_run_without_result_is_a_row_with_its_name(tmp_path: Path) -> None:
    entry = {"run_id": "abc", "remedy": "none", "lr": 0.1, "seed": 0}
    (row,) = rows(tmp_path, [entry])
    assert row["status"] == "missing"
    assert row["val_loss"] is None
    assert {k: row[k] for k in entry} == entry


def test_an_error_of_a_job_becomes_its_outcome(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "other").write_text("")
    job = Job(tiny().to_dict(), str(tmp_path / "r"), "")
    outcome = work(job)
    assert "not empty" in outcome.error


def test_progress_reads_the_last_whole_line(tmp_path: Path) -> None:
    assert execute.last_step(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n{"step": 20}\n{"ste')
    assert execute.last_step(tmp_path) == 20
