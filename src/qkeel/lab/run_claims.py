"""Which process trains a run, so that any number of processes and machines can run one command on a shared folder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import final

from qkeel.errors import (
    DamagedFileError,
    RunDirectoryError,
    RunInUseError,
    reported,
)
from qkeel.lab.config import RunConfig
from qkeel.records import RunDirectory, RunStatus
from qkeel.records.disk import make_directory, remove

# Seconds between signs of life.
HEARTBEAT = 15.0
# Seconds without one; network disks show the times of a file up to a minute late.
EXPIRY = 180.0


@functools.cache
def machine() -> str:
    """Returns a value that differs between machines (and changes when one starts again), without its name."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = platform.node()
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@final
class Claim:
    """The file `claim.N` in a run's directory: its holder alone writes to the run, and touches the file as it trains.

    A claim that is not touched for EXPIRY seconds has expired. The next holder creates N + 1, which the file system
    lets only one process do.
    """

    def __init__(self, run_directory: RunDirectory, number: int, text: str) -> None:
        self.run_directory, self.number, self._text = run_directory, number, text

    @property
    def path(self) -> Path:
        """The file."""
        return self.run_directory.path / f"claim.{self.number}"

    def check(self) -> None:
        """Raises RunInUseError if another machine has taken the run over, because this process was stopped for long."""
        newest = _newest(self.run_directory)
        if newest is None and not self.path.parent.exists():
            # The next write says that the directory is gone.
            return
        if newest is None or newest._text != self._text:
            raise RunInUseError(
                f"{self.run_directory.path} was taken over by another machine, which continues it"
            )

    def open(self, config: RunConfig) -> None:
        """Creates the files of the run, or checks that those in the directory belong to it."""
        run_directory = self.run_directory
        if (
            run_directory.status is RunStatus.MISSING
            or _recorded(run_directory).run_id != config.run_id
        ):
            run_directory.open(config.to_dict())
        remove([run_directory.path / "FAILED"])

    def is_held_elsewhere(self) -> bool:
        """True if another machine holds the claim and it has not expired."""
        with contextlib.suppress(FileNotFoundError):
            folder = self.path.parent
            # The clock of the file server, whose times are compared.
            os.utime(folder)
            age = folder.stat().st_mtime - self.path.stat().st_mtime
            return self._text.split(" ")[0] != machine() and age < EXPIRY
        return False


@contextlib.contextmanager
def claimed(run_directory: RunDirectory, wait: float = 0.0) -> Iterator[Claim]:
    """Claims a run for this process until the context ends.

    Among the processes of one machine the operating system's lock decides, which ends with its process. Other machines
    may not see such a lock on a network disk; among them the claim decides.

    Raises:
        RunInUseError: another process trains the run, and on this machine still did after `wait` seconds.
        RunDirectoryError: the directory cannot be written to.
    """
    advice = ". Choose a writable directory with free space."
    with reported(f"cannot read {run_directory.path}", advice):
        # Before the lock: a run on another machine is refused at once, without waiting for a lock on a network disk.
        _refuse_held(run_directory)
    with run_directory.lock(wait):
        newest = _refuse_held(run_directory)
        claim = Claim(
            run_directory,
            1 + (newest.number if newest else 0),
            f"{machine()} {secrets.token_hex(8)}",
        )
        _create(claim)
        stop = threading.Event()
        thread = threading.Thread(
            target=_touch_regularly, args=(claim.path, stop), daemon=True
        )
        thread.start()
        try:
            # Two machines may have created the same number at the same moment on a disk that is not coherent.
            claim.check()
            remove(
                path
                for path in run_directory.path.glob("claim.*")
                if path != claim.path
            )
            yield claim
        finally:
            stop.set()
            thread.join()
            claim.path.unlink(missing_ok=True)


def _touch_regularly(path: Path, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT):
        # The file is gone if the claim was lost, and the holder checks that.
        with contextlib.suppress(OSError):
            os.utime(path)


def _create(claim: Claim) -> None:
    make_directory(claim.path.parent)
    try:
        with open(claim.path, "x", encoding="ascii") as file:
            file.write(claim._text)
    except FileExistsError as error:
        raise _in_use(claim.run_directory) from error
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write {claim.path}: {error.strerror}. Choose a writable directory with free space."
        ) from error


def _newest(run_directory: RunDirectory) -> Claim | None:
    """Returns the claim with the largest number, or None if the run is not claimed."""
    numbers = [
        int(path.suffix[1:])
        for path in run_directory.path.glob("claim.*")
        if path.suffix[1:].isdigit()
    ]
    claim = Claim(run_directory, max(numbers), "") if numbers else None
    if claim is not None:
        # Its owner may have ended, and removed it, since the folder was listed.
        with contextlib.suppress(OSError):
            claim._text = claim.path.read_text(encoding="ascii", errors="replace")
    return claim


def _refuse_held(run_directory: RunDirectory) -> Claim | None:
    claim = _newest(run_directory)
    if claim is not None and claim.is_held_elsewhere():
        raise _in_use(run_directory)
    return claim


def _in_use(run_directory: RunDirectory) -> RunInUseError:
    return RunInUseError(
        f"{run_directory.path} is in use by another machine. Wait for it to end the run; if it was switched off, its "
        f"claim expires after {EXPIRY:.0f} seconds."
    )


def _recorded(run_directory: RunDirectory) -> RunConfig:
    """Returns the configuration for which the directory was created."""
    try:
        return RunConfig.from_dict(run_directory.config())
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(
            f"{run_directory.path / 'config.json'} is not a valid configuration ({error}). It was damaged, or a "
            f"different version wrote it; restore it, or delete {run_directory.path} to run again."
        ) from error
