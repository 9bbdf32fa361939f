"""File operations for records: atomic replacement, appends, locks. A process that is killed loses at most the record
that it was appending."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from qkeel.errors import (
    QkeelError,
    RunDirectoryError,
    RunInUseError,
    caution,
    reported,
)

_PART = ".part"
_AGAIN = "run the same command again to continue from the last checkpoint."
_WRITABLE = "Choose a writable directory with free space."


def read_file(path: Path, error: type[QkeelError] = RunDirectoryError) -> bytes:
    """Reads a file.

    >>> _ = Path("a.txt").write_bytes(b"abc")
    >>> read_file(Path("a.txt"))
    b'abc'

    Raises:
        QkeelError: the file is missing or not readable. The class is `error`.
    """
    # Path.exists raises for a name that is too long.
    if not os.path.exists(path):
        raise error(f"{path} is missing; give the path of an existing file.")
    with reported(f"cannot read {path}", ". Expected a readable file.", error):
        return path.read_bytes()


def refuse_path(
    name: str, where: str, error: type[QkeelError] = RunDirectoryError
) -> str:
    """Returns `name`, which was read from a file, if it is the name of a directory entry without a path.

    >>> refuse_path("9f2c", "study.json")
    '9f2c'
    >>> refuse_path("../../elsewhere", "study.json")
    Traceback (most recent call last):
    qkeel.errors.RunDirectoryError: study.json names '../../elsewhere'; expected the name of an entry of its ...

    Raises:
        QkeelError: the name is a path, "." or "..", or is not a valid file name. The class is `error`.
    """
    if (
        re.search(r"[/\\\x00-\x1f]", name)
        or name.strip(". ") == ""
        or len(name.encode("utf-8")) > 255
    ):
        raise error(
            f"{where} names {name[:80]!r}; expected the name of an entry of its own folder, without a path. It was not "
            "written by qkeel, or it was changed later; restore it."
        )
    return name


def replace_file(path: Path, data: bytes | bytearray) -> None:
    """Writes a file so that readers see either the old or the new content.

    The data is written to a temporary file, which is synced and renamed. The directory must exist, so that it is not
    created again if it was moved while a run was writing.

    Raises:
        RunDirectoryError: the file cannot be written.

    >>> replace_file(Path("notes.txt"), b"kept")
    >>> Path("notes.txt").read_text()
    'kept'
    """
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        # a renamed file must not be empty after a crash of the system.
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: Path, *, directory: bool = False) -> Iterator[Path]:
    """A temporary file or directory, which takes the place of `path` at the end, or is removed after an error.

    A killed process leaves it behind, as `.NAME.….part` beside `path`. The next call for the same directory removes it,
    so two calls for one directory must not run at once.

    Args:
        path: what is written; an existing directory must be empty.
        directory: whether a directory is written.

    Raises:
        RunDirectoryError: the path cannot be written.
    """
    kept = "Existing files are not lost. Make the directory writable, free some space on its disk, or choose another"
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PART}")
    with _reported("write", path, f"{kept} directory."):
        try:
            if directory:
                pattern = f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}{_PART}"
                for left in path.parent.glob(pattern):
                    shutil.rmtree(left, ignore_errors=True)
                    caution(f"removed {left}, which a killed process had left behind")
                temporary.mkdir()
            yield temporary
            os.replace(temporary, path)
        finally:
            if directory:
                shutil.rmtree(temporary, ignore_errors=True)
            with contextlib.suppress(OSError):
                temporary.unlink()


def append(path: Path, data: bytes) -> None:
    """Appends complete records and passes them to the operating system at once.

    Raises:
        RunDirectoryError: the append failed; the file is truncated to its old size if the disk still allows this.
    """
    kept = "Earlier records are kept; free some space or choose another directory, then run the same command"
    with _reported("append to", path, f"{kept} again to continue."):
        # A record of which half fits on the disk would make the next one unreadable.
        size = path.stat().st_size if path.exists() else 0
        try:
            with open(path, "ab") as file:
                file.write(data)
        except BaseException:
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise


def create(path: Path) -> bool:
    """Creates an empty file, and returns whether this call created it.

    Raises:
        RunDirectoryError: the file cannot be created.
    """
    with _reported("create", path, _WRITABLE):
        try:
            path.open("xb").close()
        except FileExistsError:
            return False
    return True


def cut(path: Path, size: int) -> None:
    """Truncates a file to its first `size` bytes."""
    with _reported("truncate", path, f"Make the file writable, then {_AGAIN}"):
        os.truncate(path, size)


def sync(paths: Iterable[Path]) -> None:
    """Blocks until these files, as far as they exist, are on the disk; a checkpoint refers to their sizes.

    Raises:
        RunDirectoryError: the disk reports an error.
    """
    for path in paths:
        with _reported("write", path, f"Free its disk, then {_AGAIN}"):
            if path.exists():
                with open(path, "ab") as file:
                    os.fsync(file.fileno())


def remove(paths: Iterable[Path]) -> None:
    """Removes whichever of the files exist.

    Raises:
        RunDirectoryError: a file cannot be removed.
    """
    for path in paths:
        with _reported("remove", path, f"Make its directory writable, then {_AGAIN}"):
            path.unlink(missing_ok=True)


def make_directory(path: Path, parents: bool = True) -> bool:
    """Creates a directory unless it exists, and returns whether this call created it.

    Without `parents`, the parent directory must exist.

    Raises:
        RunDirectoryError: the directory cannot be created.
    """
    with _reported("create", path, _WRITABLE):
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()
        except FileExistsError:
            # Otherwise, it existed or another process was faster.
            if not path.is_dir():
                raise
            return False
    return True


def check_writable(path: Path) -> None:
    """Raises an error if no directory can be written at this path; nothing is left behind.

    Raises:
        RunDirectoryError: a file cannot be created in the folder that would hold it.
    """
    with _reported("create", path, _WRITABLE):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            # Of a name that is too long, some versions of Python say only that there is nothing.
            os.lstat(path)
        folder = path if path.is_dir() and not any(path.iterdir()) else path.parent
        while not os.path.lexists(folder):
            folder = folder.parent
        # Tried, because permissions say nothing of a read-only or a virtual file system.
        tempfile.TemporaryFile(dir=folder).close()


def hold_lock(file: int, wait: float) -> bool:
    """Locks an open file for this process until its last descriptor is closed, and returns whether that succeeded.

    The lock is the advisory, exclusive lock of `flock`, which the kernel releases no matter how the process ends. On a
    system without `flock` (Windows), nothing is locked and the result is True, so runs can be resumed there, but
    without protection.

    Args:
        file: the file descriptor.
        wait: the number of seconds to wait for another process.

    Raises:
        OSError: files on this disk cannot be locked.
    """
    try:
        import fcntl
    except ImportError:
        return True
    start = time.monotonic()
    # flock itself knows no time limit, so it is asked again and again.
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() - start >= wait:
                return False
        time.sleep(0.05)


@contextlib.contextmanager
def locked(path: Path, message: str, wait: float = 0.0) -> Iterator[None]:
    """Holds an exclusive advisory lock on `path`.

    Raises:
        RunInUseError: another process still holds the lock after `wait` seconds; the message names the process.
    """
    make_directory(path.parent)
    with _reported("write to", path.parent, _WRITABLE):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        lockable = "Choose a directory on a disk whose files can be locked."
        with _reported("lock", path, lockable):
            is_held = hold_lock(file, wait)
        if not is_held:
            holder = os.read(file, 20).decode("ascii", "replace").strip()
            process = f" (process {holder})" if holder else ""
            raise RunInUseError(
                f"{message}{process}. Wait for that process to end, stop it, or choose another directory."
            )
        # The process id is for the message of another process that waits for the lock.
        with _reported("write to", path.parent, _WRITABLE):
            os.ftruncate(file, 0)
            os.write(file, str(os.getpid()).encode())
        yield
    finally:
        # a failed close loses a process id at most.
        with contextlib.suppress(OSError):
            os.close(file)


def remove_leftovers(directory: Path) -> None:
    """Removes the temporary files of a killed process; only the process that holds the lock may call this."""
    remove(directory.glob(f".*{_PART}"))


@contextlib.contextmanager
def _reported(act: str, path: Path, advice: str) -> Iterator[None]:
    """Turns an OSError into a RunDirectoryError that says what failed, why, and what to do."""
    with reported(f"cannot {act} {path}", f". {advice}"):
        try:
            yield
        except FileNotFoundError as error:
            raise OSError(
                error.errno,
                f"the directory {path.parent} does not exist or was removed",
            ) from error
