"""On a device that has no float64, as Apple's, models are watched, changed, trained and evaluated all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from qkeel.remedies import REMEDIES


@pytest.mark.slow
def test_watch_every_remedy_and_the_lab_run_without_float64() -> None:
    # In a process of its own: the device is one for good.
    command = [sys.executable, "-m", "tests.devices.without_float64"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout.splitlines()
    assert [line.split()[0] for line in told].count("apply") == len(REMEDIES)
    assert {"watch own", "watch llama", "watch qwen3", "watch gpt2", "train none"} <= set(told)
