"""The records of a run so far, as arrays that rules read, whether they come from a live run, a run directory or a test;
and those of a run while it trains, with bounded memory and time regardless of its length."""

from __future__ import annotations

import dataclasses
import itertools
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Self, final, get_args

import numpy as np

from qkeel.errors import ShapeError, unknown
from qkeel.frames import Foreign, Frame, heads_frame, steps_frame
from qkeel.monitor.forecast import PlannedRates
from qkeel.records import (
    Heads,
    RunDirectory,
    common_steps,
    layer_types,
    layer_values,
)

Rows = Literal["heads", "steps"]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class RecordPlace:
    """A place in the records: a recorded name, a layer, and a head or the whole layer."""

    name: str
    layer: int
    head: int | None

    def of(self, series: np.ndarray) -> np.ndarray:
        """Returns [n], the values of [n layers heads] at this place."""
        return series[:, self.layer, self.head]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class History:
    """Records 0..n-1 of a run.

    steps: the steps [n]. rates: the learning rates [n], or None.
    values: name -> [n] for names in records.STEP_FIELDS, NaN where not measured.
    heads: name -> [n layers heads] for names in records.HEAD_FIELDS, NaN where a layer has fewer heads.
    layers: the names of the layers. planned: the planned learning rates, if known.
    types: layer -> its type (capture.visible_pattern), where it is known. phase: whether the records come from
    training or, if the model was never observed in training, from evaluation. limits: layer -> the clip or cap that is
    active there, in words.
    """

    steps: np.ndarray
    rates: np.ndarray | None = None
    values: Mapping[str, np.ndarray]
    heads: Mapping[str, np.ndarray]
    layers: tuple[str, ...] = ()
    planned: PlannedRates | None = None
    phase: Literal["train", "eval"] = "train"
    types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limits: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    @classmethod
    def of(
        cls,
        metrics: Sequence[Mapping[str, Any]],
        heads: Heads | None = None,
        layers: Sequence[str] = (),
        *,
        planned: PlannedRates | None = None,
        types: Mapping[str, str] | None = None,
    ) -> Self:
        """Builds the history from RunDirectory.metrics() and .heads(); steps that appear in only one of them are left
        out."""
        heads = heads or Heads(np.zeros(0), {})
        metrics, heads = common_steps(metrics, heads)
        names = dict.fromkeys(name for line in metrics for name in line)
        values = {
            name: np.array([number(line.get(name)) for line in metrics])
            for name in names
        }
        steps = values.get("step", np.zeros(0))
        if (np.diff(steps) <= 0).any():
            raise ShapeError(
                "expected records in increasing order of steps, each step once"
            )
        rates = values.get("lr")
        # The clock is a sum of rates, and one that is missing would leave all of it unknown.
        if rates is not None and not np.isfinite(rates).all():
            rates = None
        return cls(
            steps=steps,
            rates=rates,
            values=values,
            heads=heads.values,
            layers=tuple(layers),
            planned=planned,
            types=types or {},
        )

    @classmethod
    def read(
        cls,
        run: RunDirectory,
        *,
        planned: PlannedRates | None = None,
        phase: Literal["train", "eval"] = "train",
    ) -> Self:
        """Reads the history of a recorded run, of training or of the passes that were not trained."""
        described = (run.path / "config.json").exists()
        types = layer_types(run.config(), run.events()) if described else {}
        lines, heads = run.metrics(), run.heads()
        if phase == "eval":
            lines, heads = run.eval_metrics(), run.eval_heads()
        history = cls.of(lines, heads, heads.layers, planned=planned, types=types)
        return dataclasses.replace(history, phase=phase)

    def frame(self, rows: Rows = "heads") -> Frame:
        """The records as a table: one row per step, layer and head, or one per step. If layer types are known, rows of
        heads have a column for the type."""
        if rows == "heads":
            return heads_frame(self.steps, self.layers, self.heads, self.types)
        if rows != "steps":
            raise unknown("rows of a frame", rows, get_args(Rows))
        return steps_frame(self.steps, self.values)

    def to_pandas(self, rows: Rows = "heads") -> Foreign:
        """The same table as a pandas.DataFrame."""
        return self.frame(rows).to_pandas()

    def __repr__(self) -> str:
        span = (
            f", steps {self.steps[0]:,.0f} to {self.steps[-1]:,.0f}"
            if len(self)
            else ""
        )
        return f"<History of {len(self):,} records{span}: {len(self.layers)} layers, {len(self.heads)} numbers per head>"

    def upto(self, n: int) -> History:
        """Returns the history of the first n records, as known at that time."""
        return dataclasses.replace(
            self,
            steps=self.steps[:n],
            rates=None if self.rates is None else self.rates[:n],
            values={name: v[:n] for name, v in self.values.items()},
            heads={name: v[:n] for name, v in self.heads.items()},
        )

    def series(self, name: str) -> np.ndarray | None:
        """Returns [n layers heads] for a name; a number that is not recorded per head has shape [n 1 1]."""
        if name in self.heads:
            return self.heads[name]
        return self.values[name][:, None, None] if name in self.values else None

    def by_layer(self, name: str) -> np.ndarray | None:
        """Returns [n layers]: a head field aggregated over heads, or a field of records.BLOCK_FIELDS;
        None if it was not recorded."""
        return layer_values(name, self.layers, self.values, self.heads)

    def where(self, place: RecordPlace) -> tuple[str | None, int | None]:
        """The layer's name and the head; None, None if the name was not recorded per head."""
        if place.name not in self.heads:
            return None, None
        return (
            self.layers[place.layer] if self.layers else f"layer {place.layer}"
        ), place.head


def number(value: object) -> float:
    """Returns a recorded number as it is and NaN for anything else, such as null for a loss that was not evaluated."""
    return float(value) if isinstance(value, numbers.Real) else np.nan


# Records kept: a power law fits 512 points as well as 100,000, and a rule reads all of
# them.
MOST = 512
# The newest records are always kept, because rules compare the last two.
_TAIL = 2
_KINDS = ("own", "values", "heads")


@final
class Recording:
    """The records of a run so far. It keeps all records up to `most`; beyond that, every 2nd, 4th, 8th …, and always
    the first and the last two.

    Thinning keeps the learning-rate clock exact, because the rate of a dropped record is merged into the next record
    that is kept.

    layers: the names of the layers, in the order of the first axis of `heads`. planned: the learning rates of the run,
    if known. most: the number of records to keep, at least 4.
    """

    def __init__(
        self,
        layers: Sequence[str] = (),
        *,
        planned: PlannedRates | None = None,
        most: int = MOST,
    ) -> None:
        self.layers = tuple(layers)
        self.planned = planned
        self._most = max(4, most)
        # Records on the grid of every n-th, and the newest ones, are kept of those that were seen.
        self._every = 1
        self._seen = self._kept = 0
        self._has_rates = True
        # By name, those of the recording itself, of the values of records, and of their heads.
        self._columns: dict[str, dict[str, np.ndarray]] = {kind: {} for kind in _KINDS}

    def append(
        self,
        values: Mapping[str, object],
        heads: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Adds the record of a step, which must come after the last recorded step.

        values: at least "step"; numbers with names in records.STEP_FIELDS; anything that is not a number counts as not
        measured. heads: name -> [layers heads] for names in records.HEAD_FIELDS, NaN where a layer has fewer heads.
        Records may have different names; a missing value is NaN.

        Raises: ShapeError if the step does not come after the last recorded step, or if a shape differs from that in
            the previous record.
        """
        heads = {name: np.asarray(x) for name, x in (heads or {}).items()}
        if not number(values.get("step")) > self.last:
            raise ShapeError(
                f"expected a record of a step after {self.last:g}, got step {values.get('step')}"
            )
        for name, of_heads in heads.items():
            column = self._columns["heads"].get(name)
            # Another shape might broadcast, so that one layer's numbers would stand for all.
            if column is not None and column.shape[1:] != of_heads.shape:
                raise ShapeError(
                    f"expected {name!r} of shape {column.shape[1:]} as before, got {of_heads.shape}"
                )
        # The record before the last was kept for rules that compare two; now it stays only if it is on the grid.
        self._keep(_TAIL - 1)
        rate, n = number(values.get("lr")), self._kept
        self._has_rates = self._has_rates and bool(np.isfinite(rate))
        own = {"index": self._seen, "rate": rate, "step": number(values["step"])}
        record: tuple[Mapping[str, object], ...] = (own, values, heads)
        # Beyond float32 is infinite.
        with np.errstate(over="ignore"):
            for (kind, columns), of_kind in zip(self._columns.items(), record):
                for name in columns.keys() - of_kind.keys():
                    columns[name][n] = np.nan
                for name, value in of_kind.items():
                    if kind != "heads" and type(value) not in (float, int):
                        value = number(value)
                    if name not in columns:
                        self._add_column(kind, name, np.shape(value))  # type: ignore[arg-type]
                    columns[name][n] = value
        self._seen, self._kept = self._seen + 1, n + 1
        if self._kept > self._most:
            self._every *= 2
            self._keep(_TAIL)

    @property
    def history(self) -> History:
        """The records so far, as views that are valid until the next append."""
        n = self._kept
        own, values, heads = [
            {name: column[:n] for name, column in columns.items()}
            for columns in self._columns.values()
        ]
        return History(
            steps=own.get("step", np.zeros(0)),
            rates=own.get("rate") if self._has_rates else None,
            values=values,
            heads=heads,
            layers=self.layers,
            planned=self.planned,
        )

    def state(self) -> dict[str, np.ndarray]:
        """The records and their number, from which `load` continues."""
        counts = [self._every, self._seen, self._kept, int(self._has_rates)]
        columns = {
            f"{kind}:{name}": x[: self._kept]
            for kind, of_kind in self._columns.items()
            for name, x in of_kind.items()
        }
        return {**columns, "counts": np.array(counts)}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Replaces the records with those of another Recording, thinned if there are more than this one keeps."""
        self._every, self._seen, self._kept, has_rates = map(int, state["counts"])
        self._has_rates, self._columns = bool(has_rates), {kind: {} for kind in _KINDS}
        for key, records in state.items():
            kind, _, name = key.partition(":")
            # A state of 0.1.0 has others.
            if kind in _KINDS:
                self._add_column(kind, name, records.shape[1:])
                self._columns[kind][name][: len(records)] = records
        while self._kept > self._most:
            self._every *= 2
            self._keep(_TAIL)

    def __len__(self) -> int:
        """The number of appended records, whether they were kept or not."""
        return self._seen

    @property
    def last(self) -> float:
        """The step of the last record; -infinity before the first."""
        return self._columns["own"]["step"][self._kept - 1] if self._kept else -np.inf

    def _add_column(self, kind: str, name: str, shape: tuple[int, ...]) -> None:
        """Adds a column when its name first appears. Memory of records to come is not touched."""
        dtype = np.float32 if kind == "heads" else np.float64
        n_rows = max(self._most, self._kept) + 1
        column = np.empty((n_rows, *shape), dtype)
        column[: self._kept + 1] = np.nan
        self._columns[kind][name] = column

    def _keep(self, tail: int) -> None:
        """Keeps the records on the grid and the last ones; each gets the mean rate since the record before it."""
        stays = np.arange(self._kept) >= self._kept - tail
        if self._kept:
            stays |= self._columns["own"]["index"][: self._kept] % self._every == 0
        if stays.all():
            return
        steps, rates = self._columns["own"]["step"], self._columns["own"]["rate"]
        # The rows before it stay what they are.
        begin = max(int(stays.argmin()) - 1, 0)
        # A dropped record's rate goes into the next one, so that the sum of rates, the clock of forecasts, is exact.
        elapsed = np.diff(steps[begin : self._kept], prepend=steps[begin])
        ticks = np.cumsum(rates[begin : self._kept] * elapsed)
        rows = np.flatnonzero(stays)[begin:]
        rates[rows[1:]] = np.diff(ticks[rows - begin]) / np.diff(steps[rows])
        self._kept = begin + len(rows)
        for column in itertools.chain(*map(dict.values, self._columns.values())):
            column[begin : self._kept] = column[rows]


def thinned(
    state: Mapping[str, np.ndarray], names: Collection[str], n_bytes: int
) -> dict[str, np.ndarray]:
    """The state of a Recording with only these numbers of heads, and thinned to about `n_bytes`."""
    columns = {
        key: x
        for key, x in state.items()
        if not key.startswith("heads:") or key.removeprefix("heads:") in names
    }
    record = sum(x[:1].nbytes for key, x in columns.items() if key != "counts")
    recording = Recording(most=n_bytes // max(record, 1))
    recording.load(columns)
    return recording.state()
