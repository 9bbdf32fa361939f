"""Studies: plans, their axes, execution in one folder, what joins it and what is refused."""

import collections
import dataclasses
import json
import re

import pytest
from tests.lab.recorded import table

from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    QkeelError,
    RefusedError,
    RunDirectoryError,
    UnknownNameError,
)
from qkeel.lab import (
    Execution,
    Grid,
    LongContexts,
    checkpoint,
    execute,
    make_plan,
    run_plan,
    train,
)
from qkeel.lab.executors import Job, work
from qkeel.lab.plan import Primary
from qkeel.lab.quick_demo import quick_demo
from qkeel.lab.studies import STUDIES
from qkeel.records import TABLE_COLUMNS, read_json, write_json
from qkeel.report.study_runs import read_study

FOUR = Grid(remedies=["none", "quack:tau=0.1"], lrs=[0.1], seeds=[1, 0])
TWO = Grid(remedies=["none"], lrs=[0.1], seeds=[0, 1])
NOTHING = {"study": "lr", "base": {"": {}}, "remedies": [], "lrs": [], "seeds": []}
NOTHING |= {"command": ""}
ONE = Grid(remedies=["none"], lrs=[0.1], seeds=[0])


def plan(tiny, grid=FOUR, **fields):
    """Runs that end two steps after their first checkpoint."""
    return make_plan("lr", tiny(**{"steps": 6, **fields}), grid)


# Plans.


def test_a_plan_is_the_product_in_grid_order_and_two_spellings_of_a_remedy_are_one(
    tiny,
):
    remedies = ["none", "quack:tau=0.1", "lalr:tau=0.10"]
    made = plan(tiny, Grid(remedies=remedies, lrs=[0.1, 0.01], seeds=[1, 0]))
    assert made.grid.remedies == ("none", "lalr:tau=0.1")
    assert [
        (run.config.remedy, run.config.optim.lr, run.config.seed) for run in made.runs
    ] == [
        (remedy, lr, seed)
        for remedy in ("none", "lalr:tau=0.1")
        for lr in (0.01, 0.1)
        for seed in (0, 1)
    ]


def test_a_plan_is_checked_before_anything_is_written(tiny):
    # Multi-head attention would rotate pairs of 7 dimensions; MLA has head sizes of its own.
    odd = tiny(model={"d_model": 16, "n_heads": 2, "head_dim": 7})
    mla = dataclasses.replace(ONE, blocks=["mla"])
    assert make_plan("mla", odd, mla).runs
    grid = {"lrs": [0.1], "seeds": [0]}
    for kind, refused in (
        (
            QkeelError,
            lambda: make_plan(
                "mla", odd, dataclasses.replace(mla, blocks=["mla", "mha"])
            ),
        ),
        (
            InvalidValueError,
            lambda: plan(tiny, ONE, model={"attention": "kna+qna"}),
        ),
        (UnknownNameError, lambda: make_plan("lrs")),
        (
            UnknownNameError,
            lambda: plan(tiny, Grid(remedies=["none", "qk_nrom"], **grid)),
        ),
        (
            RefusedError,
            lambda: plan(tiny, Grid(remedies=["none", "qk_norm+lalr"], **grid)),
        ),
        (InvalidValueError, lambda: plan(tiny, dataclasses.replace(ONE, lrs=[0.0]))),
        (InvalidValueError, lambda: dataclasses.replace(ONE, seeds=[])),
        (InvalidTypeError, lambda: Grid(remedies="none", **grid)),
        (QkeelError, lambda: Grid(remedies=["none"], lrs=["fast"], seeds=[0])),
        (QkeelError, lambda: LongContexts(sequences=None)),
        (QkeelError, lambda: LongContexts(test_lengths=["512"])),
    ):
        with pytest.raises(kind):
            refused()


def test_every_combination_of_settings_is_a_part_and_one_value_is_that_of_all_runs(
    tiny, tmp_path
):
    sizes = {"d_model": [16, 32], "n_layers": [1, 2], "schedule": ["wsd"], "steps": [3]}
    runs = make_plan("lr", tiny(), dataclasses.replace(ONE, **sizes)).runs
    assert [run.role for run in runs] == [
        f"d_model {m}, n_layers {n}" for m in (16, 32) for n in (1, 2)
    ]
    assert [(r.config.model.d_model, r.config.model.n_layers) for r in runs] == [
        (m, n) for m in (16, 32) for n in (1, 2)
    ]
    assert {(r.config.optim.schedule, r.config.steps) for r in runs} == {("wsd", 3)}
    rows = execute.rows(tmp_path, [run.entry() for run in runs])
    assert [row["part"] for row in rows] == [run.role for run in runs]
    alone = dataclasses.replace(ONE, d_model=[32], head_dim=[8])
    (run,) = make_plan("lr", tiny(), alone).runs
    assert (run.role, run.config.model.d_model, run.config.model.head_dim) == (
        "grid",
        32,
        8,
    )


PARTS = ["mla, adamw", "mha, adamw", "mla, muon", "mha, muon"]


def test_the_study_of_latent_attention_has_parts_that_join_and_are_shown_apart(
    tiny, tmp_path
):
    made = make_plan("mla")
    assert len(made.runs) == 2 * 2 * 6 * 3 * 3
    assert list(dict.fromkeys(run.role for run in made.runs)) == PARTS
    for run in made.runs:
        assert run.role == f"{run.config.model.block}, {run.config.optim.name}"
    out, base = tmp_path / "s", tiny(steps=4)
    grid = dataclasses.replace(ONE, blocks=["mla", "mha"], optimizers=["adamw", "muon"])
    run_plan(make_plan("mla", base, dataclasses.replace(grid, blocks=["mla"])), out)
    before = {p: p.stat().st_mtime_ns for p in out.glob("runs/*/summary.json")}
    assert not run_plan(make_plan("mla", base, grid), out).failures
    for path, changed in before.items():
        assert path.stat().st_mtime_ns == changed  # not run twice
    assert read_json(out / "study.json")["blocks"] == ["mla", "mha"]
    parts = {tuple(part.split(", ")) for part in PARTS}
    assert {(row["block"], row["optimizer"]) for row in table(out)} == parts
    assert set(read_study(out).parts()) == set(PARTS)


@pytest.mark.parametrize("name", STUDIES)
def test_no_two_runs_of_a_study_have_the_same_title(name):
    study = STUDIES[name]
    seeds = study.grid.seeds[:2]  # a seed stands in a title as any other
    made = study.plan(None, dataclasses.replace(study.grid, seeds=seeds))
    titles = {run.config.run_id: run.title for run in made.runs}
    assert len({*titles.values()}) == len(titles)


# Execution.


def test_a_study_has_a_table_and_a_file_about_it(tiny, tmp_path):
    ended = []
    execution = Execution(on_outcome=ended.append, command="qkeel study lr")
    result = run_plan(plan(tiny), tmp_path / "s", execution)
    assert len(ended) == 4
    assert not result.failures
    assert (tmp_path / "s" / "table.csv").read_text().splitlines()[0].split(
        ","
    ) == list(TABLE_COLUMNS)
    first = table(tmp_path / "s")[0]
    assert float(first["val_loss"]) == result.table[0]["val_loss"]
    assert first["collapsed"] in ("true", "false")
    assert first["alarm_step"] == ""
    about = read_json(tmp_path / "s" / "study.json")
    assert (about["study"], about["command"]) == ("lr", "qkeel study lr")
    assert about["remedies"] == ["none", "lalr:tau=0.1"]
    entry = {"remedy": "none", "lr": 0.1, "seed": 0, "role": "grid"}
    assert about["runs"][0] == {"run_id": result.table[0]["run_id"], **entry}
    again = []
    run_plan(plan(tiny), tmp_path / "s", Execution(workers=2, on_outcome=again.append))
    assert not again, "what is done is skipped"


def test_a_study_takes_more_seeds_but_not_another_length(tiny, tmp_path):
    out = tmp_path / "s"
    run_plan(plan(tiny, ONE), out, Execution(command="first"))
    ended = []
    more = dataclasses.replace(TWO, remedies=["qk_norm", "none"])
    execution = Execution(command="second", on_outcome=ended.append)
    rows = run_plan(plan(tiny, more), out, execution).table
    assert len(ended) == 3
    assert [(row["remedy"], row["seed"]) for row in rows] == [
        (remedy, seed) for remedy in ("none", "qk_norm") for seed in (0, 1)
    ]
    run_plan(plan(tiny, ONE), out, Execution(command="third"))
    assert read_json(out / "study.json")["command"] == "first\nsecond"
    before = (out / "study.json").read_bytes()
    with pytest.raises(RunDirectoryError, match=r"optim.schedule, steps\)"):
        run_plan(plan(tiny, ONE, steps=14, optim={"schedule": "constant"}), out)
    assert (out / "study.json").read_bytes() == before


def test_a_failed_run_is_listed_and_does_not_stop_the_rest(tiny, tmp_path, monkeypatch):
    set_rate = train.set_rate

    def fail(run, step):
        if run.config.seed == 1 and step == 5:
            raise MemoryError("no memory left")
        set_rate(run, step)

    with monkeypatch.context() as patch:
        patch.setattr(train, "set_rate", fail)
        result = run_plan(plan(tiny, TWO), tmp_path / "s")
    assert [x.error for x in result.failures] == ["MemoryError: no memory left"]
    assert [row["status"] for row in result.table] == ["done", "failed"]
    assert table(tmp_path / "s")[1]["val_loss"] == ""
    assert not run_plan(plan(tiny, TWO), tmp_path / "s").failures
    run_plan(plan(tiny, TWO), tmp_path / "fresh")
    assert table(tmp_path / "s") == table(tmp_path / "fresh")


def test_a_study_refuses_to_mix_what_was_computed_otherwise(
    tiny, tmp_path, monkeypatch
):
    text, out = tmp_path / "text.txt", tmp_path / "s"
    text.write_bytes(bytes(range(32, 127)) * 20)
    data = {"source": str(text)}
    assert not run_plan(plan(tiny, ONE, data=data), out).failures
    (place,) = (out / "runs").iterdir()
    env, before = read_json(place / "env.json"), (out / "study.json").read_bytes()
    assert str(tmp_path) not in (place / "env.json").read_text(), "no folder is named"

    def refused(words):
        with pytest.raises(RunDirectoryError, match=re.escape(words)):
            run_plan(plan(tiny, TWO, data=data), out)
        assert (out / "study.json").read_bytes() == before
        # Finished runs are read as they are, whatever computes here.
        assert not run_plan(plan(tiny, ONE, data=data), out).failures

    computed_with = checkpoint.computed_with
    for name, value in (
        ("compiled_kernels", not env["compiled_kernels"]),
        ("torch", "0.1"),
        ("cpu", "abacus"),
    ):
        with monkeypatch.context() as patch:
            other = {name: value}
            patch.setattr(
                checkpoint,
                "computed_with",
                lambda config, other=other: {**computed_with(config), **other},
            )
            refused(f"{name}: {env[name]} there, {value} here")
    text.write_bytes(bytes(range(32, 127)) * 21)
    refused("corpus SHA-256: ")
    config = plan(tiny, TWO, data=data).runs[1].config
    job = Job(config.to_dict(), str(out / "runs" / config.run_id), "")
    assert "SHA-256" in work(job).error, "a worker on another machine finds out too"


def test_a_directory_of_something_else_is_left_alone(tiny, tmp_path):
    strange = {**NOTHING, "runs": [{"run_id": "../x", "role": ""}]}
    for i, (name, content) in enumerate(
        (
            ("letter.txt", "dear"),
            ("study.json", "{"),
            ("study.json", "[]"),
            ("study.json", '{"study": "lr"}'),
            ("study.json", json.dumps(strange)),
        )
    ):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(RunDirectoryError, match=r"study\.json"):
            run_plan(plan(tiny), folder)
        assert (folder / name).read_text() == content
        assert not (folder / "runs").exists()


# The demo.


def test_the_demo_has_all_seeds_where_it_decides_and_one_elsewhere(
    tmp_path,
):
    demo = make_plan("demo")
    arms = collections.Counter(
        (run.config.remedy, run.config.optim.lr) for run in demo.runs
    )
    assert len(demo.runs) == 24
    many = {arm for arm, seeds in arms.items() if seeds > 1}
    assert many == {("none", 0.04), ("qk_norm", 0.04)}
    assert arms["qk_norm", 0.04] == 8
    assert {lr for remedy, lr in arms if remedy == "none"} == {0.015, 0.04, 0.2}
    assert {lr for remedy, lr in arms if remedy == "softcap:cap=50"} == {0.2}
    # A page about an unfinished demo has whole comparisons, seed by seed.
    first = execute.pending(demo, tmp_path)[:16]
    assert [(run.config.optim.lr, run.config.seed) for run in first] == [
        (0.04, seed) for seed in range(8) for _ in range(2)
    ]
    assert demo.primary == Primary(remedy="qk_norm", baseline="none", lr=0.04)
    assert make_plan("demo", grid=ONE).primary is None, "one side is not in the grid"


def test_the_primary_comparison_is_recorded_and_kept_where_more_runs_join(
    tiny, tmp_path
):
    out = tmp_path / "s"
    grid = Grid(remedies=["none", "qk_norm"], lrs=[0.04], seeds=[0])
    for seeds in ([0], [0, 1]):
        made = make_plan("demo", tiny(steps=2), dataclasses.replace(grid, seeds=seeds))
        result = run_plan(made, out)
        assert [row["primary"] for row in result.table] == [True] * 2 * len(seeds)
    about = read_json(out / "study.json")
    assert about.pop("primary") == {"remedy": "qk_norm", "baseline": "none", "lr": 0.04}
    write_json(out / "study.json", about)
    with pytest.raises(RunDirectoryError, match="primary: the primary comparison"):
        run_plan(made, out)


def test_the_quick_demo_shows_a_collapse_with_its_forecast_and_a_healthy_model():
    lines = []
    quick_demo(lines.append, steps=30)
    remedied = lines.index("with qk_norm:")
    assert any("will pass 1,000 at step" in line for line in lines[:remedied])
    assert any("collapsed" in line for line in lines[:remedied])
    assert any("healthy" in line for line in lines[remedied:])
    assert not any(" at step " in line for line in lines[remedied:])  # no alarm
