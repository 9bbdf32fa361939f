"""A process that is killed at random instants and started again until it ends by itself."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from typing import Any

KILLS = 8


def kill_until_done(work: Callable[..., None], args: tuple[Any, ...], *, longest: float, seed: int) -> None:
    """Run `work` in processes of its own, the first eight killed within `longest` seconds, until one ends well."""
    # A server that has imported everything once: its children start, and are killed, in milliseconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qkeel.lab.execution.execute"])
    instants = random.Random(seed)
    kills, child = 0, None
    for _ in range(60):
        child = context.Process(target=work, args=args)
        child.start()
        child.join(instants.uniform(0.02, longest) if kills < KILLS else None)
        if child.exitcode is None:
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            kills += 1
        elif child.exitcode == 0:
            break
    assert child is not None
    assert child.exitcode == 0
    assert kills >= 3, "the study was over before it could be killed"
