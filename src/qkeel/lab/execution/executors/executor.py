"""The interface of executors, and the literal table of them."""

from __future__ import annotations

import errno
import importlib
import os
import re
import socket
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from qkeel.errors import InvalidValueError, RefusedError
from qkeel.lab.execution.workers import Job, Outcome, work
from qkeel.options import build
from qkeel.records import RunDirectory, RunStatus
from qkeel.registry import lookup, parse

Unit: TypeAlias = Sequence[Job]

# Name -> module of lab.execution.executors and class. A module is imported when it is asked for.
EXECUTORS: dict[str, tuple[str, str]] = {
    "local": ("local", "Local"),
    "ray": ("ray", "Ray"),
    "dask": ("dask", "Dask"),
    "slurm": ("slurm", "Slurm"),
}
NETWORK_WAIT = 10.0  # seconds that a file written on another machine may take to be seen on this one
REACH_WAIT = 10.0  # seconds that a scheduler may take to answer
_FULL = os.strerror(errno.ENOSPC)
_ONE_AT_A_TIME = threading.Lock()


class Executor(Protocol):
    """A place where runs are done; a dataclass of its options."""

    def capacity(self) -> int:
        """The number of runs, or stacks of runs, that go at once unless the user says."""
        ...

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Does the units, at most `workers` at once, and yields the outcomes of each as it ends; closing it stops all.

        folder: where an executor may leave files of its own, in a file system that all machines see.
        """
        ...


def executor(text: str) -> Executor:
    """The executor of a spec string, "local", "ray:address=auto", "slurm:partition=gpu,time=60".

    >>> executor("slurm:partition=gpu")
    Slurm(partition='gpu', ...)

    Raises: UnknownNameError, InvalidTypeError or InvalidValueError that names the nearest name or option.
    """
    terms = parse(text)
    if len(terms) != 1:
        raise InvalidValueError(f"expected one executor, got {text!r}; runs of one study are done in one place")
    module, name = lookup("executor", EXECUTORS, terms[0].name)
    found = vars(importlib.import_module(f"qkeel.lab.execution.executors.{module}"))[name]
    return build(f"the executor {terms[0].name}", found, terms[0].options)


def work_elsewhere(unit: Unit) -> list[Outcome]:
    """`work` in a process that others may share, as Dask's do: one unit at a time, since torch's threads are one
    setting of the whole process."""
    with _ONE_AT_A_TIME:
        return work(unit)


def died(unit: Unit, error: BaseException) -> list[Outcome]:
    """The outcomes of a unit whose process ended without a result."""
    if _FULL in str(error):
        why = (
            "no space is left on a disk of the cluster or of --out: free some, then run the same command again to go on"
        )
        return [Outcome(job.directory, why) for job in unit]
    said = " ".join(str(error).split())[-300:]
    reason = f"its process on the cluster died ({type(error).__name__}: {said}); run the same command again to go on"
    return [Outcome(job.directory, reason) for job in unit]


def check_reached(what: str, address: str) -> None:
    """Raises RefusedError where nobody listens at "tcp://host:port" or "host:port" within REACH_WAIT; an address of
    another form ("auto", a file, a name) is left to the library."""
    found = re.fullmatch(r"(?:\w+://)?(\[[^\]]+\]|[^:/]+):(\d+)/?", address)
    if found is None:
        return
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=REACH_WAIT).close()
    except (OSError, OverflowError) as error:
        raise unreached(what, f"nobody answers at {address} ({error})") from error


def unreached(what: str, why: str) -> RefusedError:
    """The error for a cluster that cannot be reached."""
    said = " ".join(why.split())[:300]
    return RefusedError(f"{what} cannot be reached: {said}. Check its address, or leave --executor out to run here")


def seen_here(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes, those of runs as errors that are done elsewhere and not here: the machines share no folder."""
    deadline = time.monotonic() + NETWORK_WAIT
    return [outcome if outcome.error or _done(outcome, deadline) else _lost(outcome) for outcome in outcomes]


def _done(outcome: Outcome, deadline: float) -> bool:
    run = RunDirectory(Path(outcome.directory))
    while run.status is not RunStatus.DONE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _lost(outcome: Outcome) -> Outcome:
    return Outcome(
        outcome.directory,
        "done on the cluster, but its files are not here: --out must be a folder that this machine and the cluster "
        "share. Choose one, or run shards on each machine and use qkeel merge",
    )
