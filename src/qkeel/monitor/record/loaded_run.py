"""A recorded run, read back: its configuration, its tables, its figures."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from qkeel.errors import RunDirectoryError
from qkeel.frames import Foreign, Frame, heads_frame, steps_frame
from qkeel.frames.markup import Markup, tag
from qkeel.monitor.alarms.history import History, number
from qkeel.records import Heads, RunDirectory, RunStatus
from qkeel.records.files import JSONObject


@final
class Run:
    """A run directory of `qkeel.watch`, `qkeel watch` or `qkeel run`, as tables; made by `qkeel.load`.

    Everything is read when it is first asked for, and nothing is changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directory = RunDirectory(path)
        if self.status is RunStatus.MISSING or not {"kind", "optim"} & self.config.keys():
            raise RunDirectoryError(
                f"expected the directory of a run, but {path} has no config.json of one. Give a directory that "
                "qkeel.watch, qkeel watch or qkeel run made; those of a study are the folders in it."
            )

    @property
    def status(self) -> RunStatus:
        """The state of the run: started, done or failed."""
        return self.directory.status

    @functools.cached_property
    def config(self) -> JSONObject:
        """The configuration of what was watched or trained."""
        return self.directory.config()

    @functools.cached_property
    def env(self) -> JSONObject:
        """Versions and command."""
        return self.directory.env()

    @functools.cached_property
    def history(self) -> History:
        """The training records as arrays, as the rules of alarms read them."""
        return History.read(self.directory)

    @functools.cached_property
    def steps(self) -> Frame:
        """One row per training record: the numbers of the whole model."""
        return _steps(self.directory.metrics())

    @functools.cached_property
    def heads(self) -> Frame:
        """One row per training record, layer and head."""
        return _heads(self.directory.heads() if self._has("heads.json") else None)

    @functools.cached_property
    def eval_steps(self) -> Frame:
        """The same as `steps`, of passes in evaluation mode."""
        return _steps(self.directory.eval_metrics())

    @functools.cached_property
    def eval_heads(self) -> Frame:
        """The same as `heads`, of passes in evaluation mode."""
        return _heads(self.directory.eval_heads() if self._has("eval_heads.json") else None)

    @functools.cached_property
    def events(self) -> list[JSONObject]:
        """Alarms and what else happened, one dict each."""
        return self.directory.events()

    def plot(self, what: str = "drift", *, field: str | None = None, ax: Foreign = None) -> Foreign:
        """Draws the run by matplotlib and returns the Axes; see `History.plot`."""
        return self.history.plot(what, field=field, ax=ax)

    def _has(self, name: str) -> bool:
        return (self.path / name).exists()

    def __repr__(self) -> str:
        n = len(self.steps)
        span = f"{n:,} records" + (f" to step {self.steps['step'][-1]:,}" if n else "")
        return f"<Run {self.path}: {self.config.get('model', '') or 'run'}, {span}, {self.status}>"

    def _repr_html_(self) -> str:
        return tag("div", {}, tag("p", {}, repr(self)), Markup(self.steps._repr_html_()))


def load(run: str | Path) -> Run:
    """Read a run directory as tables: `load(path).heads.to_pandas()` has one row per step, layer and head.

    Args:
        run: the directory that `qkeel.watch`, `qkeel watch` or `qkeel run` wrote; of an unfinished run too.

    Raises: RunDirectoryError if there is no run; DamagedFileError, when a file is read that is not as it was written.

    >>> from qkeel.records import write_json
    >>> write_json(Path("config.json"), {"kind": "watch", "model": "GPT"})
    >>> load(".")
    <Run .: GPT, 0 records, started>
    """
    return Run(Path(run))


def _steps(records: Sequence[JSONObject]) -> Frame:
    names = dict.fromkeys(name for record in records for name in record)
    values = {name: np.array([number(record.get(name)) for record in records]) for name in names}
    return steps_frame(values.get("step", np.zeros(0)), values)


def _heads(heads: Heads | None) -> Frame:
    return heads_frame(np.zeros(0), (), {}) if heads is None else heads_frame(heads.steps, heads.layers, heads.values)
