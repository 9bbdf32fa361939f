"""A run directory: config.json env.json metrics.jsonl heads.json heads.f32 events.jsonl last/ summary.json DONE.

That of a watched model has eval.jsonl, eval_heads.json and eval_heads.f32 instead of last/; that of a length
study has extrapolation.jsonl besides.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO

from qkeel.errors import RunDirectoryError
from qkeel.records.file_fields import check_fields, check_parts
from qkeel.records.files import (
    JSONObject,
    json_line,
    make_directory,
    read_json,
    read_lines,
    remove_leftovers,
    write_json,
    write_text,
)
from qkeel.records.heads_file import Heads, cut_heads, read_heads
from qkeel.records.regular_files import read_regular, refuse_irregular


class RunStatus(StrEnum):
    """The state of a run."""

    MISSING = "missing"
    STARTED = "started"
    FAILED = "failed"
    DONE = "done"


@dataclasses.dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files of one run. Reading never changes anything."""

    path: Path

    @property
    def status(self) -> RunStatus:
        """DONE wins over FAILED: a run that failed and then went through is done."""
        if (self.path / "DONE").exists():
            return RunStatus.DONE
        if (self.path / "FAILED").exists():
            return RunStatus.FAILED
        return RunStatus.STARTED if (self.path / "config.json").exists() else RunStatus.MISSING

    @property
    def checkpoint(self) -> Path:
        """The one checkpoint file, replaced by one rename."""
        return self.path / "last" / "state.safetensors"

    def config(self) -> JSONObject:
        """The run's configuration."""
        path = self.path / "config.json"
        config = read_json(path)
        watched = isinstance(config, dict) and config.get("kind") == "watch"
        return check_parts(config, "config.json of a watched model" if watched else "config.json", str(path))

    def env(self) -> JSONObject:
        """Versions, corpus hash, command, formula in use."""
        path = self.path / "env.json"
        return check_parts(read_json(path), "env.json", str(path))

    def metrics(self) -> list[JSONObject]:
        """One dict per logged step, by records.STEP_FIELDS."""
        return self._lines("metrics.jsonl")

    def events(self) -> list[JSONObject]:
        """Warnings and what a remedy did, one dict each."""
        return self._lines("events.jsonl")

    def heads(self) -> Heads:
        """Per layer and head, by records.HEAD_FIELDS."""
        return read_heads(self.path)

    def eval_metrics(self) -> list[JSONObject]:
        """The rows of a watched model in evaluation mode, as metrics()."""
        return self._lines("eval.jsonl")

    def eval_heads(self) -> Heads:
        """Per layer and head in evaluation mode."""
        return read_heads(self.path, "eval_heads")

    def long_contexts(self) -> list[JSONObject]:
        """The results of the weights at other lengths, one dict per post-hoc method and length."""
        return self._lines("extrapolation.jsonl")

    def summary(self) -> JSONObject:
        """The run's row of table.csv."""
        path = self.path / "summary.json"
        return check_fields(read_json(path), "summary.json", str(path))

    def failure(self) -> str:
        """The error that ended the run; empty if it did not fail."""
        path = self.path / "FAILED"
        return read_regular(path).decode("utf-8", errors="replace") if path.exists() else ""

    def _lines(self, name: str) -> list[JSONObject]:
        """The lines of a .jsonl file, each checked."""
        path = self.path / name
        return [check_fields(line, name, f"{path}, line {i}") for i, line in enumerate(read_lines(path), start=1)]

    def open(self, config: Mapping[str, object]) -> None:
        """Make the directory for `config`, or check that it was made for the same one."""
        if (self.path / "config.json").exists():
            old = self.config()
            if old != config:
                changed = differences(old, config)
                raise RunDirectoryError(
                    f"{self.path} holds a run of another configuration (different: {', '.join(changed)}). "
                    "Choose another directory; nothing was changed."
                )
            return
        if self.path.exists() and any(p.name != "lock" for p in self.path.iterdir()):
            raise RunDirectoryError(
                f"{self.path} is not empty and holds no config.json, so it is not a run directory. "
                "Choose another directory; nothing was changed."
            )
        make_directory(self.path)
        write_json(self.path / "config.json", config)

    def cut_back(self, last_step: int) -> None:
        """Drops everything recorded after `last_step`, so that a resumed run repeats it bit for bit."""
        for name in ("metrics.jsonl", "events.jsonl"):
            path = self.path / name
            if refuse_irregular(path) is not None:
                kept = [record for record in self._lines(name) if record["step"] <= last_step]
                write_text(path, "".join(map(json_line, kept)))
        cut_heads(self.path, last_step)

    @contextmanager
    def lock(self, wait: float = 0.0) -> Iterator[None]:
        """Holds the directory alone; the operating system frees it when the process dies, however it dies."""
        with locked(self.path / "lock", f"{self.path} is in use by another process", wait):
            for directory in (self.path, self.checkpoint.parent):
                remove_leftovers(directory)
            yield


def fresh_directory(path: Path) -> Path:
    """Make `path`, or `path-2`, `path-3`, ... if something is in it already; nothing is ever written over.

    Made in one step each, so that two processes never get the same one; an empty directory is used.

    >>> fresh_directory(Path("made")).joinpath("note").touch()
    >>> fresh_directory(Path("made")).name
    'made-2'
    """
    for number in itertools.count(1):
        place = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            if number > 1 or not place.is_dir() or any(place.iterdir()):
                continue
        except OSError as error:
            raise RunDirectoryError(
                f"cannot make {place}: {error.strerror or error}. Expected a writable place; choose another directory."
            ) from error
        return place
    raise AssertionError("unreachable")


def differences(old: Mapping[str, object], new: Mapping[str, object], prefix: str = "") -> list[str]:
    """The keys, dotted where nested, at which two configurations differ.

    >>> differences({"optim": {"lr": 1.0}, "seed": 0}, {"optim": {"lr": 2.0}, "seed": 0})
    ['optim.lr']
    """
    found: list[str] = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(prefix + key)
    return found


@contextmanager
def locked(path: Path, message: str, wait: float = 0.0) -> Iterator[None]:
    """An exclusive advisory lock on `path`; after `wait` seconds a RunDirectoryError that names its holder."""
    refuse_irregular(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed below, the lock lives as long as it
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    with file:
        deadline = time.monotonic() + wait
        while not (held := _try_lock(file)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not held:
            file.seek(0)
            holder = file.read(20).decode("ascii", "replace").strip()
            who = f" (process {holder})" if holder else ""
            raise RunDirectoryError(f"{message}{who}. Wait for it, stop it, or choose another directory.")
        try:
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        except OSError as error:
            raise _unwritable(path.parent, error) from error
        yield


def _unwritable(folder: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"cannot write in {folder}: {error.strerror or error}. Choose a writable directory with free space."
    )


def _try_lock(file: IO[bytes]) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows has no flock; runs are still resumable, only not guarded
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
