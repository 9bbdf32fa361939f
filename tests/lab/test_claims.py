"""One shared folder, any number of processes: one trains each run, and all end with the whole table."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.forked import forkserver
from tests.lab.recorded import table

from qkeel.errors import RunInUseError
from qkeel.lab import (
    Execution,
    Grid,
    RunConfig,
    Watcher,
    claims,
    execute,
    make_plan,
    run,
    run_plan,
)
from qkeel.lab.claims import EXPIRY, claimed
from qkeel.records import RunDirectory, RunStatus

Make = Callable[..., RunConfig]
GRID = Grid(remedies=["none", "qk_norm"], lrs=[0.1], seeds=[0, 1, 2])


def claim_of_another_machine(
    run_directory: RunDirectory, number: int, age: float = 0.0
) -> Path:
    """Leaves a claim that another machine touched `age` seconds ago."""
    run_directory.path.mkdir(exist_ok=True)
    path = run_directory.path / f"claim.{number}"
    path.write_text("another-machine 12ab")
    touched = path.stat().st_mtime - age
    os.utime(path, (touched, touched))
    return path


def test_a_claim_of_another_machine_holds_until_it_expires(
    tiny: Make, tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path / "r")
    claim = claim_of_another_machine(directory, 3, age=EXPIRY / 2)
    with pytest.raises(RunInUseError, match="in use by another machine"):
        run(tiny(), directory.path)
    assert [path.name for path in directory.path.iterdir()] == ["claim.3"]
    claim_of_another_machine(directory, 3, age=EXPIRY + 5)
    assert run(tiny(), directory.path).status is RunStatus.DONE
    assert not claim.exists()
    assert not list(directory.path.glob("claim.*")), "a claim ends with its holder"


def test_a_claim_that_this_machine_left_behind_ends_with_its_process(
    tiny: Make, tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path / "r")
    claim_of_another_machine(directory, 1).write_text(f"{claims.machine()} 12ab")
    assert run(tiny(), directory.path).status is RunStatus.DONE
    with (
        directory.lock(),
        pytest.raises(RunInUseError, match="in use by another process"),
        claimed(directory),
    ):
        pass


def test_a_process_whose_claim_was_taken_over_writes_nothing_more(
    tiny: Make, tmp_path: Path
) -> None:
    steps: list[int] = []

    def take_over(record: Mapping[str, Any]) -> None:
        steps.append(record["step"])
        if record["step"] == 4:
            (path,) = (tmp_path / "r").glob("claim.*")
            claim_of_another_machine(
                RunDirectory(tmp_path / "r"), int(path.suffix[1:]) + 1
            )

    with pytest.raises(RunInUseError, match="taken over by another machine"):
        run(tiny(), tmp_path / "r", watcher=Watcher(on_record=take_over))
    assert steps == [0, 2, 4]
    assert [record["step"] for record in RunDirectory(tmp_path / "r").metrics()] == [
        0,
        2,
        4,
    ]
    assert not (tmp_path / "r" / "FAILED").exists()
    claim_of_another_machine(RunDirectory(tmp_path / "r"), 2, age=EXPIRY + 5)
    run(tiny(), tmp_path / "whole")
    assert (
        RunDirectory(tmp_path / "whole").metrics()[-1]["val_loss"]
        == run(tiny(), tmp_path / "r").metrics()[-1]["val_loss"]
    )


def test_of_two_that_see_an_expired_claim_one_gets_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path / "r")
    claim_of_another_machine(directory, 1, age=EXPIRY + 5)
    real = claims._newest
    seen = []

    def newest(run_directory: RunDirectory) -> object:
        claim = real(run_directory)
        seen.append(claim)
        if len(seen) == 2:  # between the look and the claim
            claim_of_another_machine(run_directory, 2)
        return claim

    monkeypatch.setattr(claims, "_newest", newest)
    with (
        pytest.raises(RunInUseError, match="in use by another machine"),
        claimed(directory),
    ):
        pass


def test_a_holder_gives_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "HEARTBEAT", 0.01)
    with claimed(RunDirectory(tmp_path / "r")) as claim:
        os.utime(claim.path, (1, 1))
        beat = threading.Event()
        for _ in range(1000):
            if claim.path.stat().st_mtime > 1:
                break
            beat.wait(0.01)
        assert claim.path.stat().st_mtime > 1


def command(config: RunConfig, out: Path) -> None:
    result = run_plan(make_plan("lr", config, GRID), out)
    assert not result.failures
    assert [row["status"] for row in result.table] == ["done"] * 6


def test_two_commands_on_one_folder_share_the_runs_and_both_end_with_the_whole_table(
    tiny: Make, tmp_path: Path
) -> None:
    others: list[Any] = []

    def start_another(outcome: object) -> None:
        if not others:
            others.append(
                forkserver().Process(target=command, args=(tiny(), tmp_path / "shared"))
            )
            others[0].start()

    result = run_plan(
        make_plan("lr", tiny(), GRID),
        tmp_path / "shared",
        Execution(on_outcome=start_another),
    )
    others[0].join()
    assert others[0].exitcode == 0
    assert [row["status"] for row in result.table] == ["done"] * 6
    command(tiny(), tmp_path / "alone")
    assert table(tmp_path / "shared") == table(tmp_path / "alone")


def test_a_run_that_another_process_trains_is_waited_for(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, out = make_plan("lr", tiny(), GRID), tmp_path / "s"
    run_plan(
        make_plan("lr", tiny(), Grid(remedies=["none"], lrs=[0.1], seeds=[0])), out
    )
    busy = plan.runs[1].config
    directory = RunDirectory(out / "runs" / busy.run_id)
    claim = claim_of_another_machine(directory, 1)
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            claim.unlink()
            run(busy, directory.path)

    monkeypatch.setattr(execute.time, "sleep", look)
    ended: list[object] = []
    result = run_plan(plan, out, Execution(on_outcome=ended.append))
    assert [row["status"] for row in result.table] == ["done"] * 6
    assert (len(ended), len(looks)) == (5, 2)
