"""Regular files: what alone is read and written; pipes, devices, folders and loops of links are refused first."""

from __future__ import annotations

import re
import stat
from pathlib import Path

from qkeel.errors import QkeelError, RunDirectoryError

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
        raise error(f"{path} is missing; expected a file that can be read. Restore it, or name one that exists.")
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
        raise error(f"{path} is missing; expected a file that can be read. Restore it, or name one that exists.")
    return _read(path, count, error)


def _read(path: Path, count: int, error: type[QkeelError]) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(count)
    except OSError as failure:
        raise error(f"cannot read {path}: {failure.strerror or failure}. Expected a readable file.") from failure
    except MemoryError as failure:
        raise error(f"cannot read {path}: it does not fit into memory. Expected a smaller file.") from failure
