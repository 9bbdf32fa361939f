"""Disks that lose power and disks that fail, in the place of `os` and `open` in the modules of qkeel.records."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import pytest

from qkeel.records import disk, file_formats

_DIRECTORY = -1  # in the place of a file's number


class System:
    """The calls of `os`, as qkeel.records.disk makes them, and `open`, by which its neighbours read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int) -> int:
        return os.open(path, flags, mode)

    def reader(self, path: Path, mode: str) -> BinaryIO:
        return open(path, mode)  # type: ignore[return-value]


@contextlib.contextmanager
def in_place(system: System) -> Iterator[None]:
    """Lets every file of a run go through this system."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "os", system)
        for module in (file_formats, disk):
            patch.setattr(module, "open", system.reader, raising=False)
        yield


class Unsynced(System):
    """A disk of tests: what is written is not waited for."""

    def fsync(self, file: int) -> None:
        """Leaves it to the operating system."""


class Killed(BaseException):
    """As sudden as SIGKILL: nothing catches it."""


class Journal(Unsynced):
    """Does every call, and writes down what it changes: names and contents, each until it is synced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[tuple[Any, ...]] = []
        self._files: dict[Path, int] = {}
        self._sizes: dict[int, int] = {}
        self._opened: dict[int, Path | int] = {}
        self.last: int | None = None  # so many changes, then every write kills

    def flip(self, path: Path, at: int) -> None:
        """Damages a byte of a file, on the disk too."""
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)
        number = self._files[path]
        self.calls += [("write", number, at, bytes(raw[at : at + 1])), ("sync", number)]

    def open(self, path: Path, flags: int, mode: int) -> int:
        new = not path.exists()
        file = super().open(path, flags, mode)
        if path.is_dir():
            self._opened[file] = path
            return file
        if new:
            number = len(self._sizes)
            self._files[path], self._sizes[number] = number, 0
            self.calls.append(("name", path, number))
        self._opened[file] = self._files[path]
        return file

    def write(self, file: int, data: bytes | memoryview) -> int:
        if self.last is not None and len(self.calls) >= self.last:
            raise Killed
        taken, number = os.write(file, data), self._opened[file]
        assert isinstance(number, int)
        self.calls.append(("write", number, self._sizes[number], bytes(data[:taken])))
        self._sizes[number] += taken
        return taken

    def ftruncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)
        number = self._opened[file]
        assert isinstance(number, int)
        self.calls.append(("truncate", number, size))
        self._sizes[number] = size

    def fsync(self, file: int) -> None:
        super().fsync(file)
        self.calls.append(("sync", self._opened[file]))

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)
        self._files[target] = self._files.pop(source)
        self.calls.append(("rename", source, target, self._files[target]))

    def unlink(self, path: Path) -> None:
        if path.exists():
            self._files.pop(path)
            self.calls.append(("unlink", path))
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)
        self.calls.append(("name", path, _DIRECTORY))


@dataclasses.dataclass
class _Disk:
    """What is on the disk for certain, and what may be."""

    names: dict[Path, int] = dataclasses.field(default_factory=dict)
    contents: dict[int, bytes] = dataclasses.field(default_factory=dict)
    new_names: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    new_contents: dict[int, list[tuple[Any, ...]]] = dataclasses.field(default_factory=dict)


def after_power_loss(journal: Journal, count: int, keep: random.Random | bool) -> dict[str, bytes | None]:
    """The files, by their place below the root, of a disk that lost power after so many calls; None is a directory.

    Args:
        journal: what was done. count: how many of its calls.
        keep: of what was not synced: all, nothing, or by chance, each change of a name for itself, and of each write
            nothing, a part or the whole, with zeros where an earlier one is missing.
    """
    disk = _Disk()
    for call in journal.calls[:count]:
        _do(disk, call)
    for call in disk.new_names:
        if keep is True or (keep and keep.random() < 0.5):
            _rename(disk.names, call)
    for number, calls in disk.new_contents.items():
        for call in calls:
            share = 1.0 if keep is True else keep.choice([0.0, keep.random(), 1.0, 1.0]) if keep else 0.0
            disk.contents[number] = _changed(disk.contents.get(number, b""), call, share)
    there = {}
    for path, number in sorted(disk.names.items()):
        above = [p for p in path.parents if journal.root in p.parents]
        if all(disk.names.get(p) == _DIRECTORY for p in above):
            name = str(path.relative_to(journal.root))
            there[name] = None if number == _DIRECTORY else disk.contents.get(number, b"")
    return there


def _do(disk: _Disk, call: tuple[Any, ...]) -> None:
    kind = call[0]
    if kind in ("write", "truncate"):
        disk.new_contents.setdefault(call[1], []).append(call)
    elif kind != "sync":
        disk.new_names.append(call)
    elif isinstance(call[1], Path):
        for mine in [c for c in disk.new_names if c[1].parent == call[1]]:
            _rename(disk.names, mine)
            disk.new_names.remove(mine)
    else:
        for mine in disk.new_contents.pop(call[1], ()):
            disk.contents[call[1]] = _changed(disk.contents.get(call[1], b""), mine, 1.0)


def _rename(names: dict[Path, int], call: tuple[Any, ...]) -> None:
    if call[0] == "name":
        names[call[1]] = call[2]
    else:
        names.pop(call[1], None)
        if call[0] == "rename":
            names[call[2]] = call[3]


def _changed(content: bytes, call: tuple[Any, ...], share: float) -> bytes:
    if not share:
        return content
    if call[0] == "truncate":
        return content[: call[2]].ljust(call[2], b"\0")
    data = call[3][: max(1, round(share * len(call[3])))]
    return content.ljust(call[2], b"\0")[: call[2]] + data + content[call[2] + len(data) :]


class Failing(Unsynced):
    """Fails at one call, counted from 1 over all kinds; a full disk takes half of what is written, then no more."""

    NUMBERS: ClassVar = (errno.ENOSPC, errno.EIO, errno.EINTR)

    def __init__(self, at: int, number: int) -> None:
        self.at, self.number, self.count = at, number, 0

    def _due(self, fills: bool = False) -> bool:
        self.count += 1
        full = self.number == errno.ENOSPC
        return self.count == self.at or (fills and full and self.at < self.count)

    def _fail(self) -> None:
        raise OSError(self.number, os.strerror(self.number))

    def open(self, path: Path, flags: int, mode: int) -> int:
        if self._due(fills=bool(flags & os.O_CREAT) and not path.exists()):
            self._fail()
        return super().open(path, flags, mode)

    def reader(self, path: Path, mode: str) -> BinaryIO:
        if self._due():
            self._fail()
        return super().reader(path, mode)

    def write(self, file: int, data: bytes | memoryview) -> int:
        if self._due(fills=True):
            os.write(file, data[: len(data) // 2])
            self._fail()
        return os.write(file, data)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("ftruncate", "fsync", "replace", "unlink", "mkdir"):
            return super().__getattribute__(name)

        def due(*given: Any) -> None:
            if self._due():
                self._fail()
            if name != "fsync":
                getattr(os, name)(*given)

        return due

    def close(self, file: int) -> None:
        os.close(file)  # the descriptor is gone, whatever is said of it
        if self._due():
            self._fail()
