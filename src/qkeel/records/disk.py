"""Durable file operations: atomic replacement, appends, locks and checksums, for regular files only."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from qkeel.errors import QkeelError, RunDirectoryError, reported

# The checksum of a JSON text is its last field, crc32, computed over the text with the field's eight digits set to 0.

FIELD = "crc32"
_BLANK = "00000000"
_END = re.compile(rb'"crc32": "([0-9a-f]{8})"(\n?\}\n)\Z')
_LONGEST = len('"crc32": "00000000"\n}\n')


def seal(value: Mapping[str, object], indent: int | None = None) -> bytes:
    r"""Returns an object as JSON text with a newline, and the checksum as its last field.

    >>> seal({"step": 3})
    b'{"step": 3, "crc32": "36644f0c"}\n'
    """
    fields = {name: own for name, own in value.items() if name != FIELD}
    text = json.dumps({**fields, FIELD: _BLANK}, indent=indent, allow_nan=False).encode() + b"\n"
    at = text.rindex(_BLANK.encode())
    return b"%b%08x%b" % (text[:at], zlib.crc32(text), text[at + len(_BLANK) :])


def is_sealed(text: bytes) -> bool:
    """Returns whether the text ends with a checksum, whether the checksum is correct or not.

    >>> is_sealed(seal({"step": 3})), is_sealed(b'{"step": 3}')
    (True, False)
    """
    return _END.search(text[-_LONGEST:]) is not None


def check_seal(text: bytes, needed: bool = False) -> bool:
    """Verifies the checksum of the text, if it has one, and returns whether it has one.

    >>> check_seal(seal({"step": 3})), check_seal(b'{"step": 3}')
    (True, False)

    Raises:
        ValueError: the text does not match its checksum, or has no checksum although it is `needed`.
    """
    found = _END.search(text[-_LONGEST:])
    if found is None:
        if needed:
            raise ValueError("it has no checksum, but every line and file here must have one")
        return False
    end = len(text) - len(found[2]) - 1
    start = end - len(_BLANK)
    if b"%08x" % zlib.crc32(text[end:], zlib.crc32(_BLANK.encode(), zlib.crc32(text[:start]))) != found[1]:
        raise ValueError("it does not match its checksum")
    return True


# Only regular files are read and written; pipes, devices, folders and link cycles are rejected before they are opened.

MOST_BYTES = 1 << 28  # size limit for files that are read completely
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


def refuse_irregular(path: Path, error: type[QkeelError] = RunDirectoryError) -> int | None:
    """Returns the size of a regular file, or None if `path` does not exist; raises an error for anything else.

    Nothing is opened, because opening a pipe waits for a writer and reading a device may never end.

    >>> refuse_irregular(Path("nothing-here"))
    >>> refuse_irregular(Path("."))
    Traceback (most recent call last):
    qkeel.errors.RunDirectoryError: cannot use .: expected a regular file, got a directory. Give the path of a file.

    Raises:
        QkeelError: the path is not a regular file, is a link cycle, or cannot be inspected. The class is `error`.
    """
    try:
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the name
        reason = failure.strerror if isinstance(failure, OSError) else failure
        raise error(f"cannot use {str(path)!r}: {reason}. Expected a regular file; give a different path.") from failure
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise error(f"cannot use {path}: expected a regular file, got {kind}. Give the path of a file.")
    return about.st_size


def refuse_path(name: str, where: str, error: type[QkeelError] = RunDirectoryError) -> str:
    """Returns `name`, which was read from a file, if it is the name of a directory entry without a path.

    >>> refuse_path("9f2c", "study.json")
    '9f2c'
    >>> refuse_path("../../elsewhere", "study.json")
    Traceback (most recent call last):
    qkeel.errors.RunDirectoryError: study.json names '../../elsewhere'; expected the name of an entry of its ...

    Raises:
        QkeelError: the name is a path, "." or "..", or is not a valid file name. The class is `error`.
    """
    if re.search(r"[/\\\x00-\x1f]", name) or name.strip(". ") == "" or len(name.encode("utf-8")) > 255:
        raise error(
            f"{where} names {name[:80]!r}; expected the name of an entry of its own folder, without a path. It was not "
            "written by qkeel, or it was changed later; restore it."
        )
    return name


def refuse_links(folder: Path) -> None:
    """Raises an error if the folder of a study or run contains a link, which could point to someone else's data.

    >>> refuse_links(Path("."))

    Raises:
        RunDirectoryError: an entry is a link; the message names the first link.
    """
    for entry in sorted(folder.iterdir()) if os.path.isdir(folder) else ():  # Path.is_dir raises for a long name
        if entry.is_symlink():
            raise RunDirectoryError(
                f"cannot use {entry}: it is a link; expected the files of a run in its own folder. Copy the target of "
                "the link into that folder, or remove the link."
            )


def read_regular(path: Path, error: type[QkeelError] = RunDirectoryError, most: int | None = MOST_BYTES) -> bytes:
    """Reads a regular file of at most `most` bytes, or of any size if `most` is None.

    >>> _ = Path("a.txt").write_bytes(b"abc")
    >>> read_regular(Path("a.txt"))
    b'abc'

    Raises:
        QkeelError: the file is missing, not regular, too large or not readable. The class is `error`.
    """
    size = refuse_irregular(path, error)
    if size is None:
        raise error(f"{path} is missing; give the path of an existing file.")
    if most is not None and size > most:
        raise error(f"cannot read {path}: it has {size:,} bytes; expected at most {most:,}. Is it the right file?")
    return _read(path, size or -1, error)  # files of /proc report size 0


def read_start(path: Path, count: int, error: type[QkeelError] = RunDirectoryError) -> bytes:
    """Reads the first `count` bytes of a regular file, or all its bytes if it has fewer.

    >>> _ = Path("a.txt").write_bytes(b"abc")
    >>> read_start(Path("a.txt"), 2)
    b'ab'

    Raises:
        QkeelError: the file is missing, not regular or not readable. The class is `error`.
    """
    if refuse_irregular(path, error) is None:
        raise error(f"{path} is missing; give the path of an existing file.")
    return _read(path, count, error)


def _read(path: Path, count: int, error: type[QkeelError]) -> bytes:
    try:
        with reported(f"cannot read {path}", ". Expected a readable file.", error), open(path, "rb") as file:
            return file.read(count)
    except MemoryError as failure:
        raise error(f"cannot read {path}: it is too large to fit in memory.") from failure


# All writes to run directories go through the functions below.

_PART = ".part"
_BINARY = os.O_BINARY if sys.platform == "win32" else 0
_unsynced: set[Path] = set()  # files with appended data and folders with new entries that were not synced yet
_WITHOUT_SYNC = (errno.EINVAL, errno.ENOTSUP)  # raised by network disks that cannot sync a directory


def replace_file(path: Path, data: bytes | bytearray) -> None:
    """Writes a file so that readers see either the old or the new content, even after a power loss.

    The data is written to a temporary file, which is synced and renamed; then the directory is synced. The directory
    must exist, so that it is not created again if it was moved while a run was writing.

    Raises:
        RunDirectoryError: the file cannot be written, or the path is not a regular file.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PART}")
    kept = "Existing files are not lost. Make the directory writable, free some space on its disk, or choose another"
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
    """Appends complete records and passes them to the operating system at once; `sync` writes them to the disk.

    Raises:
        RunDirectoryError: the append failed; the file is truncated to its old size if the disk still allows this.
    """
    kept = "Earlier records are kept; free some space or choose another directory, then run the same command"
    with _reported("append to", path, f"{kept} again to continue."):
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
    """Durably truncates a file to its first `size` bytes."""
    advice = "Make the file writable, then run the same command again to continue."
    with _reported("truncate", path, advice), _opened(path, os.O_RDWR) as file:
        os.ftruncate(file, size)
        os.fsync(file)


def sync(paths: Iterable[Path]) -> None:
    """Blocks until everything that this process appended to these files, and their directory entries, is on the disk.

    Raises:
        RunDirectoryError: the disk reports an error.
    """
    paths = list(paths)
    advice = "Run the same command again to continue from the last checkpoint."
    for path in paths:
        if path in _unsynced:
            with _reported("write", path, advice), _opened(path, os.O_RDWR) as file:
                os.fsync(file)
            _unsynced.discard(path)
    for folder in {path.parent for path in paths} & _unsynced:
        with _reported("write", folder, advice):
            _sync_names(folder)


def remove(paths: Iterable[Path]) -> None:
    """Durably removes whichever of the files exist.

    Raises:
        RunDirectoryError: a file cannot be removed.
    """
    for path in [path for path in paths if path.exists()]:
        with _reported("remove", path, "Make its directory writable, then run the same command again to continue."):
            _unlink(path)
            _sync_names(path.parent)


def remove_leftovers(directory: Path) -> None:
    """Removes the temporary files of a killed process; only the process that holds the lock may call this."""
    for path in directory.glob(f".*{_PART}"):
        with _reported("remove", path, "Make its directory writable, or choose another directory."):
            _unlink(path)


def make_directory(path: Path, parents: bool = True) -> bool:
    """Creates a directory unless it exists, and returns whether this call created it.

    Without `parents`, the parent directory must exist.

    Raises:
        RunDirectoryError: the directory cannot be created.
    """
    if os.path.isdir(path):
        return False
    if parents and not os.path.exists(path.parent):
        make_directory(path.parent)
    with _reported("create", path, "Choose a writable directory with free space."):
        try:
            os.mkdir(path)
        except FileExistsError:
            if not path.is_dir():  # otherwise, another process was faster
                raise
            return False
        _sync_names(path.parent)
    return True


def move_directory(path: Path, to: Path) -> None:
    """Renames a directory within its folder; an empty directory with the new name is replaced.

    Raises:
        RunDirectoryError: the directory cannot be renamed.
    """
    with _reported("create", to, "Choose a writable directory with free space."):
        os.replace(path, to)
        _sync_names(to.parent)


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
    """Turns an OSError into a RunDirectoryError that says what failed, why, and what to do."""
    with reported(f"cannot {act} {path}", f". {advice}"):
        try:
            yield
        except FileNotFoundError as error:
            raise OSError(error.errno, f"the directory {path.parent} does not exist or was removed") from error


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
    """Writes all bytes, in several calls if necessary, because a nearly full or remote disk may accept only a part."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def _sync_names(folder: Path) -> None:
    """Blocks until the entries of a directory are on the disk."""
    if sys.platform == "win32":  # Windows cannot open directories, and it journals renames anyway
        return
    with _opened(folder, os.O_RDONLY) as file:
        try:
            os.fsync(file)
        except OSError as error:
            if error.errno not in _WITHOUT_SYNC:
                raise
    _unsynced.discard(folder)
