"""A cluster that cannot be reached, a full disk and a broken library are each one line that says so."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from qkeel.errors import MissingLibraryError, RefusedError, needed
from qkeel.lab import executors as table
from qkeel.lab.executors import Job, check_reached, died, executor

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


def test_an_address_that_somebody_listens_at_or_that_is_a_name_is_left_to_the_library() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_reached("it", f"tcp://127.0.0.1:{server.getsockname()[1]}")
    for address in ("auto", "local", "ray://", "/a/file"):
        check_reached("it", address)


def test_a_machine_without_sbatch_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    for act in (lambda e: e.capacity(), lambda e: list(e.outcomes([UNIT], 1, tmp_path))):
        with pytest.raises(RefusedError, match="Slurm cannot be reached: this machine has no sbatch"):
            act(executor("slurm"))


def test_a_full_disk_on_the_cluster_is_called_that() -> None:
    error = RuntimeError(f"Job 7 failed\nlong log ...\nOSError: [Errno 28] {os.strerror(errno.ENOSPC)}: 'x'\nmore")
    outcomes = died(UNIT, error)
    assert [outcome.directory for outcome in outcomes] == ["a", "b"]
    assert all(
        "disk of the cluster or of --out is full" in outcome.error and "\n" not in outcome.error for outcome in outcomes
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
