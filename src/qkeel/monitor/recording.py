"""The records of a run while it trains, with bounded memory and time regardless of its length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, final

import numpy as np

from qkeel.errors import ShapeError
from qkeel.monitor.history import History, PlannedRates, number

# Records kept: a power law fits 512 points as well as 100,000, and a rule reads all of
# them.
MOST = 512
# The newest records are always kept, because rules compare the last two.
_TAIL = 2

# Columns of the recording itself, of the values of a record, and of its heads.
Kind = Literal["own", "values", "heads"]


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
        self._every = 1
        self._seen = self._kept = 0
        self._has_rates = True
        self._columns: dict[
            tuple[Kind, str], np.ndarray
        ] = {}  # [room …] each, NaN behind the last record
        self._room = 4

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
        row = self._next_row()
        step, rate = number(values["step"]), number(values.get("lr"))
        self._has_rates = self._has_rates and bool(np.isfinite(rate))
        own: dict[str, object] = {"index": self._seen, "step": step, "rate": rate}
        kinds: dict[Kind, Mapping[str, object]] = {"own": own, "values": values}
        for kind, entries in kinds.items():
            for name, value in entries.items():
                column = self._columns.get((kind, name))
                column = self._column(kind, name) if column is None else column
                column[row] = value if type(value) is float else number(value)
        # Beyond float32 is infinite.
        with np.errstate(over="ignore"):
            for name, of_heads in heads.items():
                column = self._columns.get(("heads", name))
                if column is None:
                    column = self._column("heads", name, of_heads.shape)
                column[row] = of_heads
        self._seen += 1
        if self._kept > self._most:
            self._thin()

    @property
    def history(self) -> History:
        """The records so far, as views that are valid until the next append."""
        columns: dict[Kind, dict[str, np.ndarray]] = {
            "own": {},
            "values": {},
            "heads": {},
        }
        for (kind, name), column in self._columns.items():
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
        columns = {
            f"{kind}:{name}": column[: self._kept]
            for (kind, name), column in self._columns.items()
        }
        return {
            **columns,
            "counts": np.array(
                [self._every, self._seen, self._kept, int(self._has_rates)]
            ),
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Replaces the records with those of another Recording."""
        self._every, self._seen, self._kept, has_rates = (
            int(count) for count in state["counts"]
        )
        self._has_rates = bool(has_rates)
        self._columns, self._room = {}, max(4, self._kept)
        for key, records in state.items():
            kind, _, name = key.partition(":")
            # a state of 0.1.0 has others.
            if kind in ("own", "values", "heads"):
                self._column(kind, name, records.shape[1:])[: len(records)] = records  # type: ignore[arg-type]

    def __len__(self) -> int:
        """The number of appended records, whether they were kept or not."""
        return self._seen

    def _check(
        self, values: Mapping[str, object], heads: Mapping[str, np.ndarray]
    ) -> None:
        last = self._column("own", "step")[self._kept - 1] if self._kept else -np.inf
        if not number(values.get("step")) > last:
            raise ShapeError(
                f"expected a record of a step after {last:g}, got step {values.get('step')}"
            )
        for name, of_heads in heads.items():
            shape = of_heads.shape
            if len(shape) != 2 or (self.layers and shape[0] != len(self.layers)):
                raise ShapeError(
                    f"expected {name!r} as [{len(self.layers) or 'layers'} heads], got shape {shape}"
                )
            column = self._columns.get(("heads", name))
            if column is not None and column.shape[1:] != shape:
                raise ShapeError(
                    f"expected {name!r} of shape {column.shape[1:]} as before, got {shape}"
                )

    def _column(self, kind: Kind, name: str, shape: tuple[int, ...] = ()) -> np.ndarray:
        """Returns a column, which is added when its name first appears."""
        column = self._columns.get((kind, name))
        if column is None:
            dtype = np.float32 if kind == "heads" else np.float64
            column = self._columns[kind, name] = np.full(
                (self._room, *shape), np.nan, dtype
            )
        return column

    def _next_row(self) -> int:
        """Returns the index of the new record, after the last; if the record before the last is dropped, the last first
        takes its place."""
        # The record before the last was kept for rules that compare two; now it stays only if it is on the grid.
        n = self._kept
        if n >= _TAIL and self._column("own", "index")[n - _TAIL] % self._every:
            self._keep(np.delete(np.arange(n), n - _TAIL))
            n -= 1
        self._kept = n + 1
        if n == self._room:
            self._room = min(2 * n, self._most + 1)
            for key, column in self._columns.items():
                self._columns[key] = np.full(
                    (self._room, *column.shape[1:]), np.nan, column.dtype
                )
                self._columns[key][:n] = column
        for column in self._columns.values():
            column[n] = np.nan
        return n

    def _thin(self) -> None:
        """Drops every second record of those that were kept."""
        self._every *= 2
        stays = self._column("own", "index")[: self._kept] % self._every == 0
        stays[-_TAIL:] = True
        self._keep(np.flatnonzero(stays))

    def _keep(self, rows: np.ndarray) -> None:
        """Keeps these rows only; each gets the mean rate since the row before it."""
        steps, rates = (
            self._column("own", "step")[: self._kept],
            self._column("own", "rate"),
        )
        # The rows before it stay what they are.
        first = int(np.flatnonzero(np.diff(rows, prepend=-1) > 1)[0])
        begin = max(first - 1, 0)
        # A dropped record's rate goes into the next one, so that the sum of rates, the clock of forecasts, is exact.
        ticks = np.cumsum(
            rates[begin : self._kept] * np.diff(steps[begin:], prepend=steps[begin])
        )
        kept = rows[begin:]
        rates[kept[1:]] = np.diff(ticks[kept - begin]) / np.diff(steps[kept])
        self._kept = len(rows)
        for column in self._columns.values():
            column[begin : len(rows)] = column[kept]
