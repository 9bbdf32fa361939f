"""All processes of a run decide alike and step alike; compiled models are what they were until the first action."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.autopilot.runs import equal

ROOT = Path(__file__).parents[2]


def ended(commands: list[list[str]]) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.autopilot.processes", *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words in commands
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(said)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_decide_alike_and_keep_equal_weights(tmp_path: Path) -> None:
    ended([["parallel", str(tmp_path), str(rank), "2"] for rank in range(2)])
    first, second = (
        json.loads((tmp_path / f"decisions {rank}").read_text()) for rank in range(2)
    )
    assert first == second
    assert any("qk_clip" in text for text in first)
    assert equal(torch.load(tmp_path / "bits 0"), torch.load(tmp_path / "bits 1"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_compiled_training_is_itself_until_the_first_action(tmp_path: Path) -> None:
    ended([["compiled", str(tmp_path)]])
