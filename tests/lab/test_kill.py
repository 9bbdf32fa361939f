"""A study killed at any instant goes on to the bit-identical table."""

import os
import random
import sys
import time

import pytest
from tests.forked import forkserver
from tests.lab.killing import kill_until_done, session, survivors
from tests.lab.recorded import table

from qkeel.lab import Execution, Grid, make_plan, run_plan

PATIENCE = 60  # seconds after which a worker counts as living on: these train for longer, and load does not decide
GRID = Grid(remedies=["lalr:tau=0.3", "qk_clip:threshold=1"], lrs=[0.1], seeds=[0])


def study(config, out, workers=1):
    if workers > 1:
        os.setsid()
    run_plan(make_plan("lr", config, GRID), out, Execution(workers=workers))


def files(out):
    """What must not depend on the kills; times and what says how often a run was resumed do."""
    names = ("heads.f32", "heads.json", "config.json", "env.json", "study.json")
    paths = [path for path in out.rglob("*") if path.name in names]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_study_killed_at_random_instants_ends_with_the_bit_identical_table(
    kills, tiny, tmp_path
):
    config = tiny(steps=18, checkpoint_every=3)
    study(config, str(tmp_path / "whole"))
    cut = str(tmp_path / "cut")
    kill_until_done(study, (config, cut), longest=0.4, seed=7, kills=kills)
    assert table(tmp_path / "cut") == table(tmp_path / "whole")
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.timeout(1800)
def test_workers_die_with_the_study_from_their_first_instant_on(tiny, tmp_path):
    """Half of the kills come in the first tenth of a second of a worker's life, before it has imported anything."""
    config, instants = tiny(steps=100_000), random.Random(40)
    for n in range(10):
        arguments = (config, str(tmp_path / str(n)), 2)
        process = forkserver().Process(target=study, args=arguments, daemon=False)
        process.start()
        deadline = time.monotonic() + 300
        # Itself, a tracker of resources, a worker.
        while len(session(process.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(instants.uniform(0, 0.1 if n % 2 else 6))
        assert len(session(process.pid)) >= 3
        process.kill()
        process.join()
        assert not survivors(process.pid, PATIENCE), f"kill {n}"
