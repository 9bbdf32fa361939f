"""The search of a split model: a fault at any instant of it, and processes that come to it late, on all processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.forked import Forked


def run(folder: Path, *cases: str) -> None:
    """Two processes, which must end by themselves."""
    started = [
        Forked("tests.processes.searching", str(rank), str(folder), *cases)
        for rank in range(2)
    ]
    try:
        said = [process.communicate()[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, said, strict=True):
        assert process.returncode == 0, "\n".join(said)
        assert all(f"{case}\n" in text for case in cases), text


@pytest.mark.timeout(900)
def test_a_fault_of_one_process_and_a_late_one_leave_nobody_waiting(
    tmp_path: Path,
) -> None:
    run(tmp_path, "some_faults", "late_processes")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["faults_with_fully_shard", "faults_with_split_heads"])
def test_a_fault_at_every_instant(case: str, tmp_path: Path) -> None:
    run(tmp_path, case)
