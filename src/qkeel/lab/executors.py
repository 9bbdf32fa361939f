"""Where the runs of a study are computed: joblib's loky, Ray and Dask, and Slurm through submitit.

A run is a function call, its results are files in a folder that all machines share, and its claim keeps two processes
from doing the same run. What a worker that was killed leaves is continued by the same command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, final

from qkeel.errors import InvalidValueError, QkeelError, RunInUseError, check, needed
from qkeel.lab.checkpoint import identity, refuse_mixture
from qkeel.lab.config import RunConfig
from qkeel.lab.lengths import measure
from qkeel.lab.plan import LongContexts
from qkeel.lab.train import run
from qkeel.options import Json, Term, lookup, parse
from qkeel.records import RunDirectory

# Seconds; a worker of a study that was killed may hold the lock of a run for a moment.
LOCK_WAIT = 10.0
# Processes on this machine unless --jobs says otherwise; each uses about 0.4 GB.
_MOST_HERE = 4
# Joblib's word for every core of a cluster.
_ALL = -1

# A worker of Dask may have several threads, but random numbers and torch's threads belong to the whole process.
_ONE_AT_A_TIME = threading.Lock()
# Name -> default number of runs at once. The address of a cluster is the setting of its library: RAY_ADDRESS,
# DASK_SCHEDULER_ADDRESS.
EXECUTORS = {"loky": _MOST_HERE, "ray": _ALL, "dask": _ALL, "slurm": 16}
# Of submitit's AutoExecutor; options of --executor slurm:... override them.
SLURM = {"name": "qkeel", "timeout_min": 60, "mem_gb": 4, "cpus_per_task": 1}


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One run as plain values that can be sent to any process."""

    config: Json
    directory: str
    command: str
    contexts: LongContexts | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job; `error` is empty if it succeeded. `busy` says that another process trains the run.

    If a worker dies, some of the jobs that are said to have failed may be done.
    """

    directory: str
    error: str = ""
    busy: bool = False


def parse_executor(text: str) -> Term:
    """Parses "loky", "ray", "dask", or "slurm" with options of submitit as in "slurm:slurm_partition=gpu".

    >>> parse_executor("slurm:timeout_min=30").options
    {'timeout_min': 30}

    Raises:
        UnknownNameError: there is no such executor.
        InvalidValueError: more than one is named, or an executor other than slurm has options.
    """
    term, *more_terms = parse(text)
    lookup("executor", EXECUTORS, term.name)
    if more_terms or (term.options and term.name != "slurm"):
        raise InvalidValueError(
            f"expected one executor of {', '.join(EXECUTORS)}, options for slurm alone; got {text!r}"
        )
    return term


def default_jobs(executor: str) -> int:
    """Returns how many runs an executor computes at once unless told otherwise; -1 is all that a cluster can."""
    name = parse_executor(executor).name
    if name != "loky":
        return EXECUTORS[name]
    cores = (
        len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    )
    return min(cores, _MOST_HERE)


def outcomes(
    jobs: Sequence[Job], workers: int, executor: str, folder: Path
) -> Generator[Outcome, None, None]:
    """Computes the jobs and yields each outcome as it arrives; closing the generator stops the rest.

    Args:
        jobs: the runs, in the order in which they begin.
        workers: how many are computed at once; with "loky" and one, in this process.
        executor: see `parse_executor`.
        folder: the study's directory, where submitit keeps its files.
    """
    check(workers >= 1 or workers == _ALL, "at least 1 worker", workers)
    term = parse_executor(executor)
    if term.name == "slurm":
        yield from _on_slurm(jobs, workers, term.options, folder)
    elif term.name == "loky" and (workers == 1 or len(jobs) == 1):
        for job in jobs:
            yield work(job)
    else:
        yield from _by_joblib(jobs, workers, term.name)


def work(job: Job) -> Outcome:
    """Trains one run and tests it at other lengths if asked; errors are returned as outcomes."""
    directory = Path(job.directory)
    try:
        config = RunConfig.from_dict(job.config)
        # This machine may compute differently from the machines that computed the study's other runs.
        refuse_mixture(directory.parent, identity(config))
        with _ONE_AT_A_TIME:
            run(config, directory, command=job.command, wait=LOCK_WAIT)
            if job.contexts is not None:
                measure(config, RunDirectory(directory), job.contexts, wait=LOCK_WAIT)
    except RunInUseError:
        return Outcome(job.directory, busy=True)
    except QkeelError as error:
        return Outcome(job.directory, str(error))
    except Exception as error:  # a bug or a failure of the machine
        return Outcome(job.directory, f"{type(error).__name__}: {error}")
    return Outcome(job.directory)


def _by_joblib(jobs: Sequence[Job], workers: int, backend: str) -> Iterator[Outcome]:
    with needed(f"{workers} workers", "joblib"):
        import joblib
    # If a worker dies, joblib does not say in which job; all that are not known to have ended are reported.
    unfinished = {job.directory: None for job in jobs}
    # Ray's backend has no generator, so its outcomes come together at the end.
    settings: Json = {
        "return_as": "list" if backend == "ray" else "generator_unordered"
    }
    # One job at a time for each worker, so that stopping a study leaves none dispatched.
    settings |= {"batch_size": 1, "pre_dispatch": "n_jobs"}
    with (
        _registered(backend) as backend_settings,
        joblib.parallel_config(backend, n_jobs=workers, **backend_settings),
    ):
        pool = joblib.Parallel(**settings)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore",
                message=".*still being processed by the workers have been cancelled",
            )
            outcomes: Any = iter(())
            try:
                outcomes = iter(pool(joblib.delayed(work)(job) for job in jobs))
                for outcome in outcomes:
                    del unfinished[outcome.directory]
                    yield outcome
            except (
                Exception
            ) as error:  # `work` raises none, so a worker died; loky then ends its pool
                for directory in unfinished:
                    yield Outcome(directory, _died(error))
            finally:
                # Stops the jobs that have not ended.
                if isinstance(outcomes, Generator):
                    outcomes.close()


@contextlib.contextmanager
def _registered(backend: str) -> Iterator[dict[str, Any]]:
    """Makes a backend known to joblib, and yields its settings."""
    if backend == "ray":
        with needed("the executor ray", "ray"):
            from ray.util.joblib import register_ray  # pyright: ignore[reportMissingImports]
        register_ray()
        yield {}
    elif backend == "dask":
        with needed("the executor dask", "distributed"):
            from distributed import Client  # pyright: ignore
        with Client():
            yield {}
    else:
        yield {"initializer": _begin_worker, "initargs": (os.getpid(),)}


def _begin_worker(parent: int) -> None:
    """Leaves Ctrl-C to the parent process, and ends this one soon after the parent, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow() -> None:
        # A process whose parent ends is handed to another one, and only then does this number change.
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=follow, name="qkeel-parent", daemon=True).start()


def _on_slurm(
    jobs: Sequence[Job], workers: int, options: Json, folder: Path
) -> Iterator[Outcome]:
    """Submits one job array, of which `workers` jobs run at once; cluster=local runs them as processes here."""
    with needed("the executor slurm", "submitit"):
        import submitit  # pyright: ignore[reportMissingImports]
        from submitit.helpers import as_completed  # pyright: ignore[reportMissingImports]
    cluster = options.get("cluster", "slurm")
    executor = submitit.AutoExecutor(folder / "slurm", cluster=cluster)
    parameters = {**SLURM, "slurm_array_parallelism": workers, **options}
    executor.update_parameters(
        **{name: value for name, value in parameters.items() if name != "cluster"}
    )
    submitted = dict(zip(executor.map_array(work, jobs), jobs))
    unfinished = set(submitted)
    try:
        for job in as_completed(
            list(submitted), poll_frequency=0.5 if cluster == "local" else 5
        ):
            unfinished.discard(job)
            error = job.exception()
            yield (
                job.result()
                if error is None
                else Outcome(submitted[job].directory, _died(error))
            )
    finally:
        for job in unfinished:
            job.cancel()


def _died(error: BaseException) -> str:
    reason = " ".join(str(error).split())[-300:]
    return (
        f"its worker ended ({type(error).__name__}: {reason}), perhaps for lack of memory; run the same command again "
        "to continue"
    )
