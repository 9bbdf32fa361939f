"""Workers do not outlive the study that started them."""

import os
import random
import sys
import time

import pytest
from tests.forked import forkserver
from tests.lab.killing import session, survivors

from qkeel.lab import Execution, Grid, make_plan, run_plan

PATIENCE = 60  # seconds after which a worker counts as living on: these train for longer, and load does not decide
GRID = Grid(remedies=["lalr:tau=0.3", "qk_clip:threshold=1"], lrs=[0.1], seeds=[0])


def study(config, out):
    os.setsid()
    run_plan(make_plan("lr", config, GRID), out, Execution(workers=2))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.timeout(1800)
def test_workers_die_with_the_study_from_their_first_instant_on(tiny, tmp_path):
    """Half of the kills come in the first tenth of a second of a worker's life, before it has imported anything."""
    config, instants = tiny(steps=100_000), random.Random(40)
    for n in range(10):
        arguments = (config, str(tmp_path / str(n)))
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
