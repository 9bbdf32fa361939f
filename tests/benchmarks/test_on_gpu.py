"""`make gpu` and its training run where no GPU is: sections end by themselves or are ended, results stay."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.on_gpu import __main__ as on_gpu
from benchmarks.on_gpu import train
from benchmarks.on_gpu.__main__ import GOALS, SECTIONS, Section

from qkeel.records import RunDirectory, RunStatus


def test_a_section_that_fails_or_takes_too_long_leaves_the_others_and_its_last_lines(
    monkeypatch, tmp_path, capsys
):
    endless = (
        "timeit",
        "-n1",
        "-r1",
        "print('begun', flush=True); __import__('time').sleep(600)",
    )
    sections = (
        Section("endless", 1, endless, benchmark=False),
        Section("broken", 60, ("a_module_that_is_not",), benchmark=False),
        Section("fine", 60, ("platform",), benchmark=False),
    )
    monkeypatch.setattr(on_gpu, "SECTIONS", sections)
    assert on_gpu.main(["--toy", "--out", str(tmp_path)]) == 1
    results = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert [found["status"] for found in results["sections"].values()] == [
        "out of time",
        "failed",
        "done",
    ]
    assert "a_module_that_is_not" in results["sections"]["broken"]["last lines"][-1]
    assert "| fine |" in next(tmp_path.glob("*.md")).read_text()
    assert "out of time" in capsys.readouterr().out


def test_sections_take_five_minutes_at_most_and_goals_read_theirs():
    assert sum(s.seconds for s in SECTIONS if not s.extra) <= 300
    assert {goal.section for goal in GOALS} <= {section.name for section in SECTIONS}
    goal = GOALS[0]
    rows = [{"case": goal.case, "ratio": [1.0, 1.1, 1.2]}]
    lines = on_gpu.verdicts(
        {goal.section: {"tables": {goal.table + " of a shape": rows}}}
    )
    assert lines[0].endswith("1.100 met")
    assert all(line.endswith("not measured") for line in lines[1:])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_section_runs_at_toy_size_and_has_the_cases_that_goals_are_about(
    monkeypatch, tmp_path
):
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    monkeypatch.setenv("PYTHONPATH", f"{root / 'src'}:{root}")
    monkeypatch.setattr(
        on_gpu, "SECTIONS", [s for s in SECTIONS if s.benchmark and not s.extra]
    )
    assert on_gpu.main(["--toy", "--out", str(tmp_path)]) == 0
    results = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert results["goals"] == []  # of a GPU
    lines = on_gpu.verdicts(results["sections"])
    missing = [line for line in lines if "not measured" in line]
    # Operators and counters that a CPU does not have.
    absent = ("EFFICIENT", "CUDNN", "peak memory")
    assert len(missing) == len(absent)
    assert all(any(word in line for word in absent) for line in missing)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::qkeel.errors.QkeelWarning"
)  # scales that were derived for larger heads
def test_recipes_train_in_pieces_to_the_table_of_longer_texts(monkeypatch, tmp_path):
    # A second passes whenever the clock is read, so a piece ends at a step that is known.
    asked = itertools.count(1.0)
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: next(asked)))
    words = [
        "--toy",
        "--steps",
        "2",
        "--data",
        "topics",
        "--forms",
        "baseline",
        "kna_logn",
        "--recipes",
        train.RECIPES[1],
    ]
    words += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    states = []
    for seconds in (1, 480):
        minutes = (seconds + train.MEASURING) / 60
        assert train.main([*words, "--minutes", str(minutes)]) == 0
        states.append(
            [
                RunDirectory(path).status
                for path in sorted((tmp_path / "runs").iterdir())
            ]
        )
    assert states == [[RunStatus.STARTED], [RunStatus.DONE] * 2]
    found = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert found["about"]["steps"].startswith("2; the recipes have 30000")
    for run in found["runs"].values():
        assert run["step"] == run["of"] == 2
        assert set(run["loss"]) == {"8", "16", "32", "64"}
