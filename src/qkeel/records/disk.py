"""How bytes reach the disk whole: atomic replacement, regular files only, checksums."""

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

from qkeel.errors import QkeelError, RunDirectoryError

# The checksum of a JSON text: its last field, crc32, over the text with the checksum's own eight digits set to 0.

FIELD = "crc32"
_BLANK = "00000000"
_END = re.compile(rb'"crc32": "([0-9a-f]{8})"(\n?\}\n)\Z')
_LONGEST = len('"crc32": "00000000"\n}\n')


def seal(value: Mapping[str, object], indent: int | None = None) -> bytes:
    r"""The JSON text of an object and a newline, with the checksum as the last field.

    >>> seal({"step": 3})
    b'{"step": 3, "crc32": "36644f0c"}\n'
    """
    fields = {name: own for name, own in value.items() if name != FIELD}
    text = json.dumps({**fields, FIELD: _BLANK}, indent=indent, allow_nan=False).encode() + b"\n"
    at = text.rindex(_BLANK.encode())
    return b"%b%08x%b" % (text[:at], zlib.crc32(text), text[at + len(_BLANK) :])


def is_sealed(text: bytes) -> bool:
    """Returns whether the text ends with a checksum, right or wrong.

    >>> is_sealed(seal({"step": 3})), is_sealed(b'{"step": 3}')
    (True, False)
    """
    return _END.search(text[-_LONGEST:]) is not None


def check_seal(text: bytes, needed: bool = False) -> bool:
    """Returns whether the text ends with its checksum; one without is taken as it is unless a checksum is `needed`.

    >>> check_seal(seal({"step": 3})), check_seal(b'{"step": 3}')
    (True, False)

    Raises: ValueError for a text that does not match its checksum, or lacks a checksum that is needed.
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


# Regular files: what alone is read and written; pipes, devices, folders and loops of links are refused first.

MOST_BYTES = 1 << 28  # of a file that is read whole
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


def refuse_irregular(path: Path, error: type[QkeelError] = RunDirectoryError) -> int | None:
    """Raises unless `path` is a regular file, or leads to one, or does not exist; returns its size, or None.

    Nothing is opened: opening a pipe waits for a writer, and reading a device may never end.

    >>> refuse_irregular(Path("nothing-here"))
    >>> refuse_irregular(Path("."))
    Traceback (most recent call last):
    qkeel.errors.RunDirectoryError: cannot use .: expected a regular file, got a directory. Name a file there instead.

    Raises: `error` for anything else, a loop of links or an unreadable folder too.
    """
    try:
        about = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as failure:  # ValueError: a NUL in the name
        reason = failure.strerror if isinstance(failure, OSError) else failure
        raise error(f"cannot use {str(path)!r}: {reason}. Expected a regular file; name another one.") from failure
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise error(f"cannot use {path}: expected a regular file, got {kind}. Name a file there instead.")
    return about.st_size


def refuse_path(name: str, where: str, error: type[QkeelError] = RunDirectoryError) -> str:
    """Raises unless `name`, which a file holds, is that of an entry of one folder; returns it.

    >>> refuse_path("9f2c", "study.json")
    '9f2c'
    >>> refuse_path("../../elsewhere", "study.json")
    Traceback (most recent call last):
    qkeel.errors.RunDirectoryError: study.json names '../../elsewhere'; expected the name of an entry of its ...

    Raises: `error` for a path, for . and .., and for what no file can be called.
    """
    if re.search(r"[/\\\x00-\x1f]", name) or name.strip(". ") == "" or len(name.encode("utf-8")) > 255:
        raise error(
            f"{where} names {name[:80]!r}; expected the name of an entry of its own folder, without a path. It was not "
            "written by qkeel or was changed later; restore it."
        )
    return name


def refuse_links(folder: Path) -> None:
    """Raises if an entry of the folder of a study or run is a link: what a stranger has made could lead anywhere.

    >>> refuse_links(Path("."))

    Raises: RunDirectoryError that names the first one.
    """
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.is_symlink():
            raise RunDirectoryError(
                f"cannot use {entry}: it is a link; expected the files of a run in its own folder. Copy there what it "
                "leads to, or remove it."
            )


def read_regular(path: Path, error: type[QkeelError] = RunDirectoryError, most: int | None = MOST_BYTES) -> bytes:
    """The bytes of a regular file of at most `most` bytes; None for any number.

    >>> _ = Path("a.txt").write_bytes(b"abc")
    >>> read_regular(Path("a.txt"))
    b'abc'

    Raises: `error` for what is missing, not regular, larger, or not readable.
    """
    size = refuse_irregular(path, error)
    if size is None:
        raise error(f"{path} is missing; name a file that exists.")
    if most is not None and size > most:
        raise error(f"cannot read {path}: it has {size:,} bytes; expected at most {most:,}. It is not such a file.")
    return _read(path, size or -1, error)  # -1: files of /proc have no size


def read_start(path: Path, count: int, error: type[QkeelError] = RunDirectoryError) -> bytes:
    """The first `count` bytes of a regular file, or all where it has fewer.

    >>> _ = Path("a.txt").write_bytes(b"abc")
    >>> read_start(Path("a.txt"), 2)
    b'ab'

    Raises: `error` for what is missing, not regular, or not readable.
    """
    if refuse_irregular(path, error) is None:
        raise error(f"{path} is missing; name a file that exists.")
    return _read(path, count, error)


def _read(path: Path, count: int, error: type[QkeelError]) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(count)
    except OSError as failure:
        raise error(f"cannot read {path}: {failure.strerror or failure}. Expected a readable file.") from failure
    except MemoryError as failure:
        raise error(f"cannot read {path}: it does not fit into memory. Expected a smaller file.") from failure


# The one place where the files of a run are written: replaced as a whole, appended to, cut, synced and removed.

_PART = ".part"
_BINARY = os.O_BINARY if sys.platform == "win32" else 0
_unsynced: set[Path] = set()  # files that this process appended to since they were synced, folders with new names
_WITHOUT_SYNC = (errno.EINVAL, errno.ENOTSUP)  # some network disks sync no directory


def replace_file(path: Path, data: bytes | bytearray) -> None:
    """Writes a file so that its readers, after a loss of power too, see the old one or the new one.

    Written under another name, synced, renamed, and the directory synced. The directory must be there: one that was
    moved away while a run went on is not made a second time.

    Raises: RunDirectoryError if it cannot be written, or what is there is not a regular file.
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
    """Leaves the first `size` bytes of a file, on the disk too."""
    advice = "Expected a writable place; run the same command again to continue."
    with _reported("cut", path, advice), _opened(path, os.O_RDWR) as file:
        os.ftruncate(file, size)
        os.fsync(file)


def sync(paths: Iterable[Path]) -> None:
    """Returns once what this process appended to these files, and their names, are on the disk.

    Raises: RunDirectoryError if the disk does not take them.
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
    """Removes files, as far as they are there; they stay away after a loss of power too.

    Raises: RunDirectoryError if one cannot be removed.
    """
    for path in [path for path in paths if path.exists()]:
        with _reported("remove", path, "Expected a writable place; run the same command again to continue."):
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
        reason = f"the directory {path.parent} does not exist (any more)" if gone else error.strerror or str(error)
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
