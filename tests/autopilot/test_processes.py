"""All processes of a run decide alike and step alike; compiled models are what they were until the first action."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.autopilot.runs import EAGER, equal

from qkeel.autopilot import Decision, replay

BOUNDLESS = "ladder:threshold=5,patience=1,every=1,calm=4,allow_new_parameters=true"
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
    first, second = (json.loads((tmp_path / f"decisions {rank}").read_text()) for rank in range(2))
    assert first == second
    assert any("qk_clip" in text for text in first)
    assert equal(torch.load(tmp_path / "bits 0"), torch.load(tmp_path / "bits 1"))
    assert [str(d) for d in replay(tmp_path / "run", EAGER) if isinstance(d, Decision)] == first


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("policy", "stops"), [(EAGER, (1, 6, 24)), (BOUNDLESS, (2, 8, 24))], ids=["clip", "norm"])
def test_a_training_that_goes_on_in_another_process_is_the_one_that_was_not_stopped(
    policy: str, stops: tuple[int, ...], tmp_path: Path
) -> None:
    # Before the first action and after it; the second time while a norm is blended in.
    ended([["part", str(tmp_path), "0", "24", policy]])
    whole, known = torch.load(tmp_path / "from 0 to 24")
    losses, events, decisions, alarms = json.loads(known)
    assert any("qk_norm" in text for text in decisions) == (policy == BOUNDLESS)
    assert next(e["step"] for e in events if e.get("action") == "qk_clip") in range(stops[0] - 3, stops[1])
    assert alarms
    found: list[float] = []
    for first, last in itertools.pairwise((0, *stops)):
        ended([["part", str(tmp_path), str(first), str(last), policy]])
        bits, said = torch.load(tmp_path / f"from {first} to {last}")
        found += json.loads(said)[0]
    assert found == losses
    assert json.loads(said)[1:] == [events, decisions, alarms]
    assert equal(bits, whole)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_compiled_training_is_itself_until_the_first_action(tmp_path: Path) -> None:
    ended([["compiled", str(tmp_path)]])
