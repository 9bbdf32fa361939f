"""A study killed at any instant goes on to the bit-identical table."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.forked import forkserver
from tests.lab.killing import kill_until_done, session, survivors
from tests.lab.recorded import table

from qkeel.lab import Execution, Grid, RunConfig, make_plan, run_plan

PATIENCE = 60  # seconds after which a worker counts as living on: these train for longer, and load does not decide
GRID = Grid(
    remedies=["none", "lalr:tau=0.3", "qk_clip:threshold=1"], lrs=[0.1], seeds=[0]
)


def study(config: RunConfig, out: str) -> None:
    run_plan(make_plan("lr", config, GRID), out, Execution())


def files(out: Path) -> dict[str, bytes]:
    """What must not depend on the kills; times and what says how often a run was resumed do."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.name
        in ("heads.f32", "heads.json", "config.json", "env.json", "study.json")
    }


def test_a_study_killed_at_random_instants_ends_with_the_bit_identical_table(
    tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = tiny(steps=24, checkpoint_every=3, log_every=2)
    study(config, str(tmp_path / "whole"))
    kill_until_done(study, (config, str(tmp_path / "cut")), longest=0.4, seed=7)
    assert table(tmp_path / "cut") == table(tmp_path / "whole")
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def long_study(config: RunConfig, out: str) -> None:
    os.setsid()
    run_plan(make_plan("lr", config, GRID), out, Execution(workers=2))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("kills", "longest"),
    [
        (2, 2.5),
        pytest.param(40, 6, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_workers_die_with_the_study_from_their_first_instant_on(
    kills: int, longest: float, tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """Half of the kills come in the first tenth of a second of a worker's life, before it has imported anything."""
    config, instants, struck = tiny(steps=100_000), random.Random(kills), 0
    for n in range(kills):
        study = forkserver().Process(
            target=long_study, args=(config, str(tmp_path / str(n))), daemon=False
        )
        study.start()
        assert study.pid is not None
        deadline = time.monotonic() + 300
        while (
            len(session(study.pid)) < 3 and time.monotonic() < deadline
        ):  # itself, a tracker of resources, a worker
            time.sleep(0.001)
        time.sleep(instants.uniform(0, 0.1) if n % 2 else instants.uniform(0, longest))
        struck += len(session(study.pid)) >= 3
        study.kill()
        study.join()
        assert not survivors(study.pid, PATIENCE), f"kill {n}"
    assert struck == kills


FLAGS = shlex.split(
    "study lr --remedies none lalr:tau=0.3 qk_clip:threshold=1 --lrs 0.1 0.01 --seeds 0 1 --data topics --context 16 "
    "--d-model 32 --n-heads 2 --steps 600 --checkpoint-every 7 --log-every 5 --device cpu"
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    sys.platform != "linux", reason="orphans are prevented on Linux only"
)
def test_the_command_killed_20_times_leaves_nobody_writing_and_the_same_table(
    tmp_path: Path,
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    command = [sys.executable, "-m", "qkeel", *FLAGS, "--jobs", "2"]
    subprocess.run(
        [*command, "--out", str(whole)], check=True, capture_output=True, timeout=600
    )
    instants = random.Random(11)
    kills = 0
    while kills < 20:
        process = subprocess.Popen(
            [*command, "--out", str(cut)],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        _wait_for_a_worker(process, cut)
        time.sleep(instants.uniform(0.0, 1.5))
        if process.poll() is not None:
            _forget_one_run(cut)
            continue
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        assert not survivors(process.pid, PATIENCE), "a worker outlived the study"
    subprocess.run(
        [*command, "--out", str(cut)], check=True, capture_output=True, timeout=600
    )
    assert table(cut) == table(whole)


def _wait_for_a_worker(process: subprocess.Popen[bytes], out: Path) -> None:
    begun = _written(out)
    deadline = time.monotonic() + 120
    while (
        process.poll() is None
        and _written(out) == begun
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)


def _written(out: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in out.glob("runs/*/metrics.jsonl")}


def _forget_one_run(out: Path) -> None:
    """When everything is done before it could be killed, let the last run end once more."""
    for name in ("DONE", "summary.json"):
        for path in sorted(out.glob(f"runs/*/{name}"))[:2]:
            path.unlink()
