"""Every benchmark runs at toy size, so that none rots. No test here looks at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
