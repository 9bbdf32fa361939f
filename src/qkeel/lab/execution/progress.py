"""The progress of a study, read from its files, and how long it will take, from a few timed steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from qkeel.lab.config import RunConfig
from qkeel.lab.model.build_model import resolve, threads
from qkeel.lab.plan import PlannedRun
from qkeel.lab.stack.choose_arithmetic import choose_arithmetic
from qkeel.lab.training.run_state import RunState
from qkeel.lab.training.step import train_step
from qkeel.records.checksums import check_seal
from qkeel.records.regular_files import refuse_irregular
from qkeel.records.strict_json import json_value

_WARM, _TIMED = 3, 10  # steps


def last_step(directory: Path) -> int:
    """The last recorded step of a run; 0 before there is one. Reads only the end of the file."""
    try:
        path = directory / "metrics.jsonl"
        refuse_irregular(path)
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4096))
            line = file.read().split(b"\n")[-2] + b"\n"
        check_seal(line)
        return int(json_value(line)["step"])
    except (OSError, IndexError, ValueError, KeyError, TypeError):
        return 0


def estimate_seconds(runs: Sequence[PlannedRun], workers: int) -> float:
    """Seconds the runs will take with `workers` at once, from timing a few steps of the first one here; 0 where these
    steps fail, since the run itself says why."""
    if not runs or workers < 1:
        return 0.0
    steps = sum(run.config.steps for run in runs)
    try:
        return steps * _seconds_per_step(runs[0].config) / min(workers, len(runs))
    except Exception:
        return 0.0


def _seconds_per_step(config: RunConfig) -> float:
    config = resolve(config)
    with threads(config.threads):
        arithmetic = choose_arithmetic([RunState(config)])
        for step in range(_WARM):
            train_step(arithmetic, [step])
        arithmetic.probe()  # ends with a read, so the device is idle now
        start = time.perf_counter()
        for step in range(_TIMED):
            train_step(arithmetic, [step])
        arithmetic.probe()  # once per ten steps, as a run with the default cadence does
        return (time.perf_counter() - start) / _TIMED
