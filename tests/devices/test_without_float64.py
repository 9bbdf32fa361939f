"""On a device that has no float64, as Apple's, models are watched, changed, trained and evaluated all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from qkeel.lab import RunConfig
from qkeel.lab.build_run import resolve
from qkeel.lab.studies import STUDIES
from qkeel.remedies import REMEDIES


def test_auto_is_the_cpu_where_there_is_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert [resolve(RunConfig(device=name)).device for name in ("auto", "mps")] == [
        "cpu",
        "mps",
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_watch_every_remedy_and_every_study_run_without_float64() -> None:
    # In a process of its own: the device is one for good.
    command = [sys.executable, "-m", "tests.devices.without_float64"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout.splitlines()
    assert [line.split()[0] for line in told].count("apply") == len(REMEDIES)
    assert {
        "watch own",
        "watch llama",
        "watch qwen3",
        "watch gpt2",
        "train none",
    } <= set(told)
    assert {f"study {name}" for name in STUDIES} <= set(told)
