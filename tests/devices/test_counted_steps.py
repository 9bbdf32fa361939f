"""What watching adds to a training step on a device is counted: launches, and places where the host waits."""

import json
import subprocess
import sys

import pytest

# Launches a layer, and those of the whole model, of a Llama on the stand-in; docs/internals/gpu.md has the goals.
MOST = {
    "measured, all statistics": (8, 77),
    "measured, all statistics by blocks": (138, 21),
}


@pytest.mark.slow
def test_watching_waits_for_the_device_at_the_end_of_a_step_alone_and_launches_no_more_than_is_written():
    # In a process of its own: the device is one for good.
    command = [sys.executable, "-m", "tests.devices.counted_steps"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, (each, whole) in MOST.items():
        for layers in (2, 4, 12):
            counts = found[str(layers)][name]
            assert 0 < counts["launches"] <= each * layers + whole, (name, layers)
            assert sum(counts["waits"].values()) - counts["waits_elsewhere"] == 1, name
            ((place, times),) = [
                item
                for item in counts["waits"].items()
                if "capture/intercept" not in item[0]
            ]
            assert times == 1, name
            # The copy of all numbers at once, which on CUDA goes into pinned memory and is not waited for.
            assert place.startswith("_to_copy qkeel/monitor/step_vector")
