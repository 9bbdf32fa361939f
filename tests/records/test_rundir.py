"""A run directory: its status, its configuration, what is cut back on resume, and its lock."""

import os
import shutil
import subprocess
import sys

import pytest

from qkeel.errors import DamagedFileError, RunDirectoryError
from qkeel.records import RunDirectory, RunStatus, append_line, write_json
from qkeel.records.run_directory import made_on


def test_done_wins_over_failed_and_failed_over_started(tmp_path):
    run = RunDirectory(tmp_path / "r")
    assert run.status is RunStatus.MISSING
    assert run.failure() == ""
    run.open({"lr": 0.1})
    assert run.status is RunStatus.STARTED
    (run.path / "FAILED").write_text("why")
    assert run.status is RunStatus.FAILED
    assert run.failure() == "why"
    (run.path / "DONE").touch()
    assert run.status is RunStatus.DONE


def test_the_same_configuration_opens_again_and_another_is_refused_by_key(
    tmp_path,
):
    run = RunDirectory(tmp_path / "r")
    run.open({"lr": 0.1, "model": {"d": 8, "h": 2}})
    run.open({"lr": 0.1, "model": {"d": 8, "h": 2}})
    with pytest.raises(RunDirectoryError, match=r"these differ: lr, model\.d\)"):
        run.open({"lr": 0.2, "model": {"d": 16, "h": 2}})
    assert run.config() == {"lr": 0.1, "model": {"d": 8, "h": 2}}


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("words")
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        RunDirectory(tmp_path).open({})
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_cutting_to_sizes_drops_later_bytes_and_lost_ones_are_damage(
    tmp_path,
):
    run = RunDirectory(tmp_path)
    append_line(tmp_path / "metrics.jsonl", {"step": 0})
    sizes = run.sizes()
    for name in ("metrics.jsonl", "events.jsonl"):
        append_line(tmp_path / name, {"step": 10})
    run.cut_to(sizes)
    assert [line["step"] for line in run.metrics()] == [0]
    assert run.events() == []
    os.truncate(tmp_path / "metrics.jsonl", sizes["metrics.jsonl"] - 1)
    with pytest.raises(DamagedFileError, match=r"metrics\.jsonl has"):
        run.cut_to(sizes)


def test_a_line_without_a_step_is_damage(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"loss": 1.0}\n')
    with pytest.raises(DamagedFileError, match=r"metrics\.jsonl, line 2 has no step"):
        RunDirectory(tmp_path).metrics()


def test_reading_a_run_that_wrote_nothing_says_what_is_missing(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.metrics() == run.events() == []
    for read in (run.config, run.env, run.summary):
        with pytest.raises(RunDirectoryError, match="is missing"):
            read()


def test_a_finished_run_knows_how_much_it_wrote(tmp_path):
    run = RunDirectory(tmp_path)
    run.open({"lr": 0.1})
    write_json(tmp_path / "env.json", {"torch": "2"})
    for step in (0, 10):
        append_line(tmp_path / "metrics.jsonl", {"step": step})
    run.finish({"steps": 10})
    run.check_complete()
    lines = (tmp_path / "metrics.jsonl").read_bytes()

    def damaged(words):
        with pytest.raises(DamagedFileError, match=words):
            run.check_complete()

    for change in (lines[: len(lines) // 2], b""):
        (tmp_path / "metrics.jsonl").write_bytes(change)
        damaged(r"metrics\.jsonl has")
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    env = (tmp_path / "env.json").rename(tmp_path / "away")
    damaged(r"env\.json is missing")
    env.rename(tmp_path / "env.json")
    (tmp_path / "DONE").write_text("{")
    damaged("DONE is not complete JSON")
    (tmp_path / "DONE").write_text("")  # as version 0.1.0 wrote it
    run.check_complete()


def test_two_processes_cannot_hold_one_directory_and_a_dead_one_does_not(
    tmp_path,
):
    code = (
        "import sys, time; from pathlib import Path; from qkeel.records import RunDirectory\n"
        "with RunDirectory(Path(sys.argv[1])).lock():\n    print('held', flush=True); time.sleep(60)"
    )
    run = RunDirectory(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with (
                pytest.raises(RunDirectoryError, match=rf"process {other.pid}"),
                run.lock(),
            ):
                pass
        finally:
            other.kill()
            other.wait()
    with run.lock():
        pass


@pytest.mark.skipif(shutil.which("git") is None, reason="git makes the repositories")
def test_the_commit_is_what_git_has_checked_out(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        run = ["git", *who, "-c", "commit.gpgsign=false", *words]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout

    monkeypatch.chdir(tmp_path)
    assert "commit" not in made_on()
    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "-m", "one")
    assert made_on()["commit"] == git("rev-parse", "HEAD")[:12]
    monkeypatch.setenv("PATH", "")
    assert "commit" not in made_on()
