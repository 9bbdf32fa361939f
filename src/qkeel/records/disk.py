"""The one place where the files of a run are written: replaced as a whole, appended to, cut, synced and removed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from qkeel.errors import RunDirectoryError
from qkeel.records.regular_files import refuse_irregular

_PART = ".part"
_BINARY = os.O_BINARY if sys.platform == "win32" else 0
_unsynced: set[Path] = set()  # files that this process appended to since they were synced, folders with new names
_WITHOUT_SYNC = (errno.EINVAL, errno.ENOTSUP)  # some network disks sync no directory


def replace_file(path: Path, data: bytes | bytearray) -> None:
    """Writes a file so that its readers, after a loss of power too, see the old one or the new one.

    Written under another name, synced, renamed, and the directory synced. The directory must be there: one that was
    moved away while a run went on is not made a second time.

    Raises: RunDirectoryError if it cannot be written, or what is there is no regular file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PART}")
    kept = "Expected a writable place with free space; what was there is not lost. Free some space or choose another"
    with _reported("write", path, f"{kept} directory."):
        refuse_irregular(path)
        try:
            with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                _write(file, data)
                os.fsync(file)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_names(path.parent)


def append(path: Path, data: bytes) -> None:
    """Appends whole records and hands them to the operating system at once; `sync` brings them to the disk.

    Raises: RunDirectoryError if they cannot be appended; the file then ends as it did, if the disk still allows that.
    """
    kept = "What was written before is kept; free some space or choose another directory, then run the same command"
    with _reported("append to", path, f"{kept} again to go on."):
        size = refuse_irregular(path)
        _unsynced.update([path] if size is not None else [path, path.parent])
        with _opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
            try:
                _write(file, data)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, size or 0)
                raise


def cut(path: Path, size: int) -> None:
    """Leaves the first `size` bytes of a file, on the disk too."""
    advice = "Expected a writable place; run the same command again to go on."
    with _reported("cut", path, advice), _opened(path, os.O_RDWR) as file:
        os.ftruncate(file, size)
        os.fsync(file)


def sync(paths: Iterable[Path]) -> None:
    """Returns once what this process appended to these files, and their names, are on the disk.

    Raises: RunDirectoryError if the disk does not take them.
    """
    paths = list(paths)
    advice = "Run the same command again to go on from the last checkpoint."
    for path in paths:
        if path in _unsynced:
            with _reported("write", path, advice), _opened(path, os.O_RDWR) as file:
                os.fsync(file)
            _unsynced.discard(path)
    for folder in {path.parent for path in paths} & _unsynced:
        with _reported("write", folder, advice):
            _sync_names(folder)


def remove(paths: Iterable[Path]) -> None:
    """Removes files, as far as they are there; they stay away after a loss of power too.

    Raises: RunDirectoryError if one cannot be removed.
    """
    for path in [path for path in paths if path.exists()]:
        with _reported("remove", path, "Expected a writable place; run the same command again to go on."):
            _unlink(path)
            _sync_names(path.parent)


def remove_leftovers(directory: Path) -> None:
    """Removes the unfinished files of a killed process; only for the process that holds the directory."""
    for path in directory.glob(f".*{_PART}"):
        with _reported("remove", path, "Expected a writable place; choose another directory."):
            _unlink(path)


def make_directory(path: Path, parents: bool = True) -> bool:
    """Makes a directory unless it is there; without `parents` only inside one that is there. Whether it was made here.

    Raises: RunDirectoryError if it cannot be made.
    """
    if path.is_dir():
        return False
    if parents and not path.parent.exists():
        make_directory(path.parent)
    with _reported("make", path, "Choose a writable directory with free space."):
        try:
            os.mkdir(path)
        except FileExistsError:
            if not path.is_dir():  # else another process was faster
                raise
            return False
        _sync_names(path.parent)
    return True


def move_directory(path: Path, to: Path) -> None:
    """Gives a directory another name, in the same folder; an empty directory that has it is replaced.

    Raises: RunDirectoryError if it cannot be moved.
    """
    with _reported("make", to, "Choose a writable directory with free space."):
        os.replace(path, to)
        _sync_names(to.parent)


def hold_lock(file: int, wait: float) -> bool:
    """Locks an open file for this process, until the last descriptor of it is closed; whether that was possible.

    The lock is advisory and exclusive, `flock`'s; the kernel frees it however the process ends. A system without it
    (Windows) locks nothing and answers yes: runs can still be resumed there, they are only not guarded.

    Args:
        file: the descriptor.
        wait: seconds to wait for another process.

    Raises:
        OSError: files on this disk cannot be locked.
    """
    try:
        import fcntl
    except ImportError:
        return True
    start = time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() - start >= wait:
                return False
        time.sleep(0.05)


@contextlib.contextmanager
def _reported(act: str, path: Path, advice: str) -> Iterator[None]:
    """An error of the operating system as one of qkeel's, with what was tried, why it failed and what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        gone = isinstance(error, FileNotFoundError)
        reason = f"the directory {path.parent} is not there (any more)" if gone else error.strerror or str(error)
        raise RunDirectoryError(f"cannot {act} {path}: {reason}. {advice}") from error


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | _BINARY, 0o644)
    try:
        yield file
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            os.close(file)
        raise
    os.close(file)


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        os.unlink(path)


def _write(file: int, data: bytes | bytearray) -> None:
    """All of the bytes; a disk that is nearly full, or a network's, may take some of them at a time."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _sync_names(folder: Path) -> None:
    """Returns once the names in a directory are on the disk."""
    if sys.platform == "win32":  # it opens no directory; renames there are journalled
        return
    with _opened(folder, os.O_RDONLY) as file:
        try:
            os.fsync(file)
        except OSError as error:
            if error.errno not in _WITHOUT_SYNC:
                raise
    _unsynced.discard(folder)
