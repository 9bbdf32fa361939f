"""The folder of compiled libraries, and which of its files may be loaded: those that no other user could have written.

Everything is asked of descriptors, never of names: what was checked is what is loaded, if files are renamed meanwhile.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_DIGEST = hashlib.sha256().digest_size


class BuildError(RuntimeError):
    """There is no compiled library, for the reason that the message gives."""


def cache_folder() -> Path:
    """Returns QKEEL_NATIVE_CACHE, or qkeel/native in the user's cache."""
    own = os.environ.get("QKEEL_NATIVE_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qkeel" / "native"


@contextmanager
def opened_folder(make: bool) -> Iterator[int]:
    """Lends a descriptor of the cache's folder; `make` makes it, and what is missing above it, for this user alone.

    Raises:
        BuildError: the folder is a link, or others own it or can write to it. OSError: it can't be opened.
    """
    path = cache_folder()
    if path.is_symlink():
        raise BuildError(f"its cache {path} is a link; QKEEL_NATIVE_CACHE takes the folder itself")
    if make:
        for missing in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check_owner(os.fstat(folder), f"its cache {path}")
        yield folder
    finally:
        os.close(folder)


def opened_library(folder: int, name: str) -> int | None:
    """Returns a descriptor of a library in the folder, for the caller to close; None where it is missing or torn.

    Raises:
        BuildError: in its place is a link, a folder or a device, or others own the file or can write to it.
    """
    where = f"the file {cache_folder() / name}"
    try:
        # A pipe in its place would otherwise wait for a writer.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise BuildError(f"{where} is a link; delete it") from None
        raise
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise BuildError(f"{where} is no regular file; delete it")
        _check_owner(found, where)
        with open(file, "rb", closefd=False) as content:
            sound = _sound(content.read())
    except BaseException:
        os.close(file)
        raise
    if sound:
        return file
    os.close(file)
    return None


def sealed(content: bytes) -> bytes:
    """A library with its checksum behind it, where a loader reads nothing."""
    return content + hashlib.sha256(content).digest()


def _sound(content: bytes) -> bool:
    """Returns whether the file is what the compiler wrote: loading a torn one could end the interpreter."""
    whole, digest = content[:-_DIGEST], content[-_DIGEST:]
    return bool(whole) and hashlib.sha256(whole).digest() == digest


def _check_owner(found: os.stat_result, what: str) -> None:
    """Raises where users other than this one and root could have put code there for this process to run."""
    if found.st_uid not in (0, os.geteuid()):
        raise BuildError(
            f"{what} belongs to user {found.st_uid}, who could put any code there; "
            "delete it, or give QKEEL_NATIVE_CACHE a folder of your own"
        )
    if found.st_mode & _BY_OTHERS:
        raise BuildError(
            f"{what} can be written by other users (mode {stat.S_IMODE(found.st_mode):04o}), who could put any code "
            "there; delete it, or give QKEEL_NATIVE_CACHE a folder of your own"
        )
