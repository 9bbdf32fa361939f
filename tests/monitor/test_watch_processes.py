"""Several processes measure as one, and none ever waits for another that has stopped."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.forked import Forked
from tests.monitor.processes import FAST, SLOW


def run(where: Path, names: list[str], seconds: float) -> None:
    """Both processes, which must end by themselves: one that waits for ever is a failure."""
    both = [
        Forked("tests.monitor.processes", str(rank), str(where / "store"), *names)
        for rank in range(2)
    ]
    said = []
    try:
        for process in both:
            said.append(process.communicate(timeout=seconds)[0])
    except subprocess.TimeoutExpired:
        said.append("a process was still waiting")
    finally:
        for process in both:
            process.kill()
    for process, text in zip(both, said):
        assert process.returncode == 0, "\n".join(said)
        assert [line for line in text.splitlines() if line.startswith("passed")] == [
            f"passed {n}" for n in names
        ]


def test_two_processes_measure_as_one_and_stop_as_one(tmp_path: Path) -> None:
    run(tmp_path, [case.__name__ for case in FAST], 500)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_two_processes_with_sharded_or_split_weights(
    case: object, tmp_path: Path
) -> None:
    run(tmp_path, [case.__name__], 500)  # type: ignore[attr-defined]
