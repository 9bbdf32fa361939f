"""The kernels are not only right in the interpreter: they compile for a Hopper GPU and stay in its registers."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

AHEAD = Path(__file__).with_name("ahead.py")


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64",
    reason="Triton brings NVIDIA's assembler for this machine only",
)
def test_every_kernel_compiles_for_hopper_without_spilling(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(AHEAD)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = re.findall(
        r"(.*): registers (\d+), spilled (\d+), shared (\d+), 16-byte loads (\d+)",
        done.stdout,
    )
    assert len(told) == 14
    for name, registers, spilled, shared, loads in told:
        # The tile of masked keys is the one that a GPU has run.
        assert int(spilled) <= (128 if name == "all statistics of hidden keys" else 0)
        assert int(registers) <= 255
        assert int(shared) <= 227 * 1024  # what a processor of an H100 has
        assert int(loads) > 0, name
