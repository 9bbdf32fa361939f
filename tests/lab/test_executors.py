from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import os
import shlex
import signal
import socket
import stat
import sys
import threading
import time
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.lab.recorded import numbers

from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingLibraryError,
    QkeelError,
    RefusedError,
    UnknownNameError,
    needed,
)
from qkeel.lab import Execution, Grid, RunConfig, make_plan, run_plan
from qkeel.lab import executors as table
from qkeel.lab.executors import (
    EXECUTORS,
    Job,
    Outcome,
    Unit,
    begins_grpc,
    check_reached,
    died,
    executor,
    seen_here,
    work_elsewhere,
)

Make = Callable[..., RunConfig]
GRID = Grid(remedies=["none", "qk_norm"], lrs=[0.1], seeds=[0, 1])


def results(out: Path) -> dict[str, str]:
    return {run.name: repr(numbers(run)) for run in sorted((out / "runs").iterdir())}


@pytest.fixture(scope="module")
def known(tiny: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The results of the study by processes of this machine."""
    out = tmp_path_factory.mktemp("local")
    assert not run_plan(make_plan("lr", tiny(), GRID), out, Execution()).failures
    return results(out)


@pytest.mark.parametrize("name", EXECUTORS)
def test_an_executor_is_a_line_of_the_table(name: str) -> None:
    assert type(executor(name)).__name__.lower() == name


def test_names_and_options_that_do_not_exist_name_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="slurm"):
        executor("slrum")
    with pytest.raises(UnknownNameError, match="partition"):
        executor("slurm:partitions=gpu")
    assert executor("slurm:partition=3") == dataclasses.replace(executor("slurm"), partition="3")  # type: ignore[type-var]
    with pytest.raises(InvalidValueError, match="one executor"):
        executor("ray+dask")
    for text in ("slurm:time=soon", "slurm:time=0", "slurm:gpus=1.5", "ray:cpus=-1", "ray:gpus=true"):
        with pytest.raises((InvalidTypeError, InvalidValueError), match="expected"):
            executor(text)


def test_the_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, package in (("ray", "ray"), ("dask", "distributed"), ("slurm", "submitit")):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(QkeelError, match=rf"the executor {name} needs .* not installed: pip install"):
            list(executor(name).outcomes([[Job({}, "a", "")]], 1, tmp_path))


def test_results_that_are_not_seen_here_are_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table, "NETWORK_WAIT", 0.3)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "DONE").touch()
    here, elsewhere, failed = seen_here(
        [Outcome(str(tmp_path / "a")), Outcome(str(tmp_path / "b")), Outcome(str(tmp_path / "c"), "why")]
    )
    assert here.error == ""
    assert "share" in elsewhere.error
    assert failed.error == "why"


def test_paths_are_whole_on_the_cluster_and_as_typed_here(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Elsewhere:
        def capacity(self) -> int:
            return 2

        def outcomes(self, units: Sequence[Unit], workers: int, folder: Path) -> Generator[list[Outcome], None, None]:
            assert workers == 2
            os.chdir("/")
            for unit in units:
                given.extend(job.directory for job in unit)
                yield work_elsewhere(unit)
            os.chdir(tmp_path)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qkeel.lab.execute.executor", lambda text: Elsewhere())
    seen: list[Outcome] = []
    run_plan(make_plan("lr", tiny(), GRID), "study", Execution(executor="x", workers=None, on_outcome=seen.append))
    assert all(path.startswith(str(tmp_path / "study" / "runs")) for path in given)
    assert {outcome.directory for outcome in seen} == {f"study/runs/{Path(path).name}" for path in given}


# --- Slurm: what is submitted, by an sbatch that keeps it

SBATCH = """cp "$1" {kept}/script.sh
echo "Submitted batch job 77"
"""


def command(folder: Path, name: str, text: str) -> None:
    """A command of this name in the folder."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(stat.S_IRWXU)


def test_what_is_submitted_to_slurm(tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 0)  # for results of a job that has failed
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {
        "sbatch": SBATCH.format(kept=shlex.quote(str(tmp_path))),
        "sacct": "echo 'JobID|State'\necho '77_0|FAILED'\necho '77_1|FAILED'",
        "scancel": f"echo $@ >> {shlex.quote(str(tmp_path))}/cancelled",
        "srun": "",
    }.items():
        command(commands, name, text)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setattr("qkeel.lab.executors._EACH", 0.05)
    place = executor("slurm:partition=gpu,account=us,time=90,memory=8,cpus=3,gpus=1")
    jobs = [Job(tiny(seed=seed).to_dict(), str(tmp_path / f"run-{seed}"), "") for seed in (0, 1)]
    outcomes = [o for found in place.outcomes([[job] for job in jobs], 2, tmp_path) for o in found]
    script = (tmp_path / "script.sh").read_text()
    wanted = "--array=0-1%2 --partition=gpu --account=us --time=90 --mem=8GB --cpus-per-task=3 --gpus-per-node=1"
    for line in (*wanted.split(), "--job-name=qkeel"):
        assert f"#SBATCH {line}\n" in script, script
    assert "qos" not in script
    assert [o.directory for o in outcomes] == [job.directory for job in jobs]
    assert all("run the same command again" in o.error for o in outcomes)


# --- real clusters on this machine


@pytest.mark.slow
@pytest.mark.parametrize("place", ["ray", "dask", "slurm:cluster=local"])
def test_a_cluster_gives_the_bits_of_this_process(
    place: str, tiny: Make, tmp_path: Path, known: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkeel.lab.executors._EACH", 0.2)
    found = run_plan(make_plan("lr", tiny(), GRID), tmp_path / "s", Execution(executor=place, workers=2, stack="off"))
    assert not found.failures
    assert results(tmp_path / "s") == known


@pytest.mark.slow
@pytest.mark.parametrize("place", ["ray", "dask"])
def test_a_killed_worker_of_a_cluster_is_an_outcome_or_begun_again(
    place: str, tiny: Make, tmp_path: Path, known: dict[str, str]
) -> None:
    """A run that is killed at each try: the rest is done, and the same command does what is left."""

    def die(unit: Unit) -> list[Outcome]:
        if unit[0].config["seed"] == 1 and unit[0].config["remedy"] == "none":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return importlib.import_module("qkeel.lab.executors").work_elsewhere(unit)  # the worker's own

    module = importlib.import_module("qkeel.lab.executors")
    plan, one = make_plan("lr", tiny(), GRID), Execution(executor=place, workers=1, stack="off")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "work_elsewhere", die)
        found = run_plan(plan, tmp_path / "s", one)
    assert len(found.failures) == 1
    assert "run the same command again" in found.failures[0].error
    again = run_plan(plan, tmp_path / "s", one)
    assert not again.failures
    assert results(tmp_path / "s") == known


UNIT = [Job({}, "a", ""), Job({}, "b", "")]


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def connected(*_: Any, **__: Any) -> None:
    raise AssertionError("a library was asked to connect to an address at which nobody answers")


@pytest.mark.parametrize("name", ["dask", "ray"])
def test_an_address_at_which_nobody_answers_is_one_line(
    name: str, nobody: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    distributed, ray = types.ModuleType("distributed"), types.ModuleType("ray")
    vars(distributed).update(Client=connected, get_client=connected, as_completed=connected)
    vars(ray).update(init=connected, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "distributed", distributed)
    monkeypatch.setitem(sys.modules, "ray", ray)
    address = f"tcp://{nobody}" if name == "dask" else nobody
    for act in (lambda e: e.capacity(), lambda e: list(e.outcomes([UNIT], 1, tmp_path))):
        with pytest.raises(RefusedError, match=f"cannot be reached: nothing answers at {address}") as caught:
            act(executor(f"{name}:address={address}"))
        assert "\n" not in str(caught.value)


@contextlib.contextmanager
def listening(says: bytes) -> Iterator[str]:
    """An address at which somebody says this to the first who connects, and no more until that one leaves."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def say() -> None:
            with (
                server.accept()[0] as other,
                contextlib.suppress(ConnectionError),
            ):  # it may leave before it has read all
                other.sendall(says)
                other.recv(1)

        speaker = threading.Thread(target=say)
        speaker.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        speaker.join()


SETTINGS = b"\x00\x00\x18\x04\x00\x00\x00\x00\x00"  # how a gRPC server begins
SSH = b"SSH-2.0-OpenSSH_9.6\r\n"


def test_an_address_that_a_server_speaks_at_or_that_is_a_name_is_left_to_the_library() -> None:
    with listening(SETTINGS) as address:
        check_reached("it", address, begins_grpc)
    with listening(b":\x00\x00\x00\x00\x00\x00\x00\x01") as address:
        check_reached("it", f"tcp://{address}")
    for address in ("auto", "local", "ray://", "/a/file"):
        check_reached("it", address)


def test_a_server_that_waits_for_a_key_to_its_language_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkeel.lab.executors.REACH_WAIT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        check_reached("it", f"tls://{address}")
        monkeypatch.setenv("RAY_USE_TLS", "1")
        check_reached("it", address)


@pytest.mark.parametrize(("says", "why"), [(b"", "timed out"), (SSH, "something else listens there")])
def test_a_listener_that_is_no_cluster_is_one_line(says: bytes, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not says:
        monkeypatch.setattr("qkeel.lab.executors.REACH_WAIT", 0.2)
    with listening(says) as address, pytest.raises(RefusedError, match=f"nothing answers at {address} .{why}"):
        check_reached("Ray's cluster", address, begins_grpc)


def test_a_machine_without_slurm_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("sbatch", "srun"):
        for act in (lambda e: e.capacity(), lambda e: list(e.outcomes([UNIT], 1, tmp_path))):
            with pytest.raises(RefusedError, match=f"Slurm cannot be reached: this machine has no {name}"):
                act(executor("slurm"))
        command(tmp_path, name, "exit 0")


@pytest.mark.parametrize(
    ("ping", "wait", "why"),
    [
        ("exec sleep 60", 0.5, "its controller did not answer scontrol ping within 0.5 s"),
        ("echo 'Slurmctld at head is DOWN'; exit 1", 10.0, "scontrol ping says Slurmctld at head is DOWN"),
        ("exit 0", 10.0, "Slurm accepted no jobs: sbatch: error: invalid partition"),
    ],
)
def test_a_controller_that_is_away_and_jobs_that_are_not_taken_are_one_line(
    ping: str, wait: float, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("qkeel.lab.executors.REACH_WAIT", wait)
    command(tmp_path, "srun", "exit 0")
    command(tmp_path, "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    command(tmp_path, "scontrol", ping)
    with pytest.raises(RefusedError, match=why) as caught:
        list(executor("slurm").outcomes([UNIT], 1, tmp_path))
    assert "\n" not in str(caught.value)


def test_a_full_disk_on_the_cluster_is_called_that() -> None:
    error = RuntimeError(f"Job 7 failed\nlong log ...\nOSError: [Errno 28] {os.strerror(errno.ENOSPC)}: 'x'\nmore")
    outcomes = died(UNIT, error)
    assert [outcome.directory for outcome in outcomes] == ["a", "b"]
    assert all(
        "disk of the cluster, or the disk that holds --out, is full" in outcome.error and "\n" not in outcome.error
        for outcome in outcomes
    )


def test_a_library_that_lacks_one_of_its_own_is_told_apart_from_one_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_outside.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    broken = r"broken: broken_outside imports not_there_at_all, .*pip install not_there_at_all"
    with pytest.raises(MissingLibraryError, match=broken), needed("the executor x", "'qkeel[x]'"):
        import broken_outside  # noqa: F401
    missing = r"is not installed: pip install 'qkeel\[x\]'"
    with pytest.raises(MissingLibraryError, match=missing), needed("the executor x", "'qkeel[x]'"):
        import not_there_at_all  # noqa: F401


def test_jobs_on_this_machine_keep_to_the_number_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """submitit's executor, with threads in the place of its processes."""
    submitit = pytest.importorskip("submitit")
    running, most = [0], [0]

    class Done:
        def __init__(self, unit: Any) -> None:
            self.unit = unit
            self.thread = threading.Thread(target=self.run)
            self.thread.start()

        def run(self) -> None:
            running[0] += 1
            most[0] = max(most[0], running[0])
            time.sleep(0.3)
            running[0] -= 1

        def done(self) -> bool:
            return not self.thread.is_alive()

        def exception(self) -> None:
            return None

        def result(self) -> list[table.Outcome]:
            return [table.Outcome(self.unit[0].directory, "known")]

        def cancel(self) -> None:
            raise AssertionError("nothing is left to cancel")

    class Threads:
        def __init__(self, **_: Any) -> None: ...

        def update_parameters(self, **_: Any) -> None: ...

        def submit(self, act: Any, unit: Any) -> Done:
            return Done(unit)

    monkeypatch.setattr(submitit, "AutoExecutor", Threads)
    units = [[Job({}, str(i), "")] for i in range(7)]
    with contextlib.closing(executor("slurm:cluster=local").outcomes(units, 2, tmp_path)) as found:
        directories = sorted(outcome.directory for outcomes in found for outcome in outcomes)
    assert directories == [str(i) for i in range(7)]
    assert most == [2]
