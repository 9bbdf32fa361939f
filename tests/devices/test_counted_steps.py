"""What watching adds to a training step on a device is counted: launches, and places where the host waits."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Launches a layer, and those of the whole model, of a Llama on the stand-in; docs/gpu.md has them and the goals.
MOST = {
    "between measured steps": (1, 4),  # the largest logsumexp; all layers'; their way to the host
    "measured, all statistics": (243, 74),
    "measured, largest logit and entropy": (
        18,
        74,
    ),  # 3 of them of logits, 2 of hidden states, 13 of weights, gradients
}


@pytest.mark.slow
def test_watching_waits_for_the_device_at_the_end_of_a_step_alone_and_launches_no_more_than_is_written() -> None:
    # In a process of its own: the device is one for good.
    command = [sys.executable, "-m", "tests.devices.counted_steps"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, (each, whole) in MOST.items():
        few, many = found["2"][name], found["4"][name]
        assert 0 < many["launches"] - few["launches"] <= 2 * each, name
        assert few["launches"] <= 2 * each + whole, name
        for counts in (few, many):
            ((place, times),) = counts["waits"].items()
            assert times == 1, name
            # The copy of all numbers at once, which on CUDA goes into pinned memory and is not waited for.
            assert place.startswith(
                ("_to_copy qkeel/monitor/processes/transfer", "_to_copy qkeel/monitor/measured_steps")
            )
