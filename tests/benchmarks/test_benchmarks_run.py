"""Every benchmark runs at toy size, so that none rots. No test here looks at a time."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_benchmark_runs_at_toy_size(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--toy", "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(next(tmp_path.glob("*.json")).read_text())
    titles = " ".join(results["tables"])
    for part in ("forward + backward", "activation memory", "statistics", "optimizer step", "one token with a cache"):
        assert part in titles
    assert "qkeel rope + norm" in done.stdout


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here")
def test_the_benchmark_of_the_compiled_kernels_runs_at_toy_size() -> None:
    command = [sys.executable, "-m", "benchmarks.native", "--toy"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for part in ("norm + rope, forward", "forward + backward", "one token", "attention modules"):
        assert part in done.stdout


def test_the_benchmark_of_the_statistics_runs_at_toy_size() -> None:
    command = [sys.executable, "-m", "benchmarks.statistics", "--toy"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for part in ("bracket", "certified maximum", "exact LogitStats, torch", "the full matrix"):
        assert part in done.stdout
