"""Runs many configurations over worker processes; a run that fails does not stop the rest."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import sys
import warnings
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, final

from qkeel.errors import InvalidTypeError, InvalidValueError, QkeelError, check
from qkeel.lab.config import RunConfig
from qkeel.lab.execution.lifeline import begin_worker, lifeline
from qkeel.lab.lengths.longer_texts import measure
from qkeel.lab.plan import LongContexts
from qkeel.lab.stack.what_runs_share import How, plan_stacks
from qkeel.lab.train_runs import train_runs
from qkeel.lab.training.environment import identity, refuse_mixture
from qkeel.options import Json
from qkeel.records import RunDirectory

# A run directory may still be held, for an instant, by a worker that is dying with a killed study.
LOCK_WAIT = 10.0


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One run to do, as plain values that any process can be given."""

    config: Json
    directory: str
    command: str
    contexts: LongContexts | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """A job that is over; `error` is empty if the run is done."""

    directory: str
    error: str = ""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The i-th of n parts of a study, counted from 1: every n-th run, for one machine or array task each."""

    index: int = 1  #: i, from 1 to n
    count: int = 1  #: n, at least 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise InvalidValueError(f"expected a shard i/n with 1 ≤ i ≤ n, got {self.index}/{self.count}")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads "i/n".

        >>> Shard.parse("2/3")
        Shard(index=2, count=3)
        """
        index, _, count = text.partition("/")
        if not (index.isdigit() and count.isdigit()):
            raise InvalidTypeError(f"expected a shard as i/n, like 1/4, got {text!r}")
        return cls(index=int(index), count=int(count))


def units_of(jobs: Sequence[Job], workers: int, stack: How) -> list[list[Job]]:
    """The jobs in units, those of one unit trained as one; the longest first, so that no worker ends long after the
    others. `stack` says which train as one, see `plan_stacks`; it changes no number.
    """
    check(workers >= 1, "at least 1 worker", workers)
    # What is done with the weights afterwards is done run by run.
    units = [[job] for job in jobs if job.contexts is not None]
    units += plan_stacks([(RunConfig.from_dict(j.config), j) for j in jobs if j.contexts is None], stack, workers)
    return sorted(units, key=lambda unit: -sum(RunConfig.from_dict(job.config).steps for job in unit))


def work_here(units: Sequence[Sequence[Job]], workers: int) -> Generator[list[Outcome], None, None]:
    """Does the units on this machine, yielding the outcomes of each as it ends. Closing the iterator stops the workers.

    With one worker everything happens in this process and joblib is not needed. When a worker is killed, for want of
    memory for instance, the jobs that are left are done one by one.
    """
    if workers == 1 or len(units) <= 1:
        for unit in units:
            yield work(unit)
        return
    left = {job.directory: job for unit in units for job in unit}
    try:
        for outcomes in _pool(units, workers):
            for outcome in outcomes:
                del left[outcome.directory]
            yield outcomes
    except _WorkerDied:
        # Whichever it was, each job that is left gets a worker of its own.
        for job in left.values():
            try:
                yield from _pool([[job]], 2)
            except _WorkerDied as error:
                yield [Outcome(job.directory, str(error))]


class _WorkerDied(Exception):
    """A worker process ended without a result."""


def _pool(units: Sequence[Sequence[Job]], workers: int) -> Generator[list[Outcome], None, None]:
    try:
        import joblib
    except ImportError as error:
        raise QkeelError(f"{workers} workers need joblib: pip install joblib, or use one worker") from error
    # One job at a time to each worker: what is not given out need not be taken back when the study is stopped.
    how: Json = {"return_as": "generator_unordered", "batch_size": 1, "pre_dispatch": "n_jobs", "backend": "loky"}
    how |= {"initializer": begin_worker, "initargs": lifeline()[:1]}
    pool = joblib.Parallel(n_jobs=max(2, min(workers, len(units))), **how)
    results: Any = pool(joblib.delayed(work_apart)(unit) for unit in units)
    with warnings.catch_warnings():
        # That unfinished runs are dropped is what ending early is for.
        warnings.filterwarnings("ignore", message=".*still being processed by the workers have been cancelled")
        try:
            yield from results
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except Exception as error:  # `work` raises none, so it is joblib's: a worker was killed
            raise _WorkerDied(
                f"its worker process died ({type(error).__name__}), perhaps for want of memory; run the same command "
                "again to go on, with fewer workers if memory is short"
            ) from error
        finally:
            results.close()


def work(unit: Sequence[Job]) -> list[Outcome]:
    """Does one job, or several that train as one; an error becomes its outcome."""
    directories = [Path(job.directory) for job in unit]
    try:
        configs = [RunConfig.from_dict(job.config) for job in unit]
        # Another machine may compute otherwise than those that did the study's other runs.
        refuse_mixture(directories[0].parent, identity(configs[0]))
        errors = train_runs(configs, directories, command=unit[0].command, wait=LOCK_WAIT)
        for i, job in enumerate(unit):
            if job.contexts is not None and errors[i] is None:
                measure(configs[i], RunDirectory(directories[i]), job.contexts, wait=LOCK_WAIT)
    except Exception as error:  # if not qkeel's, a bug or the machine
        errors = [error] * len(unit)
    return [Outcome(job.directory, _text(error)) for job, error in zip(unit, errors)]


def _text(error: Exception | None) -> str:
    known = error is None or isinstance(error, QkeelError)
    return str(error or "") if known else f"{type(error).__name__}: {error}"


def work_apart(unit: Sequence[Job]) -> list[Outcome]:
    """`work` in a worker process."""
    _keep_memory()
    return work(unit)


def _keep_memory() -> None:
    """Lets this process keep what it frees: else glibc fetches a stack's tensors again and again, page by page."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
        for what, size in ((-3, 1 << 30), (-1, 1 << 30), (-2, 1 << 26)):
            libc.mallopt(what, size)
