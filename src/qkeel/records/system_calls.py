"""The calls of the operating system by which the files of a run are read and written, all in one place."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from qkeel.errors import QkeelError, RunDirectoryError

_BINARY = os.O_BINARY if sys.platform == "win32" else 0


class System:
    """The calls by which the files of a run are read and written; a test puts one in its place that drops or fails."""

    def open(self, path: Path, flags: int) -> int:
        """The descriptor of a file or, to sync it, of a directory."""
        return os.open(path, flags | _BINARY, 0o644)

    def reader(self, path: Path) -> BinaryIO:
        """The file to read from."""
        return open(path, "rb")

    def write(self, file: int, data: bytes | memoryview) -> int:
        """Returns the number of bytes that were taken."""
        return os.write(file, data)

    def truncate(self, file: int, size: int) -> None:
        """Cuts the file to so many bytes."""
        os.ftruncate(file, size)

    def fsync(self, file: int) -> None:
        """Returns once the file, or the names in the directory, are on the disk."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """Gives the descriptor back."""
        os.close(file)

    def replace(self, source: Path, target: Path) -> None:
        """Renames a file over another one."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Removes a name."""
        path.unlink(missing_ok=True)

    def mkdir(self, path: Path) -> None:
        """Makes one directory."""
        path.mkdir()


SYSTEM = System()


@contextmanager
def reported(said: str, advice: str = "", error: type[QkeelError] = RunDirectoryError) -> Iterator[None]:
    """An error of the operating system as one of qkeel's: what was tried, the reason, the advice. One that is qkeel's
    already, as RunDirectoryError is both, passes."""
    try:
        yield
    except OSError as failure:
        if isinstance(failure, QkeelError):
            raise
        raise error(f"{said}: {failure.strerror or failure}{advice}") from failure
