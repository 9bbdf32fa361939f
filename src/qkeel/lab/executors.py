"""Who runs the runs of a study: worker processes of this machine, Slurm, Ray or Dask."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import functools
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeAlias, final

from qkeel.errors import InvalidTypeError, InvalidValueError, QkeelError, RefusedError, check, needed
from qkeel.lab.checkpoint import identity, refuse_mixture
from qkeel.lab.config import RunConfig
from qkeel.lab.lengths import measure
from qkeel.lab.plan import LongContexts
from qkeel.lab.stack_models import StackSize, plan_stacks
from qkeel.lab.train_runs import train_runs
from qkeel.options import Bound, Count, Json, NotNegative, Positive, build, lookup, parse, settle
from qkeel.records import RunDirectory, RunStatus

# The life of a worker process, which ends with that of the process that started it, whatever ends that.


@functools.cache
def lifeline() -> tuple[Connection, Connection]:
    """A pipe, the end to read from first, that nobody writes to: it is at its end when this process is.

    A worker inherits the first end when it is started, so that no instant is too early, and no system's signal on the
    death of a parent is needed. The other end stays open here as long as this process lives.
    """
    return Pipe(duplex=False)


def begin_worker(line: Connection) -> None:
    """Makes this process a worker: it ends when the line does, and leaves Ctrl-C to its parent.

    Called before anything large is imported: so this module imports nothing large either.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(line,), name="qkeel-lifeline", daemon=True).start()


def _end_with(line: Connection) -> None:
    line.poll(None)  # waits; a pipe at its end can be read
    os._exit(1)


# Runs many configurations over worker processes; a run that fails does not stop the rest.

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


def units_of(jobs: Sequence[Job], workers: int, stack: StackSize) -> list[list[Job]]:
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

    With one worker everything happens in this process and joblib is not needed. When a worker is killed, for lack of
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
                f"its worker process died ({type(error).__name__}), perhaps for lack of memory; run the same command "
                "again to continue, with fewer workers if memory is short"
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


# The interface of executors, and the literal table of them.

Unit: TypeAlias = Sequence[Job]

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
    found = lookup("executor", EXECUTORS, terms[0].name)
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
            "no space is left on a disk of the cluster or of --out: free some, then run the same command again to "
            "continue"
        )
        return [Outcome(job.directory, why) for job in unit]
    said = " ".join(str(error).split())[-300:]
    reason = f"its process on the cluster died ({type(error).__name__}: {said}); run the same command again to continue"
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
        raise unreached(what, f"nothing answers at {address} ({error})") from error


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


# Processes of this machine, through joblib.


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
    """Processes of this machine, through joblib; they die with the one that started them."""

    def capacity(self) -> int:
        """As many as this process has cores, at most 4, for each takes about 0.4 GB."""
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return min(cores, 4)

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Does the units; see `Executor`."""
        yield from work_here(units, workers)


# Jobs of a Slurm cluster, through submitit.

_EACH, _EACH_HERE = 5.0, 0.5  # seconds between two looks at the jobs of a cluster, and of this machine


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm:
    """One job array of a Slurm cluster; this process waits for it and cancels it when it is interrupted.

    partition, account, qos: as sbatch takes them, the cluster's own where empty. time: minutes of a job. memory: GB.
    cpus, gpus: of a job. cluster: "slurm", or "local" to do the jobs as processes of this machine.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: Count = 60
    memory: Positive = 4
    cpus: Count = 1
    gpus: Annotated[int, Bound(included=True)] = 0
    cluster: str = "slurm"

    def __post_init__(self) -> None:
        settle(self, "slurm")

    def capacity(self) -> int:
        """Sixteen: what the cluster has is not known here."""
        self._reached()
        return 16

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Does the units; see `Executor`."""
        place = self._executor(workers, folder)
        waiting, running = list(units), {}
        try:
            if self.cluster != "local":  # an array, in which Slurm keeps to `workers` at once
                running, waiting = dict(zip(place.map_array(work_elsewhere, units), units)), []
            while waiting or running:
                while waiting and len(running) < workers:
                    unit = waiting.pop(0)
                    running[place.submit(work_elsewhere, unit)] = unit
                ended = [job for job in running if job.done()]
                for job in ended:
                    unit, error = running.pop(job), job.exception()
                    yield seen_here(job.result() if error is None else died(unit, error))
                if not ended:
                    time.sleep(_EACH if self.cluster != "local" else _EACH_HERE)
        finally:
            for job in running:
                job.cancel()

    def _reached(self) -> None:
        if self.cluster == "slurm" and shutil.which("sbatch") is None:
            raise unreached("Slurm", "this machine has no sbatch; start the study where jobs are submitted")

    def _executor(self, workers: int, folder: Path) -> Any:
        with needed("the executor slurm", "submitit"):
            import submitit  # pyright: ignore[reportMissingImports]
        self._reached()
        made = submitit.AutoExecutor(folder=folder / "slurm", cluster=self.cluster)
        named = {"slurm_partition": self.partition, "slurm_account": self.account, "slurm_qos": self.qos}
        made.update_parameters(
            name="qkeel",
            timeout_min=self.time,
            mem_gb=self.memory,
            cpus_per_task=self.cpus,
            gpus_per_node=self.gpus,
            slurm_array_parallelism=workers,
            **{name: value for name, value in named.items() if value},
        )
        return made


# Tasks of a Ray cluster, or of one that is started on this machine.


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ray:
    """Tasks of a Ray cluster. A task whose machine is lost is begun once more, and continues from its checkpoint.

    address: of the cluster, "auto" for that of this machine; empty: RAY_ADDRESS, or Ray starts one here.
    cpus, gpus: what a task reserves.
    """

    address: str = ""
    cpus: Positive = 1
    gpus: NotNegative = 0

    def __post_init__(self) -> None:
        settle(self, "ray")

    def capacity(self) -> int:
        """As many as the cluster has CPUs (GPUs, where tasks reserve some) for."""
        has = self._connected().cluster_resources()
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        return max(1, min(int(has.get(name, 0) / amount) for name, amount in wanted.items() if amount))

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Does the units; see `Executor`."""
        ray = self._connected()
        task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=1)(work_elsewhere)
        waiting, running = list(units), {}
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    unit = waiting.pop(0)
                    running[task.remote(unit)] = unit
                for done in ray.wait(list(running))[0]:
                    unit = running.pop(done)
                    try:
                        outcomes = ray.get(done)
                    except Exception as error:  # `work` raises none, so it is Ray's
                        outcomes = died(unit, error)
                    yield seen_here(outcomes)
        finally:
            for left in running:
                ray.cancel(left, force=True)

    def _connected(self) -> Any:
        with needed("the executor ray", "ray"):
            import ray  # pyright: ignore[reportMissingImports]
        if not ray.is_initialized():
            address = self.address or os.environ.get("RAY_ADDRESS", "")
            check_reached("Ray's cluster", address)
            try:
                ray.init(address=address or None, log_to_driver=False, include_dashboard=False)
            except ConnectionError as error:
                raise unreached("Ray's cluster", f"{address}: {error}") from error
        return ray


# Workers of a Dask cluster, or of one that is started on this machine.


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dask:
    """Workers of a Dask cluster. Each process of theirs does one unit at a time, however many threads it has.

    address: of its scheduler, "tcp://host:8786"; empty: the client in use or DASK_SCHEDULER_ADDRESS, or Dask starts a
    cluster here.
    """

    address: str = ""

    def capacity(self) -> int:
        """As many as the cluster has worker processes."""
        return max(1, len(self._client.scheduler_info(n_workers=-1)["workers"]))

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Does the units; see `Executor`."""
        client = self._client
        from distributed import as_completed  # pyright: ignore[reportMissingImports]

        waiting, running = list(units), {}
        ended = as_completed()
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    unit = waiting.pop(0)
                    future = client.submit(work_elsewhere, unit, pure=False)
                    running[future] = unit
                    ended.add(future)
                done = next(ended)
                unit = running.pop(done)
                error = done.exception()
                yield seen_here(done.result() if error is None else died(unit, error))
        finally:
            client.cancel(list(running), force=True)

    @functools.cached_property
    def _client(self) -> Any:
        with needed("the executor dask", "distributed"):
            from distributed import Client, get_client  # pyright: ignore[reportMissingImports]
        if address := self.address or os.environ.get("DASK_SCHEDULER_ADDRESS", ""):
            check_reached("Dask's scheduler", address)
            try:
                return Client(address, timeout=REACH_WAIT)
            except (OSError, TimeoutError) as error:
                raise unreached("Dask's scheduler", f"{address}: {error}") from error
        try:
            return get_client()
        except ValueError:  # none in use
            return Client(threads_per_worker=1, dashboard_address=None)


# Name -> class; each imports its library when it is used.
EXECUTORS: dict[str, type[Executor]] = {"local": Local, "ray": Ray, "dask": Dask, "slurm": Slurm}
