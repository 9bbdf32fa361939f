"""One shared folder, any number of processes: one trains each run, and all end with the whole table."""

import os
import threading

import pytest
from tests.forked import forkserver
from tests.lab.recorded import table

from qkeel.errors import RunInUseError
from qkeel.lab import (
    Execution,
    Grid,
    Watcher,
    execute,
    make_plan,
    run,
    run_claims,
    run_plan,
)
from qkeel.lab.run_claims import EXPIRY, claimed
from qkeel.records import RunDirectory, RunStatus

GRID = Grid(remedies=["none", "qk_norm"], lrs=[0.1], seeds=[0, 1])


def foreign_claim(directory, number, age=0.0):
    """Leaves a claim that another machine touched `age` seconds ago."""
    directory.path.mkdir(exist_ok=True)
    path = directory.path / f"claim.{number}"
    path.write_text("another-machine 12ab")
    touched = path.stat().st_mtime - age
    os.utime(path, (touched, touched))
    return path


def test_a_claim_holds_until_it_expires_or_its_process_on_this_machine_ends(
    tiny, tmp_path
):
    directory = RunDirectory(tmp_path / "r")
    foreign_claim(directory, 3, age=EXPIRY / 2)
    with pytest.raises(RunInUseError, match="in use by another machine"):
        run(tiny(), directory.path)
    assert [path.name for path in directory.path.iterdir()] == ["claim.3"]
    foreign_claim(directory, 3, age=EXPIRY + 5)
    assert run(tiny(), directory.path).status is RunStatus.DONE
    assert not list(directory.path.glob("claim.*")), "a claim ends with its holder"
    left = RunDirectory(tmp_path / "left")
    foreign_claim(left, 1).write_text(f"{run_claims.machine()} 12ab")
    assert run(tiny(), left.path).status is RunStatus.DONE


def test_a_process_whose_claim_was_taken_over_writes_nothing_more(tiny, tmp_path):
    directory = RunDirectory(tmp_path / "r")

    def take_over(record):
        if record["step"] == 4:
            (path,) = directory.path.glob("claim.*")
            foreign_claim(directory, int(path.suffix[1:]) + 1)

    with pytest.raises(RunInUseError, match="taken over by another machine"):
        run(tiny(), directory.path, watcher=Watcher(on_record=take_over))
    assert [record["step"] for record in directory.metrics()] == [0, 2, 4]
    assert not (directory.path / "FAILED").exists()
    foreign_claim(directory, 2, age=EXPIRY + 5)
    whole = run(tiny(), tmp_path / "whole").metrics()[-1]
    assert run(tiny(), directory.path).metrics()[-1]["val_loss"] == whole["val_loss"]


def test_of_two_that_see_an_expired_claim_one_gets_the_run(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path / "r")
    foreign_claim(directory, 1, age=EXPIRY + 5)
    newest, looks = run_claims._newest, []

    def look(run_directory):
        claim = newest(run_directory)
        looks.append(claim)
        if len(looks) == 2:  # between the look and the claim
            foreign_claim(run_directory, 2)
        return claim

    monkeypatch.setattr(run_claims, "_newest", look)
    with (
        pytest.raises(RunInUseError, match="in use by another machine"),
        claimed(directory),
    ):
        pass


def test_a_holder_gives_signs_of_life_and_keeps_others_of_its_machine_out(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(run_claims, "HEARTBEAT", 0.01)
    directory = RunDirectory(tmp_path / "r")
    with claimed(directory) as claim:
        with pytest.raises(RunInUseError), claimed(directory):
            pass
        os.utime(claim.path, (1, 1))
        for _ in range(1000):
            if claim.path.stat().st_mtime > 1:
                break
            threading.Event().wait(0.01)
        assert claim.path.stat().st_mtime > 1


def command(config, out):
    result = run_plan(make_plan("lr", config, GRID), out)
    assert not result.failures
    assert [row["status"] for row in result.table] == ["done"] * 4


def test_two_commands_on_one_folder_share_the_runs_and_both_end_with_the_whole_table(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr(execute, "BUSY_WAIT", 0.05)
    others = []
    config = tiny(steps=8)

    def start_another(outcome):
        if not others:
            arguments = (config, tmp_path / "shared")
            others.append(forkserver().Process(target=command, args=arguments))
            others[0].start()

    execution = Execution(on_outcome=start_another)
    run_plan(make_plan("lr", config, GRID), tmp_path / "shared", execution)
    others[0].join()
    assert others[0].exitcode == 0
    command(config, tmp_path / "alone")
    assert table(tmp_path / "shared") == table(tmp_path / "alone")


def test_a_run_that_another_process_trains_is_waited_for(tiny, tmp_path, monkeypatch):
    plan, out = make_plan("lr", tiny(), GRID), tmp_path / "s"
    run_plan(
        make_plan("lr", tiny(), Grid(remedies=["none"], lrs=[0.1], seeds=[0])), out
    )
    busy = plan.runs[1].config
    directory = RunDirectory(out / "runs" / busy.run_id)
    claim, looks, ended = foreign_claim(directory, 1), [], []

    def look(seconds):
        looks.append(seconds)
        if len(looks) == 2:
            claim.unlink()
            run(busy, directory.path)

    monkeypatch.setattr(execute.time, "sleep", look)
    result = run_plan(plan, out, Execution(on_outcome=ended.append))
    assert [row["status"] for row in result.table] == ["done"] * 4
    assert (len(ended), len(looks)) == (3, 2)
