"""The destinations of records, and a run that is read back from its directory."""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import final

import numpy as np

from qkeel import distributed as dist
from qkeel.deprecation import accepts_earlier_calls
from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    RunDirectoryError,
    caution,
    unknown,
)
from qkeel.frames import Frame
from qkeel.monitor.history import History
from qkeel.monitor.rules import Alarm, Severity
from qkeel.monitor.sample import Sample, sample_line
from qkeel.options import Term, build, parse
from qkeel.records import (
    HEAD_FIELDS,
    HeadRecorder,
    RunDirectory,
    RunStatus,
    append_line,
    disk,
    fresh_directory,
    write_json,
)
from qkeel.records.file_formats import JSONObject

# The destinations of samples, by name: a directory for `qkeel report`, the log, or a tracker.

DEFAULT_PATH = Path("qkeel-runs/watch")
KIND = "watch"
# Keys written to env.json; the other keys describe what is watched.
ENVIRONMENT = (
    "versions",
    "system",
    "commit",
    "command",
    "watcher",
)


class Sink(abc.ABC):
    """Receives what a Monitor measures.

    Every method except `require` may raise an error; the Monitor then warns once and continues without the sink.
    """

    def require(self) -> None:  # noqa: B027 - most sinks need nothing
        """Called by `qkeel.watch` before anything is measured.

        Raises: MissingLibraryError if a library that the sink needs is not installed, RunDirectoryError if its directory
            cannot be written, so that no run is lost because of it.
        """

    @abc.abstractmethod
    def open(self, about: Mapping[str, object]) -> None:
        """Called before the first sample. `about` can be written as JSON: model, sites, optimizer, cadence,
        versions."""

    @abc.abstractmethod
    def write(self, sample: Sample) -> None:
        """Receives one sample."""

    @abc.abstractmethod
    def alarm(self, alarm: Alarm) -> None:
        """Receives an alarm that the last sample raised."""

    def event(self, event: Mapping[str, object]) -> None:  # noqa: B027 - a sink may leave it out
        """Receives another event: its "step", its kind ("event") and a sentence ("text")."""

    @abc.abstractmethod
    def close(self, complete: bool) -> None:
        """Called after the last sample; `complete` is True if training ended as planned."""


@final
class RunDirectorySink(Sink):
    """Writes a run directory. Nothing on disk is overwritten: if `path` is not empty, `path-2`, `path-3`, ... is
    created.

    The directory contains config.json (kind "watch", what is watched), env.json, metrics.jsonl, heads.json, heads.f32
    and events.jsonl (alarms). Samples in evaluation mode are written separately, to eval.jsonl and eval_heads.f32;
    summary.json and DONE are written when the run is complete. If the process is killed, the directory can be read up
    to its last complete record.

    A record in heads.f32 has a fixed size: the fields are those listed in `about["fields"]`, or all of HEAD_FIELDS, and
    the layers and heads are those of the first sample. A field that appears later is reported once in events.jsonl and
    left out.

    Args:
        path: the directory.
        watcher: the command line of the `qkeel watch` process that records here, if there is one.
    """

    def __init__(self, path: str | Path = DEFAULT_PATH, watcher: str = "") -> None:
        """path: the directory. watcher: the command line of a `qkeel watch` process that records here."""
        if not isinstance(path, (str, Path)):
            raise InvalidTypeError(
                f"expected a path for the records, got {type(path).__name__}"
            )
        self.asked, self.watcher = Path(path), watcher
        # a script may change its folder later.
        self._home = Path.cwd()
        self.path: Path | None = None
        self._fields: tuple[str, ...] = ()
        self._heads: dict[str, HeadRecorder] = {}
        self._left_out: set[str] = set()
        self._summary: dict[str, float] = {}
        self._warned = False

    def require(self) -> None:
        """Raises an error before training if the process that writes could not create the directory.

        Raises: RunDirectoryError if nothing can be written there.
        """
        if dist.rank() == 0:
            disk.check_writable(self._home / self.asked)

    def open(self, about: Mapping[str, object]) -> None:
        """Creates the directory; config.json is written last, so that a directory that contains it is complete."""
        self.path = path = fresh_directory(
            self._home / self.asked, first="events.jsonl"
        )
        fields = about.get("fields")
        self._fields = tuple(
            fields if isinstance(fields, (list, tuple)) else HEAD_FIELDS
        )
        self._summary = {"steps": 0, "samples": 0, "max_logit": math.nan, "alarms": 0}
        about = {**about, "watcher": self.watcher} if self.watcher else about
        write_json(
            path / "env.json",
            {name: about[name] for name in ENVIRONMENT if name in about},
        )
        watched = {
            name: value for name, value in about.items() if name not in ENVIRONMENT
        }
        write_json(path / "config.json", {"kind": KIND, **watched})

    def write(self, sample: Sample) -> None:
        """Writes one line of metrics and one record of heads. A record that cannot be written, as on a disk that is
        full for a moment, is lost, which one warning says; the next ones are tried again."""
        path = self._place()
        line = {
            **{name: float(value) for name, value in sample.numbers.items()},
            "step": sample.step,
        }
        try:
            append_line(
                path / ("metrics.jsonl" if sample.phase == "train" else "eval.jsonl"),
                line,
            )
            self._write_heads(path, sample)
        except RunDirectoryError as error:
            # Without the directory no later record can be written either, so the sink is dropped.
            if not path.is_dir():
                raise
            if not self._warned:
                self._warned = True
                caution(
                    f"the record of step {sample.step:,} is lost: {error.__cause__ or error}. Later records are "
                    f"written to {path} as soon as that is possible; training continues"
                )
            return
        if sample.phase == "train":
            peak = np.fmax(self._summary["max_logit"], sample.overall("max_logit"))
            self._summary |= {
                "steps": sample.step,
                "max_logit": float(peak),
                "samples": self._summary["samples"] + 1,
            }

    def _write_heads(self, path: Path, sample: Sample) -> None:
        if not sample.heads:
            return
        if sample.phase not in self._heads:
            name = "heads" if sample.phase == "train" else "eval_heads"
            size = (
                len(sample.layers),
                max(values.shape[1] for values in sample.heads.values()),
            )
            self._heads[sample.phase] = HeadRecorder(
                path, self._fields, *size, layers=sample.layers, name=name
            )
        self._heads[sample.phase].append(sample.step, sample.heads)
        for name in sample.heads.keys() - set(self._fields) - self._left_out:
            self._left_out.add(name)
            text = f"{name} was not announced at the start: it is not recorded"
            append_line(path / "events.jsonl", {"step": sample.step, "event": text})

    def alarm(self, alarm: Alarm) -> None:
        """Writes one event."""
        append_line(
            self._place() / "events.jsonl",
            {"event": "alarm", **dataclasses.asdict(alarm)},
        )
        self._summary["alarms"] += 1

    def event(self, event: Mapping[str, object]) -> None:
        """Writes one event."""
        append_line(self._place() / "events.jsonl", event)

    def close(self, complete: bool) -> None:
        """Syncs the records to disk; writes the summary and DONE if the run is complete."""
        if self.path is None:
            return
        if complete:
            RunDirectory(self.path).finish(
                {"kind": KIND, **self._summary, "status": "done"}
            )
        else:
            RunDirectory(self.path).sync()

    def _place(self) -> Path:
        if self.path is None:
            raise RunDirectoryError(
                f"nothing can be written to {self.asked} before it is opened; call open(about)"
            )
        return self.path


_LEVELS = {
    Severity.NOTICE: logging.INFO,
    Severity.ALARM: logging.WARNING,
    Severity.CRITICAL: logging.ERROR,
}


@final
class LoggingSink(Sink):
    """Logs one line per sample to the standard library's logger named `logger`, and alarms as warnings and errors."""

    def __init__(self, logger: str = "qkeel") -> None:
        self.logger = logging.getLogger(logger)

    def open(self, about: Mapping[str, object]) -> None:
        """Logs what is watched."""
        sites = about.get("sites")
        n_sites = len(sites) if isinstance(sites, (list, tuple)) else 0
        self.logger.info(
            "watching %d attention layers of %s", n_sites, about.get("model")
        )

    def write(self, sample: Sample) -> None:
        """Logs one line."""
        self.logger.info("%s", sample_line(sample))

    def alarm(self, alarm: Alarm) -> None:
        """Logs one line, at the level of the alarm's severity."""
        self.logger.log(_LEVELS[alarm.severity], "%s", alarm)

    def event(self, event: Mapping[str, object]) -> None:
        """Logs one line."""
        self.logger.warning("%s", event.get("text", event))

    def close(self, complete: bool) -> None:
        """Does nothing, because there is nothing to close."""


# Name -> where its class is defined; a module is imported when its sink is created.
SINKS = {
    "csv": "qkeel.integrations.trackers:CSVSink",
    "directory": "qkeel.monitor.sinks:RunDirectorySink",
    "log": "qkeel.monitor.sinks:LoggingSink",
    "mlflow": "qkeel.integrations.trackers:MLflowSink",
    "tensorboard": "qkeel.integrations.trackers:TensorBoardSink",
    "trackio": "qkeel.integrations.trackers:TrackioSink",
    "wandb": "qkeel.integrations.trackers:WandbSink",
}


def sink(text: str) -> Sink:
    """Builds one sink from a string.

    Args:
        text: a name from SINKS with its options, as in `wandb:project=gpt,mode=offline`.

    Raises:
        UnknownNameError: a name or an option does not exist.
        InvalidValueError: `text` names several sinks.

    >>> sink("directory:path=runs/a").asked.as_posix()
    'runs/a'
    """
    terms = parse(text)
    if len(terms) != 1:
        raise InvalidValueError(
            f"expected one sink, got {len(terms)} in {text!r}; give them one by one"
        )
    return _build(terms[0])


def sinks(text: str) -> tuple[Sink, ...]:
    """Builds sinks from names joined by `+`, or from the path of a run directory, which contains a / or begins with a
    dot.

    >>> [type(one).__name__ for one in sinks("log+directory:path=runs/a")]
    ['LoggingSink', 'RunDirectorySink']
    >>> sinks("runs/a")[0].asked.as_posix()
    'runs/a'
    """
    place = text.partition(":")[0]
    if (
        os.path.splitdrive(text)[0]
        or place.startswith(".")
        or any(c in place for c in "/\\")
    ):
        return (RunDirectorySink(text),)
    return tuple(map(_build, parse(text)))


def _build(term: Term) -> Sink:
    if term.name not in SINKS:
        error = unknown("sink", term.name, SINKS)
        error.args = (
            f"{error}. To use a run directory of that name, write ./{term.name}",
        )
        raise error
    module, _, name = SINKS[term.name].partition(":")
    cls: type[Sink] = vars(importlib.import_module(module))[name]
    return build(
        term.name, cls, {key: str(value) for key, value in term.options.items()}
    )


# A recorded run that is read back: its configuration, its tables and its figures.


@final
class Run:
    """A run directory of `qkeel.watch`, `qkeel watch` or `qkeel run`, as tables; returned by `qkeel.load`.

    Everything is read on first access, and nothing is changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directory = RunDirectory(path)
        if (
            self.status is RunStatus.MISSING
            or not {"kind", "optim"} & self.config.keys()
        ):
            raise RunDirectoryError(
                f"expected the directory of a run, but {path} has no config.json of a run. Give a directory that "
                "qkeel.watch, qkeel watch or qkeel run created; the runs of a study are the folders in it."
            )

    @property
    def status(self) -> RunStatus:
        """The state of the run: started, done or failed."""
        return self.directory.status

    @functools.cached_property
    def config(self) -> JSONObject:
        """The configuration of the watched or trained model."""
        return self.directory.config()

    @functools.cached_property
    def env(self) -> JSONObject:
        """The versions and the command."""
        return self.directory.env()

    @functools.cached_property
    def history(self) -> History:
        """The training records as arrays, in the form that alarm rules read."""
        return History.read(self.directory)

    @functools.cached_property
    def _evaluated(self) -> History:
        return History.read(self.directory, phase="eval")

    @property
    def steps(self) -> Frame:
        """One row per training record, with the values for the whole model."""
        return self.history.frame("steps")

    @property
    def heads(self) -> Frame:
        """One row per training record, layer and head."""
        return self.history.frame()

    @property
    def eval_steps(self) -> Frame:
        """Like `steps`, but for passes in evaluation mode."""
        return self._evaluated.frame("steps")

    @property
    def eval_heads(self) -> Frame:
        """Like `heads`, but for passes in evaluation mode."""
        return self._evaluated.frame()

    @functools.cached_property
    def events(self) -> list[JSONObject]:
        """Alarms and other events, one dict each."""
        return self.directory.events()

    def __repr__(self) -> str:
        steps = self.history.steps
        last = f" to step {int(steps[-1]):,}" if len(steps) else ""
        span = f"{len(steps):,} records{last}"
        return f"<Run {self.path}: {self.config.get('model', '') or 'run'}, {span}, {self.status}>"


@accepts_earlier_calls()
def load(path: str | Path) -> Run:
    """Reads a run directory as tables; `load(path).heads.to_pandas()` has one row per step, layer and head.

    Args:
        path: a directory written by `qkeel.watch`, `qkeel watch` or `qkeel run`; the run may be unfinished.

    Raises: RunDirectoryError if the directory does not contain a run; DamagedFileError when a file is read that has
        changed since it was written.

    >>> from qkeel.records import write_json
    >>> write_json(Path("config.json"), {"kind": "watch", "model": "GPT"})
    >>> load(".")
    <Run .: GPT, 0 records, started>
    """
    return Run(Path(path))
