"""The records of a run while it trains, with bounded memory and time regardless of its length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from qkeel.errors import ShapeError
from qkeel.monitor.forecast import PlannedRates
from qkeel.monitor.history import History, number

# Records kept: a power law fits 512 points as well as 100,000, and a rule reads all of
# them.
MOST = 512
# The newest records are always kept, because rules compare the last two.
_TAIL = 2


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
        # Of the recording itself, of the values of records, and of their heads: "own:", "values:" and "heads:NAME".
        self._columns: dict[str, np.ndarray] = {}

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
        self._check(values, heads)
        # The record before the last was kept for rules that compare two; now it stays only if it is on the grid.
        self._keep(_TAIL - 1)
        rate, n = number(values.get("lr")), self._kept
        self._has_rates = self._has_rates and bool(np.isfinite(rate))
        record: dict[str, object] = {"own:index": self._seen, "own:rate": rate}
        record["own:step"] = number(values["step"])
        for name, x in values.items():
            record[f"values:{name}"] = x if type(x) is float else number(x)
        record |= {f"heads:{name}": x for name, x in heads.items()}
        for column in self._columns.values():
            column[n] = np.nan
        # Beyond float32 is infinite.
        with np.errstate(over="ignore"):
            for name, value in record.items():
                if name not in self._columns:
                    self._add_column(name, np.shape(value))  # type: ignore[arg-type]
                self._columns[name][n] = value
        self._seen, self._kept = self._seen + 1, n + 1
        if self._kept > self._most:
            self._every *= 2
            self._keep(_TAIL)

    @property
    def history(self) -> History:
        """The records so far, as views that are valid until the next append."""
        columns: dict[str, dict[str, np.ndarray]] = {
            "own": {},
            "values": {},
            "heads": {},
        }
        for key, column in self._columns.items():
            kind, _, name = key.partition(":")
            columns[kind][name] = column[: self._kept]
        return History(
            steps=columns["own"].get("step", np.zeros(0)),
            rates=columns["own"].get("rate") if self._has_rates else None,
            values=columns["values"],
            heads=columns["heads"],
            layers=self.layers,
            planned=self.planned,
        )

    def state(self) -> dict[str, np.ndarray]:
        """The records and their number, from which `load` continues."""
        counts = [self._every, self._seen, self._kept, int(self._has_rates)]
        columns = {key: x[: self._kept] for key, x in self._columns.items()}
        return {**columns, "counts": np.array(counts)}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Replaces the records with those of another Recording."""
        self._every, self._seen, self._kept, has_rates = map(int, state["counts"])
        self._has_rates, self._columns = bool(has_rates), {}
        for key, records in state.items():
            # A state of 0.1.0 has others.
            if key.startswith(("own:", "values:", "heads:")):
                self._add_column(key, records.shape[1:])
                self._columns[key][: len(records)] = records

    def __len__(self) -> int:
        """The number of appended records, whether they were kept or not."""
        return self._seen

    @property
    def last(self) -> float:
        """The step of the last record; -infinity before the first."""
        return self._columns["own:step"][self._kept - 1] if self._kept else -np.inf

    def _check(
        self, values: Mapping[str, object], heads: Mapping[str, np.ndarray]
    ) -> None:
        if not number(values.get("step")) > self.last:
            raise ShapeError(
                f"expected a record of a step after {self.last:g}, got step {values.get('step')}"
            )
        for name, of_heads in heads.items():
            shape = of_heads.shape
            if len(shape) != 2 or (self.layers and shape[0] != len(self.layers)):
                raise ShapeError(
                    f"expected {name!r} as [{len(self.layers) or 'layers'} heads], got shape {shape}"
                )
            column = self._columns.get(f"heads:{name}")
            if column is not None and column.shape[1:] != shape:
                raise ShapeError(
                    f"expected {name!r} of shape {column.shape[1:]} as before, got {shape}"
                )

    def _add_column(self, key: str, shape: tuple[int, ...]) -> None:
        """Adds a column when its name first appears. Memory of records to come is not touched."""
        dtype = np.float32 if key.startswith("heads:") else np.float64
        n_rows = max(self._most, self._kept) + 1
        self._columns[key] = np.empty((n_rows, *shape), dtype)
        self._columns[key][: self._kept + 1] = np.nan

    def _keep(self, tail: int) -> None:
        """Keeps the records on the grid and the last ones; each gets the mean rate since the record before it."""
        stays = np.arange(self._kept) >= self._kept - tail
        if self._kept:
            stays |= self._columns["own:index"][: self._kept] % self._every == 0
        if stays.all():
            return
        steps, rates = self._columns["own:step"], self._columns["own:rate"]
        # The rows before it stay what they are.
        begin = max(int(stays.argmin()) - 1, 0)
        # A dropped record's rate goes into the next one, so that the sum of rates, the clock of forecasts, is exact.
        elapsed = np.diff(steps[begin : self._kept], prepend=steps[begin])
        ticks = np.cumsum(rates[begin : self._kept] * elapsed)
        rows = np.flatnonzero(stays)[begin:]
        rates[rows[1:]] = np.diff(ticks[rows - begin]) / np.diff(steps[rows])
        self._kept = begin + len(rows)
        for column in self._columns.values():
            column[begin : self._kept] = column[rows]
