"""The records of a run that goes on, bounded in memory and time however long it is; and the alarms that they raised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np

from qkeel.errors import ShapeError
from qkeel.monitor.alarms.forecast import PlannedRates
from qkeel.monitor.alarms.history import History, envelope, number
from qkeel.monitor.alarms.rule import Alarm, Rule, Severity
from qkeel.monitor.alarms.rules import DEFAULT

MOST = 512  # records kept: a power law through 512 points is as good as through 100,000, and a rule reads them all
_TAIL = 2  # the newest records are always kept: rules compare the last with the one before


@final
class Recording:
    """The records of a run so far. Up to `most` all of them; beyond, every 2nd, 4th, 8th …, the first and the last two.

    Thinning leaves the learning-rate clock exact: what a dropped record says of the rate goes into the next one kept.

    layers: their names, in the order of the first axis of `heads`. planned: the learning rates of the run, if known.
    most: records kept, at least 4.
    """

    def __init__(self, layers: Sequence[str] = (), *, planned: PlannedRates | None = None, most: int = MOST) -> None:
        self.layers = tuple(layers)
        self.planned = planned
        self._most = max(4, most)
        self._every = 1
        self._seen = self._kept = 0
        self._rated = True
        # (kind, name) -> [capacity …]; kinds: own, values, heads, tops (the largest of all heads)
        self._columns: dict[tuple[str, str], np.ndarray] = {}

    def append(self, values: Mapping[str, object], heads: Mapping[str, np.ndarray] | None = None) -> None:
        """Add a record, of a later step than the last.

        values: at least "step"; numbers by records.STEP_FIELDS, anything else counts as not measured. heads: name ->
        [layers heads] by records.HEAD_FIELDS, NaN where a layer has fewer heads. A name may come and go: NaN where it
        was not given.

        Raises: ShapeError if a step does not come after the last one, or a shape is not that of the record before.
        """
        heads = {} if heads is None else heads
        self._check(values, heads)
        row = self._next_row()
        step, rate = number(values["step"]), number(values.get("lr"))
        self._rated = self._rated and bool(np.isfinite(rate))
        for name, value in {"index": self._seen, "step": step, "rate": rate}.items():
            self._column(("own", name))[row] = value
        columns = self._columns
        for name, value in values.items():
            column = columns[key] if (key := ("values", name)) in columns else self._column(key)
            column[row] = value if type(value) is float else number(value)
        with np.errstate(over="ignore"):  # beyond float32 is infinite
            for name, value in heads.items():
                key = "heads", name
                column = columns[key] if key in columns else self._column(key, np.shape(value), np.float32)
                column[row] = value
        records = [columns["heads", name][row] for name in heads]
        if len({record.shape for record in records}) == 1:
            tops = envelope(np.stack(records)).tolist()
        else:
            tops = [float(envelope(record[None])[0]) for record in records]
        for name, top in zip(heads, tops):
            column = columns[key] if (key := ("tops", name)) in columns else self._column(key)
            column[row] = top
        self._seen += 1
        if self._kept > self._most:
            self._thin()

    @property
    def history(self) -> History:
        """The records so far, without copying: true until the next append."""
        n = self._kept
        of: dict[str, dict[str, np.ndarray]] = {"own": {}, "values": {}, "heads": {}, "tops": {}}
        for (kind, name), column in self._columns.items():
            of[kind][name] = column[:n]
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
        """The records and how many there were: what `load` goes on from."""
        columns = {f"{kind}:{name}": column[: self._kept] for (kind, name), column in self._columns.items()}
        return {**columns, "counts": np.array([self._every, self._seen, self._kept, int(self._rated)])}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Takes the records of another Recording in place of its own."""
        self._every, self._seen, self._kept, rated = (int(x) for x in state["counts"])
        self._rated = bool(rated)
        columns = {tuple(key.split(":", 1)): np.array(x) for key, x in state.items() if key != "counts"}
        self._columns = {(key[0], key[1]): np.resize(x, (max(4, len(x)), *x.shape[1:])) for key, x in columns.items()}

    def __len__(self) -> int:
        """Records appended, kept or not."""
        return self._seen

    def _check(self, values: Mapping[str, object], heads: Mapping[str, np.ndarray]) -> None:
        step = number(values.get("step"))
        last = self._columns["own", "step"][self._kept - 1] if self._kept else -np.inf
        if not step > last:
            raise ShapeError(f"expected a record of a step after {last:g}, got step {values.get('step')}")
        for name, value in heads.items():
            shape = value.shape if isinstance(value, np.ndarray) else np.shape(value)
            known = self._columns.get(("heads", name))
            if len(shape) != 2 or (self.layers and shape[0] != len(self.layers)):
                raise ShapeError(f"expected {name!r} as [{len(self.layers) or 'layers'} heads], got shape {shape}")
            if known is not None and known.shape[1:] != shape:
                raise ShapeError(f"expected {name!r} of shape {known.shape[1:]} as before, got {shape}")

    def _next_row(self) -> int:
        """The index of the new record: after the last, which first replaces the one before it if that is dropped."""
        n = self._kept
        if n >= _TAIL and self._columns["own", "index"][n - _TAIL] % self._every:
            self._fold(np.arange(n - 3, n), np.array([n - 3, n - 1]))
            for column in self._columns.values():
                column[n - 2] = column[n - 1]
            n -= 1
        self._kept = n + 1
        for key, column in self._columns.items():
            if n == len(column):
                self._columns[key] = np.resize(column, (min(2 * n, self._most + 1), *column.shape[1:]))
            self._columns[key][n] = np.nan
        return n

    def _thin(self) -> None:
        """Keep every second of what was kept."""
        self._every *= 2
        index = self._columns["own", "index"][: self._kept]
        stays = index % self._every == 0
        stays[-_TAIL:] = True
        rows = np.flatnonzero(stays)
        self._fold(np.arange(self._kept), rows)
        for column in self._columns.values():
            column[: len(rows)] = column[rows]
        self._kept = len(rows)

    def _fold(self, rows: np.ndarray, stays: np.ndarray) -> None:
        """Give each of `stays`, a subset of the adjacent `rows`, the mean rate since the one before it."""
        steps, rates = self._columns["own", "step"], self._columns["own", "rate"]
        ticks = np.cumsum(rates[rows] * np.diff(steps[rows], prepend=steps[rows[0]]))[stays - rows[0]]
        rates[stays[1:]] = np.diff(ticks) / np.diff(steps[stays])

    def _column(self, key: tuple[str, str], shape: tuple[int, ...] = (), dtype: type = np.float64) -> np.ndarray:
        """The column, made when its name first comes."""
        if key not in self._columns:
            room = max((len(column) for column in self._columns.values()), default=4)
            self._columns[key] = np.full((room, *shape), np.nan, dtype=dtype)
        return self._columns[key]


@final
class AlarmLog:
    """The alarms of `rules` that have gone off: each rule warns once."""

    def __init__(self, rules: Sequence[Rule] = DEFAULT) -> None:
        self.rules = tuple(rules)
        self.alarms: list[Alarm] = []

    def update(self, history: History) -> list[Alarm]:
        """The alarms that the last record raises for the first time, the gravest first."""
        said = {alarm.rule for alarm in self.alarms}
        fresh = [rule for rule in self.rules if rule.name not in said] if len(history) else []
        new = [alarm for rule in fresh if (alarm := rule.check(history)) is not None]
        new.sort(key=lambda alarm: -list(Severity).index(alarm.severity))
        self.alarms += new
        return new


def replay(history: History, rules: Sequence[Rule] = DEFAULT) -> list[Alarm]:
    """Every alarm of a run, in the order they would have been raised while it went on.

    >>> import numpy as np
    >>> [alarm.rule for alarm in replay(History(steps=np.arange(2), values={"train_loss": np.ones(2)}, heads={}))]
    []
    """
    log, recording = AlarmLog(rules), Recording(history.layers, planned=history.planned)
    for n in range(len(history)):
        values = {name: v[n] for name, v in history.values.items()} | {"step": history.steps[n]}
        recording.append(values, {name: v[n] for name, v in history.heads.items()})
        log.update(recording.history)
    return log.alarms
