"""Reading studies and runs: what is read, in which order and under which name, and how damage is told."""

import dataclasses

import pytest
from synthetic_study import Made, grid, make_run, make_study

import qkeel.report
from qkeel.errors import RunDirectoryError, UnknownNameError
from qkeel.records import read_json, write_json
from qkeel.report.study_runs import read_study

SMALL = grid(("none", "qk_norm"), (0.01, 0.1))


def test_the_same_run_twice_counts_once(tmp_path):
    study = make_study(tmp_path / "study", SMALL)
    run = study / "runs" / SMALL[0].run_id
    assert len(read_study([study, run, run]).runs) == len(SMALL)


def test_runs_that_share_remedy_rate_and_seed_are_told_apart(tmp_path):
    study = make_study(tmp_path / "study", SMALL)
    again = make_run(tmp_path / "again", SMALL[0])
    read = read_study([study, again])
    assert {*read.remedies} == {"none (study)", "none", "none (again)", "qk_norm"}
    assert [run.row["remedy"] for run in read.finished] == [
        run.remedy for run in read.finished
    ]
    # Runs of equal settings in folders of one name keep apart too.
    other = make_run(tmp_path / "x" / "again", dataclasses.replace(SMALL[0], heads=8))
    names = {run.remedy for run in read_study([again, other]).runs}
    assert len(names) == len(read_study([again, other]).runs)


def test_the_baseline_comes_first_and_the_order_is_that_of_the_study(
    tmp_path,
):
    study = make_study(
        tmp_path / "study", grid(("qk_norm", "none", "lalr:tau=0.1"), (0.1,), (0,))
    )
    assert read_study(study).remedies == ["none", "qk_norm", "lalr:tau=0.1"]
    assert read_study(study, "lalr:tau=0.1").remedies == [
        "lalr:tau=0.1",
        "qk_norm",
        "none",
    ]
    without = make_study(
        tmp_path / "without", grid(("qk_norm", "lalr:tau=0.1"), (0.1,), (0,))
    )
    assert read_study(without).baseline == "qk_norm"  # the first
    with pytest.raises(UnknownNameError, match="Did you mean 'qk_norm'"):
        read_study(study, "qknorm")


def test_every_role_is_a_part(tmp_path):
    roles = ("grid", "mix 1")
    mixed = [dataclasses.replace(made, role=roles[made.seed]) for made in SMALL]
    parts = read_study(make_study(tmp_path / "parts", mixed)).parts()
    assert {name: len(part.runs) for name, part in parts.items()} == {
        "grid": 4,
        "mix 1": 4,
    }


def test_a_run_without_a_verdict_on_collapse_gets_one(tmp_path):
    runs = [
        make_run(tmp_path / str(entropy), Made(entropy=entropy, val_loss=3.0))
        for entropy in (0.05, 0.5)
    ]
    for run in runs:
        row = read_json(run / "summary.json")
        del row["collapsed"]
        write_json(run / "summary.json", row)
    assert [run.row["collapsed"] for run in read_study(runs).runs if run.row] == [
        True,
        False,
    ]


def test_a_path_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(
        RunDirectoryError,
        match=r"expected the directory of a study .* got no such directory",
    ):
        read_study(tmp_path / "absent")
    with pytest.raises(RunDirectoryError, match="got a directory with neither"):
        read_study(tmp_path)
    with pytest.raises(RunDirectoryError, match="empty list"):
        read_study([])
    with pytest.raises(
        TypeError
    ):  # InvalidTypeError, or that of the run-time type check of the tests
        read_study([3])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("study.json", "{"),
        ("study.json", "[]"),
        ("run/config.json", '{"model"'),
        ("run/summary.json", "[1]"),
        ("run/summary.json", None),
        ("run/metrics.jsonl", '{"step": 0}\n{"st\n{"step": 20}\n'),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, text):
    study = make_study(tmp_path / "study", SMALL[:1])
    path = study / name.replace("run/", f"runs/{SMALL[0].run_id}/")
    path.unlink()
    if text is not None:
        path.write_text(text)
        with pytest.raises(RunDirectoryError, match=path.name):
            qkeel.report.write(study, tmp_path / "r.html")
    else:
        with pytest.raises(RunDirectoryError, match=r"summary\.json is missing"):
            qkeel.report.write(study, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
