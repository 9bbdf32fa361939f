"""Directories for cases: an empty one for each, and copies of a whole run or study that is made once."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """An empty directory that is gone afterwards."""
    place = Path(tempfile.mkdtemp(prefix="qkeel-case-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@functools.cache
def whole(make: Callable[[Path], object]) -> tuple[tuple[str, bytes], ...]:
    """The files that `make` writes into a directory, by their place in it; made once a process."""
    with scratch() as place:
        make(place)
        files = sorted(path for path in place.rglob("*") if path.is_file())
        return tuple((str(path.relative_to(place)), path.read_bytes()) for path in files)


def lay_out(files: tuple[tuple[str, bytes], ...], place: Path) -> None:
    """Writes the files into the directory."""
    for name, content in files:
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
