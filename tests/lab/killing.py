"""Processes that are killed at random instants, and what is left of them."""

import os
import random
import signal
import time
from pathlib import Path

from tests.forked import forkserver

from qkeel.lab import RunConfig, Watcher, run
from qkeel.lab.executors import work


def session(leader):
    """Living processes of a session, from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def survivors(leader, seconds):
    """The processes of a session that are still there after some seconds."""
    deadline = time.monotonic() + seconds
    while session(leader) and time.monotonic() < deadline:
        time.sleep(0.02)
    return session(leader)


def kill_until_done(
    work,
    args,
    *,
    longest,
    seed,
    kills,
):
    """Runs `work` in processes of its own, the first of them killed within `longest` seconds, until one ends well."""
    context, instants = forkserver(), random.Random(seed)
    for attempt in range(kills + 1):
        child = context.Process(target=work, args=args)
        child.start()
        child.join(instants.uniform(0.02, longest) if attempt < kills else None)
        if child.exitcode is None:
            child.kill()
            child.join()
    assert child.exitcode == 0


def die_in_the_first_run(job):
    """Computes a run, but its process dies in one of them, the first time, after its checkpoint."""
    mark = Path(job.directory).parent.parent / "lock.died"
    if job.config["seed"] == 1 and job.config["remedy"] == "none" and not mark.exists():
        mark.touch()

        def kill(record):
            if record["step"] == 8:
                os.kill(os.getpid(), signal.SIGKILL)

        run(
            RunConfig.from_dict(job.config),
            job.directory,
            watcher=Watcher(on_record=kill),
        )
    return work(job)
