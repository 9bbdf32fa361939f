"""The directory of a run: its files, which process may write them, and how they are read after a crash.

Their formats are in `file_formats`. `monitor.sinks.RunDirectorySink` writes a watched run.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from qkeel.errors import DamagedFileError, RunDirectoryError
from qkeel.records import disk
from qkeel.records.disk import locked
from qkeel.records.file_formats import (
    Heads,
    JSONObject,
    read_heads,
    read_lines,
    read_object,
    write_json,
)

# The name of events that correct the types in the run's description
TYPES_EVENT = "layer types"

OVER = "notice over"  # the name of events that end a notice or a forecast; "rule" is its rule


def layer_types(
    about: Mapping[str, Any], events: Iterable[Mapping[str, Any]] = ()
) -> dict[str, str]:
    """Returns the type of each layer (LAYER_TYPES), from the description of a run and the events about later changes.

    Runs of earlier versions do not record types.

    >>> layer_types({"sites": [{"name": "h.0", "type": "window"}, {"name": "h.1"}]})
    {'h.0': 'window'}
    """
    types = {}
    for site in about.get("sites") or ():
        if isinstance(site, dict) and {"name", "type"} <= site.keys():
            types[str(site["name"])] = str(site["type"])
    for event in events:
        changed = event.get("types")
        if event.get("event") == TYPES_EVENT and isinstance(changed, dict):
            types |= {str(layer): str(kind) for layer, kind in changed.items()}
    return types


# The provenance of records: the system, number of cores and commit, without the name of a machine or a person.


def made_on() -> dict[str, str]:
    """Returns "system", and "commit" if the current folder is in a git repository.

    >>> sorted(made_on())[-1]
    'system'
    """
    facts = {
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    }
    command = ("git", "rev-parse", "--short=12", "HEAD")
    # Without git, or outside of a repository, there is no commit to tell of.
    with suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            facts["commit"] = done.stdout.strip()
    return facts


# A run directory contains config.json env.json metrics.jsonl heads.json heads.f32 events.jsonl last/ summary.json DONE.
# A watched model has eval.jsonl, eval_heads.json and eval_heads.f32 instead of last/; a length study also has
# extrapolation.jsonl.

# The append-only files. DONE and each checkpoint record their sizes, so that a reader detects lost bytes.
RECORDS = ("metrics.jsonl", "events.jsonl", "heads.f32", "eval.jsonl", "eval_heads.f32")
FileSizes = Mapping[str, int]


class RunStatus(StrEnum):
    """The state of a run.

    >>> RunDirectory(Path("no-such-run")).status
    <RunStatus.MISSING: 'missing'>
    """

    MISSING = "missing"
    STARTED = "started"
    FAILED = "failed"
    DONE = "done"


_STATUS_FILES = {
    "DONE": RunStatus.DONE,
    "FAILED": RunStatus.FAILED,
    "config.json": RunStatus.STARTED,
}


@dataclasses.dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files of one run. Reading never changes anything.

    >>> RunDirectory(Path("runs/a")).checkpoint.name
    'state.safetensors'
    """

    path: Path  #: path of the folder

    @property
    def status(self) -> RunStatus:
        """The state of the run. DONE takes precedence over FAILED, because a failed run may be resumed and finish."""
        for name, status in _STATUS_FILES.items():
            if (self.path / name).exists():
                return status
        return RunStatus.MISSING

    @property
    def checkpoint(self) -> Path:
        """The only checkpoint file, which is replaced atomically."""
        return self.path / "last" / "state.safetensors"

    def config(self) -> JSONObject:
        """The run's configuration."""
        return read_object(self.path / "config.json")

    def env(self) -> JSONObject:
        """The environment of the run: versions, corpus hash, command and the formula of the attention."""
        return read_object(self.path / "env.json")

    def metrics(self) -> list[JSONObject]:
        """Returns one dict per logged step, with records.STEP_FIELDS."""
        return self._lines("metrics.jsonl")

    def events(self) -> list[JSONObject]:
        """Returns the warnings and the actions of remedies, as one dict each."""
        return self._lines("events.jsonl")

    def heads(self) -> Heads:
        """Returns the values per layer and head, with names from records.HEAD_FIELDS."""
        return read_heads(self.path)

    def eval_metrics(self) -> list[JSONObject]:
        """Returns the rows of a watched model in evaluation mode, as in metrics()."""
        return self._lines("eval.jsonl")

    def eval_heads(self) -> Heads:
        """Returns the values per layer and head in evaluation mode."""
        return read_heads(self.path, "eval_heads")

    def long_contexts(self) -> list[JSONObject]:
        """Returns the results at other context lengths, as one dict per post-hoc method and length."""
        return self._lines("extrapolation.jsonl", "test_length")

    def summary(self) -> JSONObject:
        """Returns the run's row of table.csv."""
        return read_object(self.path / "summary.json")

    def failure(self) -> str:
        """Returns the error that ended the run; "" if it did not fail."""
        path = self.path / "FAILED"
        if not path.exists():
            return ""
        return disk.read_file(path).decode("utf-8", errors="replace")

    def sizes(self) -> dict[str, int]:
        """Returns the size in bytes of each append-only file."""
        paths = {name: self.path / name for name in RECORDS}
        return {name: p.stat().st_size for name, p in paths.items() if p.exists()}

    def check_complete(self) -> None:
        """Raises an error if a file of a finished run is missing, or shorter than it was when the run ended.

        Raises:
            DamagedFileError: the file is named; it was lost when the folder was copied or cleaned up.
        """
        done = self.path / "DONE"
        # Version 0.1.0 wrote an empty file.
        if not done.exists() or not done.stat().st_size:
            return
        sizes = read_object(done)
        self._check_sizes(sizes)
        described = ("env.json", "summary.json", "heads.json", "eval_heads.json")
        for name in described:
            numbers = f"{name.removesuffix('.json')}.f32"
            is_written = numbers in sizes or numbers not in RECORDS
            if is_written and not (self.path / name).exists():
                raise DamagedFileError(
                    f"{self.path / name} is missing, but the run has ended, so it was lost. Restore it, or delete {self.path} "
                    "and run again."
                )

    def _check_sizes(self, sizes: FileSizes) -> None:
        """Raises an error if a file is shorter than it was."""
        for name, written in sizes.items():
            size = self.sizes().get(name, 0)
            if size < written:
                raise DamagedFileError(
                    f"{self.path / name} has {size:,} bytes, but {written:,} bytes were written, so it was damaged. "
                    f"Restore it, or delete {self.path} and run again."
                )

    def _lines(self, name: str, key: str = "step") -> list[JSONObject]:
        """Returns the objects of a .jsonl file, each of which has a number by this name."""
        lines = list(read_lines(self.path / name))
        for number, line in enumerate(lines, start=1):
            if not isinstance(line.get(key), (int, float)):
                raise DamagedFileError(
                    f"{self.path / name}, line {number} has no {key}; expected a number. It is damaged or has a "
                    f"different format; restore it, or delete {self.path} and run again."
                )
        return lines

    def open(self, config: Mapping[str, object]) -> None:
        """Creates the directory for `config`, or checks that an existing directory has the same configuration."""
        if (self.path / "config.json").exists():
            old = self.config()
            if old != config:
                changed = differences(old, config)
                raise RunDirectoryError(
                    f"{self.path} contains a run with a different configuration (these differ: {', '.join(changed)}). "
                    "Choose another directory; nothing was changed."
                )
            return
        # Whoever claims or locks a run does so before its configuration is written.
        if self.path.exists() and any(
            not p.name.startswith(("lock", "claim.")) for p in self.path.iterdir()
        ):
            raise RunDirectoryError(
                f"{self.path} is not empty and has no config.json, so it is not a run directory. "
                "Choose another directory; nothing was changed."
            )
        disk.make_directory(self.path)
        write_json(self.path / "config.json", config)

    def finish(self, summary: Mapping[str, object]) -> None:
        """Marks the run as done after its records and summary have been written to the disk. If writing fails, the run
        is not marked."""
        self.sync()
        write_json(self.path / "summary.json", summary)
        write_json(self.path / "DONE", self.sizes())

    def sync(self) -> None:
        """Blocks until all appended data is on the disk."""
        disk.sync(self.path / name for name in RECORDS)

    def start_again(self) -> None:
        """Removes everything except extrapolation.jsonl and the configuration."""
        # DONE and the checkpoint come first, because a crash here must not leave a run that looks complete.
        described = ("heads.json", "eval_heads.json", "summary.json", "env.json")
        names = (*RECORDS, *described)
        rest = [self.path / name for name in names]
        disk.remove([self.path / "DONE", self.checkpoint, *rest])

    def cut_to(self, sizes: FileSizes) -> None:
        """Truncates the append-only files to `sizes`, so that a resumed run repeats the lost steps bit for bit.

        Raises:
            DamagedFileError: a file is shorter than specified in `sizes`.
        """
        self._check_sizes(sizes)
        for name in self.sizes():
            disk.cut(self.path / name, sizes.get(name, 0))

    @contextmanager
    def lock(self, wait: float = 0.0) -> Iterator[None]:
        """Locks the directory; the operating system releases the lock no matter how the process ends."""
        with locked(
            self.path / "lock", f"{self.path} is in use by another process", wait
        ):
            for directory in (self.path, self.checkpoint.parent):
                disk.remove_leftovers(directory)
            yield


def fresh_directory(path: Path, first: str = "") -> Path:
    """Creates `path`, or `path-2`, `path-3`, ... if it is not empty, and returns it; nothing is ever overwritten.

    If `path` is an existing empty directory, it is used.

    Args:
        path: the directory.
        first: the name of a file that is created in it, empty, in one atomic step. Two processes that begin in the same
            instant then never get the same directory, whether it existed or not.

    >>> fresh_directory(Path("made")).joinpath("note").touch()
    >>> fresh_directory(Path("made")).name
    'made-2'
    """
    for number in itertools.count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        if folder.exists() and not folder.is_dir():
            continue
        is_new = disk.make_directory(folder)
        if is_new or (number == 1 and not any(folder.iterdir())):
            if first and not disk.create(folder / first):
                # Another process was faster.
                continue
            return folder
    raise AssertionError("unreachable")


def flat(values: Mapping[str, object], under: str = "") -> dict[str, object]:
    """Returns nested values by dotted name.

    >>> flat({"optim": {"lr": 1.0}, "seed": 0})
    {'optim.lr': 1.0, 'seed': 0}
    """
    by_name: dict[str, object] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping)
        by_name |= flat(value, f"{under}{name}.") if nested else {under + name: value}
    return by_name


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Returns the keys (dotted if nested) in which two configurations differ.

    >>> differences({"optim": {"lr": 1.0}, "seed": 0}, {"optim": {"lr": 2.0}, "seed": 0})
    ['optim.lr']
    """
    a, b = flat(old), flat(new)
    return [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]
