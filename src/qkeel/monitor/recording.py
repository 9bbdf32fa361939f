"""The records of a run while it trains, with bounded memory and time regardless of its length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from qkeel.errors import ShapeError
from qkeel.monitor.history import History, PlannedRates, envelope, number

MOST = 512  # records kept: a power law fits 512 points as well as 100,000, and a rule reads all of them
_TAIL = 2  # the newest records are always kept, because rules compare the last two


@final
class _Columns:
    """Columns of one shape, stored as one array [room, columns, …] so that a record is written in one operation."""

    def __init__(self, shape: tuple[int, ...], dtype: type, room: int) -> None:
        self.places: dict[str, int] = {}
        self.array = np.empty((room, 0, *shape), dtype)
        self._last: tuple[tuple[str, ...], np.ndarray] = (), np.empty(0, dtype=np.intp)

    def at(self, names: tuple[str, ...]) -> np.ndarray:
        """Returns the indices of these columns; a column is added when its name first appears."""
        if self._last[0] != names:
            new = [name for name in names if name not in self.places]
            if new:
                self.places |= {name: len(self.places) + i for i, name in enumerate(new)}
                blank = np.full((len(self.array), len(new), *self.array.shape[2:]), np.nan, self.array.dtype)
                self.array = np.concatenate([self.array, blank], axis=1)
            self._last = names, np.array([self.places[name] for name in names], dtype=np.intp)
        return self._last[1]

    def resize(self, room: int) -> None:
        """Reserves room for this many records."""
        array = np.empty((room, *self.array.shape[1:]), self.array.dtype)
        n = min(room, len(self.array))
        array[:n], array[n:] = self.array[:n], np.nan
        self.array = array

    def upto(self, n: int) -> dict[str, np.ndarray]:
        """Returns the first n records of each column, without a copy."""
        array = self.array[:n]
        return {name: array[:, i] for name, i in self.places.items()}


@final
class Recording:
    """The records of a run so far. It keeps all records up to `most`; beyond that, every 2nd, 4th, 8th …, and always
    the first and the last two.

    Thinning keeps the learning-rate clock exact, because the rate of a dropped record is merged into the next record
    that is kept.

    layers: the names of the layers, in the order of the first axis of `heads`. planned: the learning rates of the run,
    if known. most: the number of records to keep, at least 4.
    """

    def __init__(self, layers: Sequence[str] = (), *, planned: PlannedRates | None = None, most: int = MOST) -> None:
        self.layers = tuple(layers)
        self.planned = planned
        self._most = max(4, most)
        self._every = 1
        self._seen = self._kept = 0
        self._rated = True
        # Kinds: own, values, heads, tops (the largest value over all heads). Columns of heads are grouped by shape.
        self._columns: dict[tuple[str, tuple[int, ...]], _Columns] = {}
        self._room = 4
        # The names and shapes of the record before, and the names by shape.
        self._form: tuple[tuple[tuple[str, object], ...], list[tuple[str, ...]]] = (), []

    def append(self, values: Mapping[str, object], heads: Mapping[str, np.ndarray] | None = None) -> None:
        """Adds the record of a step, which must come after the last recorded step.

        values: at least "step"; numbers with names in records.STEP_FIELDS; anything that is not a number counts as not
        measured. heads: name -> [layers heads] for names in records.HEAD_FIELDS, NaN where a layer has fewer heads.
        Records may have different names; a missing value is NaN.

        Raises: ShapeError if the step does not come after the last recorded step, or if a shape differs from that in
            the previous record.
        """
        heads = {} if heads is None else heads
        self._check_step(values)
        form = tuple([(n, x.shape if isinstance(x, np.ndarray) else np.shape(x)) for n, x in heads.items()])
        if form != self._form[0]:
            self._form = form, self._by_shape(heads)
        row = self._next_row()
        step, rate = number(values["step"]), number(values.get("lr"))
        self._rated = self._rated and bool(np.isfinite(rate))
        self._put("own", row, ("index", "step", "rate"), np.array([self._seen, step, rate]))
        numbers = [value if type(value) is float else number(value) for value in values.values()]
        self._put("values", row, tuple(values), np.array(numbers, dtype=np.float64))
        for names in self._form[1]:
            with np.errstate(over="ignore"):  # beyond float32 is infinite
                record = np.array([heads[name] for name in names], dtype=np.float64).astype(np.float32)
            self._put("heads", row, names, record)
            self._put("tops", row, names, envelope(record))
        self._seen += 1
        if self._kept > self._most:
            self._thin()

    @property
    def history(self) -> History:
        """The records so far, as views that are valid until the next append."""
        of: dict[str, dict[str, np.ndarray]] = {"own": {}, "values": {}, "heads": {}, "tops": {}}
        for (kind, _), columns in self._columns.items():
            of[kind] |= columns.upto(self._kept)
        return History(
            steps=of["own"].get("step", np.zeros(0)),
            rates=of["own"].get("rate") if self._rated else None,
            values=of["values"],
            heads=of["heads"],
            tops=of["tops"],
            layers=self.layers,
            planned=self.planned,
        )

    def state(self) -> dict[str, np.ndarray]:
        """The records and their number, from which `load` continues."""
        columns = {
            f"{kind}:{name}": column
            for (kind, _), columns in self._columns.items()
            for name, column in columns.upto(self._kept).items()
        }
        return {**columns, "counts": np.array([self._every, self._seen, self._kept, int(self._rated)])}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Replaces the records with those of another Recording."""
        self._every, self._seen, self._kept, rated = (int(x) for x in state["counts"])
        self._rated = bool(rated)
        self._columns, self._room = {}, max(4, self._kept)
        self._form = (), []
        for key, x in state.items():
            kind, _, name = key.partition(":")
            if name:
                columns = self._of(kind, x.shape[1:])
                at = columns.at((name,))
                columns.array[: len(x), at] = x[:, None]

    def __len__(self) -> int:
        """The number of appended records, whether they were kept or not."""
        return self._seen

    def _check_step(self, values: Mapping[str, object]) -> None:
        step = number(values.get("step"))
        last = self._own("step")[self._kept - 1] if self._kept else -np.inf
        if not step > last:
            raise ShapeError(f"expected a record of a step after {last:g}, got step {values.get('step')}")

    def _by_shape(self, heads: Mapping[str, np.ndarray]) -> list[tuple[str, ...]]:
        """Returns the names of the statistics per head, grouped by shape, and checks the shapes."""
        found: dict[tuple[int, ...], list[str]] = {}
        for name, value in heads.items():
            shape = np.shape(value)
            if len(shape) != 2 or (self.layers and shape[0] != len(self.layers)):
                raise ShapeError(f"expected {name!r} as [{len(self.layers) or 'layers'} heads], got shape {shape}")
            known = [own for (kind, own), of in self._columns.items() if kind == "heads" and name in of.places]
            if known and known[0] != shape:
                raise ShapeError(f"expected {name!r} of shape {known[0]} as before, got {shape}")
            found.setdefault(shape, []).append(name)
        return [tuple(names) for names in found.values()]

    def _next_row(self) -> int:
        """Returns the index of the new record, after the last; if the record before the last is dropped, the last first
        takes its place."""
        n = self._kept
        if n >= _TAIL and self._own("index")[n - _TAIL] % self._every:
            self._fold(np.arange(n - 3, n), np.array([n - 3, n - 1]))
            for columns in self._columns.values():
                columns.array[n - 2] = columns.array[n - 1]
            n -= 1
        self._kept = n + 1
        if n == self._room:
            self._room = min(2 * n, self._most + 1)
            for columns in self._columns.values():
                columns.resize(self._room)
        for columns in self._columns.values():
            columns.array[n] = np.nan
        return n

    def _thin(self) -> None:
        """Drops every second record of those that were kept."""
        self._every *= 2
        index = self._own("index")[: self._kept]
        stays = index % self._every == 0
        stays[-_TAIL:] = True
        rows = np.flatnonzero(stays)
        self._fold(np.arange(self._kept), rows)
        for columns in self._columns.values():
            columns.array[: len(rows)] = columns.array[rows]
        self._kept = len(rows)

    def _fold(self, rows: np.ndarray, stays: np.ndarray) -> None:
        """Gives each row in `stays`, a subset of the adjacent `rows`, the mean rate since the previous row in
        `stays`."""
        steps, rates = self._own("step"), self._own("rate")
        ticks = np.cumsum(rates[rows] * np.diff(steps[rows], prepend=steps[rows[0]]))[stays - rows[0]]
        rates[stays[1:]] = np.diff(ticks) / np.diff(steps[stays])

    def _own(self, name: str) -> np.ndarray:
        columns = self._columns["own", ()]
        return columns.array[:, columns.places[name]]

    def _of(self, kind: str, shape: tuple[int, ...]) -> _Columns:
        """The columns of a kind and shape, which are created on first use."""
        found = self._columns.get((kind, shape))
        if found is None:
            dtype = np.float32 if kind == "heads" else np.float64
            found = self._columns[kind, shape] = _Columns(shape, dtype, self._room)
        return found

    def _put(self, kind: str, row: int, names: tuple[str, ...], record: np.ndarray) -> None:
        """Writes the values with these names into a row."""
        columns = self._of(kind, record.shape[1:])
        at = columns.at(names)  # this may replace the array
        columns.array[row, at] = record
