"""Executors for a study's runs: worker processes on this machine, Slurm, Ray or Dask."""

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
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final

from qkeel.errors import InvalidTypeError, InvalidValueError, QkeelError, RefusedError, check, needed
from qkeel.lab.checkpoint import identity, refuse_mixture
from qkeel.lab.config import RunConfig
from qkeel.lab.lengths import measure
from qkeel.lab.plan import LongContexts
from qkeel.lab.stack_models import StackSize, plan_stacks
from qkeel.lab.train_runs import train_runs
from qkeel.options import Count, Json, Natural, NotNegative, Positive, build, lookup, parse, settle
from qkeel.records import RunDirectory, RunStatus

# Worker processes, which end together with the process that started them, no matter how that process ends.


@functools.cache
def lifeline() -> tuple[Connection, Connection]:
    """Returns a pipe to which nobody writes; its first end, for reading, reaches end-of-file when this process ends.

    A worker inherits the reading end when it starts, so at any moment it ends with its parent, without needing a
    signal. The writing end stays open as long as this process lives.
    """
    return Pipe(duplex=False)


def begin_worker(line: Connection) -> None:
    """Makes this process a worker, which ends when the pipe is closed and leaves Ctrl-C to its parent.

    This function is called before any large import, so this module must not import anything large either.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(line,), name="qkeel-lifeline", daemon=True).start()


def _end_with(line: Connection) -> None:
    line.poll(None)  # blocks until end-of-file, which counts as readable
    os._exit(1)


# Running many configurations in worker processes; a failed run does not stop the others.

# A dying worker of a killed study may still hold the lock of a run directory for a moment.
LOCK_WAIT = 10.0  # seconds


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
    """A finished job; `error` is empty if it succeeded."""

    directory: str
    error: str = ""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part i of n of a study (counted from 1), which consists of every n-th run, for one machine or array task."""

    index: int = 1  #: i, from 1 to n
    count: int = 1  #: n, at least 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise InvalidValueError(f"expected a shard i/n with 1 ≤ i ≤ n, got {self.index}/{self.count}")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parses "i/n".

        >>> Shard.parse("2/3")
        Shard(index=2, count=3)
        """
        index, _, count = text.partition("/")
        if not (index.isdigit() and count.isdigit()):
            raise InvalidTypeError(f"expected a shard as i/n, like 1/4, got {text!r}")
        return cls(index=int(index), count=int(count))


def units_of(jobs: Sequence[Job], workers: int, stack: StackSize) -> list[list[Job]]:
    """Groups jobs into units that train as one, longest first, so that all workers finish at about the same time.

    `stack` selects which jobs train as one (see `plan_stacks`) and does not change any result.
    """
    check(workers >= 1, "at least 1 worker", workers)
    # Jobs that test their weights at other lengths afterwards run alone.
    units = [[job] for job in jobs if job.contexts is not None]
    units += plan_stacks([(RunConfig.from_dict(j.config), j) for j in jobs if j.contexts is None], stack, workers)
    return sorted(units, key=lambda unit: -sum(RunConfig.from_dict(job.config).steps for job in unit))


def work_here(units: Sequence[Sequence[Job]], workers: int) -> Generator[list[Outcome], None, None]:
    """Executes the units on this machine and yields the outcomes of each; closing the generator stops the workers.

    With one worker, everything runs in this process without joblib. If a worker is killed, e.g. for lack of memory, the
    remaining jobs are executed one by one.
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
        # joblib does not report which job died, so each remaining job gets its own worker.
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
    # Each worker gets one job at a time, so that stopping a study leaves few dispatched jobs to cancel.
    how: Json = {"return_as": "generator_unordered", "batch_size": 1, "pre_dispatch": "n_jobs", "backend": "loky"}
    how |= {"initializer": begin_worker, "initargs": lifeline()[:1]}
    pool = joblib.Parallel(n_jobs=max(2, min(workers, len(units))), **how)
    results: Any = pool(joblib.delayed(work_apart)(unit) for unit in units)
    with warnings.catch_warnings():
        # Dropping unfinished runs is intended when a study is stopped.
        warnings.filterwarnings("ignore", message=".*still being processed by the workers have been cancelled")
        try:
            yield from results
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except Exception as error:  # `work` raises no errors, so this error is from joblib because a worker was killed
            raise _WorkerDied(
                f"its worker process died ({type(error).__name__}), perhaps for lack of memory; run the same command "
                "again to continue, with fewer workers if memory is short"
            ) from error
        finally:
            results.close()


def work(unit: Sequence[Job]) -> list[Outcome]:
    """Executes one job, or several that train as one; errors are returned as outcomes."""
    directories = [Path(job.directory) for job in unit]
    try:
        configs = [RunConfig.from_dict(job.config) for job in unit]
        # This machine may compute differently from the machines that executed the study's other runs.
        refuse_mixture(directories[0].parent, identity(configs[0]))
        errors = train_runs(configs, directories, command=unit[0].command, wait=LOCK_WAIT)
        for i, job in enumerate(unit):
            if job.contexts is not None and errors[i] is None:
                measure(configs[i], RunDirectory(directories[i]), job.contexts, wait=LOCK_WAIT)
    except Exception as error:  # a bug or a machine failure, if it is not a QkeelError
        errors = [error] * len(unit)
    texts = [str(e or "") if e is None or isinstance(e, QkeelError) else f"{type(e).__name__}: {e}" for e in errors]
    return [Outcome(job.directory, text) for job, text in zip(unit, texts)]


def work_apart(unit: Sequence[Job]) -> list[Outcome]:
    """Runs `work` in a worker process."""
    if sys.platform == "linux":
        # Keep freed memory; otherwise glibc returns the tensors of a stack to the system and faults them in again.
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD
            for what, size in ((-3, 1 << 30), (-1, 1 << 30), (-2, 1 << 26)):
                libc.mallopt(what, size)
    return work(unit)


# The interface of executors.

Unit: TypeAlias = Sequence[Job]

NETWORK_WAIT = 10.0  # seconds until a file written on another machine must be visible here
REACH_WAIT = 10.0  # seconds until a scheduler must answer
_FULL = os.strerror(errno.ENOSPC)
_ONE_AT_A_TIME = threading.Lock()


class Executor(Protocol):
    """A place to execute runs; implementations are dataclasses of their options."""

    def capacity(self) -> int:
        """Returns the default number of runs, or stacks of runs, to execute at once."""
        ...

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Executes the units, at most `workers` at once, and yields the outcomes of each.

        Closing the generator stops all units. `folder` is for the executor's own files and must be in a file system
        that all machines share.
        """
        ...


def executor(text: str) -> Executor:
    """Returns the executor for a spec string such as "local", "ray:address=auto" or "slurm:partition=gpu,time=60".

    >>> executor("slurm:partition=gpu")
    Slurm(partition='gpu', ...)

    Raises:
        UnknownNameError: the executor or an option is unknown; the message suggests the nearest name.
        InvalidTypeError: an option has the wrong type.
        InvalidValueError: an option is out of range, or more than one executor is given.
    """
    terms = parse(text)
    if len(terms) != 1:
        raise InvalidValueError(f"expected one executor, got {text!r}; a study runs in one place")
    found = lookup("executor", EXECUTORS, terms[0].name)
    return build(f"the executor {terms[0].name}", found, terms[0].options)


def work_elsewhere(unit: Unit) -> list[Outcome]:
    """Runs `work` in a process that may be shared by several units, like Dask's worker processes.

    Only one unit runs at a time, because the number of torch's threads is a setting of the entire process.
    """
    with _ONE_AT_A_TIME:
        return work(unit)


def died(unit: Unit, error: BaseException) -> list[Outcome]:
    """Returns the outcomes of a unit whose process ended without a result."""
    if _FULL in str(error):
        why = (
            "a disk of the cluster, or the disk that holds --out, is full: free some space, then run the same command "
            "again to continue"
        )
        return [Outcome(job.directory, why) for job in unit]
    said = " ".join(str(error).split())[-300:]
    reason = f"its process on the cluster died ({type(error).__name__}: {said}); run the same command again to continue"
    return [Outcome(job.directory, reason) for job in unit]


def check_reached(what: str, address: str, speaks: Callable[[bytes], bool] = bool) -> None:
    """Raises RefusedError if nothing answers at "tcp://host:port" or "host:port" within REACH_WAIT.

    Addresses in any other form ("auto", a file, a name) are left to the library. If the connection is not encrypted,
    the servers of Ray and Dask send the first bytes, and `speaks` returns whether the bytes received may come from such
    a server. Their libraries would wait minutes for a server that accepts a connection and then sends nothing, or
    something unexpected.
    """
    found = re.fullmatch(r"(?:(\w+)://)?(\[[^\]]+\]|[^:/]+):(\d+)/?", address)
    if found is None:
        return
    try:
        with socket.create_connection((found[2].strip("[]"), int(found[3])), timeout=REACH_WAIT) as server:
            if found[1] in (None, "tcp", "ray") and os.environ.get("RAY_USE_TLS", "0") == "0":
                server.settimeout(REACH_WAIT)
                if not speaks(server.recv(9)):
                    raise OSError("something else listens there")
    except (OSError, OverflowError) as error:
        raise unreached(what, f"nothing answers at {address} ({error})") from error


def begins_grpc(said: bytes) -> bool:
    """True if these bytes are the header of an HTTP/2 SETTINGS frame, the first frame of gRPC servers like Ray's."""
    return said[3:5] == b"\x04\x00"


def unreached(what: str, why: str) -> RefusedError:
    """Returns the error for a cluster that cannot be reached."""
    reason = " ".join(why.split())[:300]
    return RefusedError(f"{what} cannot be reached: {reason}. Check its address, or omit --executor to run here")


def seen_here(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Turns outcomes whose files are not visible here into errors, because the machines share no folder."""
    deadline = time.monotonic() + NETWORK_WAIT
    lost = (
        "finished on the cluster, but its files are not here, because --out is not a folder that this machine and the "
        "cluster share. Choose such a folder, or run shards on each machine and use qkeel merge"
    )
    found = []
    for outcome in outcomes:
        run = RunDirectory(Path(outcome.directory))
        while not outcome.error and run.status is not RunStatus.DONE:
            if time.monotonic() > deadline:
                outcome = Outcome(outcome.directory, lost)
            else:
                time.sleep(0.2)
        found.append(outcome)
    return found


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Local:
    """Worker processes on this machine, run by joblib; they end together with the process that started them."""

    def capacity(self) -> int:
        """Returns the number of cores available to this process, at most 4, because each worker uses about 0.4 GB."""
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return min(cores, 4)

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Executes the units; see `Executor`."""
        yield from work_here(units, workers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tasks:
    """The functions with which a cluster's library submits units, waits for them, returns results and cancels them."""

    submit: Callable[[Unit], Any]
    ended: Callable[[list[Any]], Iterable[Any]]  #: waits, and returns the tasks that have ended; may be empty
    result: Callable[[Any], list[Outcome] | BaseException]  #: may also raise the error
    cancel: Callable[[list[Any]], object]


def _drive(tasks: _Tasks, units: Sequence[Unit], most: int) -> Generator[list[Outcome], None, None]:
    """Submits units, at most `most` at once, and yields their outcomes; closing the generator cancels the rest."""
    waiting, running = list(units), {}
    try:
        while waiting or running:
            while waiting and len(running) < most:
                unit = waiting.pop(0)
                running[tasks.submit(unit)] = unit
            for task in tasks.ended(list(running)):
                unit = running.pop(task)
                try:
                    found = tasks.result(task)
                except Exception as error:  # `work` raises no errors, so this error is from the library
                    found = error
                yield seen_here(died(unit, found) if isinstance(found, BaseException) else found)
    finally:
        tasks.cancel(list(running))


_EACH, _EACH_HERE = 5.0, 0.5  # seconds between polls of jobs on a cluster, and on this machine


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm:
    """One job array on a Slurm cluster, submitted with submitit; this process waits for it and cancels it when
    interrupted.

    partition, account, qos: as for sbatch; if empty, the cluster's default is used. time: minutes per job. memory: GB
    per job. cpus, gpus: the number of each per job. cluster: "slurm", or "local" to run the jobs as processes on this
    machine.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: Count = 60
    memory: Positive = 4
    cpus: Count = 1
    gpus: Natural = 0
    cluster: str = "slurm"

    def __post_init__(self) -> None:
        settle(self, "slurm")

    def capacity(self) -> int:
        """Returns 16, because the size of the cluster is not known here."""
        self._reached()
        return 16

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Executes the units; see `Executor`."""
        place, here = self._executor(workers, folder), self.cluster == "local"
        # On a cluster, all units form one array, of which Slurm itself runs at most `workers` at once.
        array = iter([] if here else self._array(place, units))

        def ended(jobs: list[Any]) -> list[Any]:
            if not (found := [job for job in jobs if job.done()]):
                time.sleep(_EACH_HERE if here else _EACH)
            return found

        yield from _drive(
            _Tasks(
                submit=lambda unit: place.submit(work_elsewhere, unit) if here else next(array),
                ended=ended,
                result=lambda job: job.exception() or job.result(),
                cancel=lambda jobs: [job.cancel() for job in jobs],
            ),
            units,
            workers if here else len(units),
        )

    def _array(self, place: Any, units: Sequence[Unit]) -> list[Any]:
        from submitit.core.utils import FailedJobError  # pyright: ignore[reportMissingImports]

        try:
            return place.map_array(work_elsewhere, units)
        except FailedJobError as error:
            said = " ".join(str(error).split())[:300]
            raise RefusedError(f"Slurm accepted no jobs: {said}. Check the options of --executor slurm") from error

    def _reached(self) -> None:
        """Raises RefusedError if Slurm's commands or its controller are not available."""
        if self.cluster != "slurm":
            return
        if lacking := [name for name in ("sbatch", "srun") if shutil.which(name) is None]:
            raise unreached("Slurm", f"this machine has no {lacking[0]}; start the study where jobs can be submitted")
        if (scontrol := shutil.which("scontrol")) is None:
            return
        try:  # sbatch itself tries again for minutes
            said = subprocess.run(
                [scontrol, "ping"], capture_output=True, text=True, timeout=REACH_WAIT, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired as error:
            raise unreached("Slurm", f"its controller did not answer scontrol ping within {REACH_WAIT:g} s") from error
        if said.returncode:
            raise unreached("Slurm", f"scontrol ping says {said.stderr.strip() or said.stdout.strip()}")

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


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ray:
    """Tasks of a Ray cluster. A task whose machine is lost is retried once and continues from its checkpoint.

    address: the address of the cluster; "auto" uses the cluster of this machine, and an empty address uses RAY_ADDRESS
    or starts Ray on this machine. cpus, gpus: the number of each reserved per task.
    """

    address: str = ""
    cpus: Positive = 1
    gpus: NotNegative = 0

    def __post_init__(self) -> None:
        settle(self, "ray")

    def capacity(self) -> int:
        """Returns how many tasks the cluster's CPUs can run at once, and its GPUs if tasks reserve any."""
        has = self._connected().cluster_resources()
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        return max(1, min(int(has.get(name, 0) / amount) for name, amount in wanted.items() if amount))

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Executes the units; see `Executor`."""
        ray = self._connected()
        task = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=1)(work_elsewhere)
        tasks = _Tasks(
            submit=task.remote,
            ended=lambda running: ray.wait(running)[0],
            result=ray.get,
            cancel=lambda running: [ray.cancel(left, force=True) for left in running],
        )
        yield from _drive(tasks, units, workers)

    def _connected(self) -> Any:
        with needed("the executor ray", "ray"):
            import ray  # pyright: ignore[reportMissingImports]
        if not ray.is_initialized():
            address = self.address or os.environ.get("RAY_ADDRESS", "")
            check_reached("Ray's cluster", address, begins_grpc)
            try:
                ray.init(address=address or None, log_to_driver=False, include_dashboard=False)
            except Exception as error:  # includes clusters with a different version
                raise unreached("Ray's cluster", f"{address}: {error}") from error
        return ray


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dask:
    """Workers of a Dask cluster. Each worker process executes one unit at a time, no matter how many threads it has.

    address: the address of the scheduler, like "tcp://host:8786"; an empty address uses DASK_SCHEDULER_ADDRESS or the
    active client, or starts a cluster on this machine.
    """

    address: str = ""

    def capacity(self) -> int:
        """Returns the number of the cluster's worker processes."""
        return max(1, len(self._client.scheduler_info(n_workers=-1)["workers"]))

    def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
        """Executes the units; see `Executor`."""
        client = self._client
        from distributed import as_completed  # pyright: ignore[reportMissingImports]

        completed = as_completed()  # also yields futures that were cancelled, where `wait` raises

        def submit(unit: Unit) -> Any:
            completed.add(future := client.submit(work_elsewhere, unit, pure=False))
            return future

        tasks = _Tasks(
            submit=submit,
            ended=lambda _: [next(completed)],
            result=lambda done: done.exception() or done.result(),
            cancel=lambda running: client.cancel(running, force=True),
        )
        yield from _drive(tasks, units, workers)

    @functools.cached_property
    def _client(self) -> Any:
        with needed("the executor dask", "distributed"):
            from distributed import Client, get_client  # pyright: ignore[reportMissingImports]
        if address := self.address or os.environ.get("DASK_SCHEDULER_ADDRESS", ""):
            check_reached("Dask's scheduler", address)
            try:
                return Client(address, timeout=REACH_WAIT)
            except Exception as error:  # includes errors from parsing what is not a scheduler's reply
                raise unreached("Dask's scheduler", f"{address}: {error}") from error
        try:
            return get_client()
        except ValueError:  # there is no active client
            return Client(threads_per_worker=1, dashboard_address=None)


# Each class imports its library only when it is used.
EXECUTORS: dict[str, type[Executor]] = {"local": Local, "ray": Ray, "dask": Dask, "slurm": Slurm}
