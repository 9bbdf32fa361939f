"""The records so far, as arrays that rules read: the same live, from a run directory, or made up in a test."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Self, final

import numpy as np

from qkeel.errors import ShapeError
from qkeel.monitor.alarms.planned_rates import PlannedRates
from qkeel.records import Heads, RunDirectory


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A recorded name, a layer, and a head or the whole layer."""

    name: str
    layer: int
    head: int | None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class History:
    """Records 0..n-1 of a run.

    steps [n]; rates [n], learning rates, or None; values: name -> [n] by records.STEP_FIELDS, NaN where not measured;
    heads: name -> [n layers heads] by records.HEAD_FIELDS, NaN where a layer has fewer heads; layers: names.
    tops: name -> [n], the largest of all heads, where somebody kept it; planned: the learning rates to come, if known.
    """

    steps: np.ndarray
    rates: np.ndarray | None = None
    values: Mapping[str, np.ndarray]
    heads: Mapping[str, np.ndarray]
    layers: tuple[str, ...] = ()
    tops: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    planned: PlannedRates | None = None

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
    ) -> Self:
        """From what RunDirectory.metrics() and .heads() give; steps that only one of both has are left out."""
        if heads is not None:
            place = {int(step): i for i, step in enumerate(heads.steps)}
            metrics = [record for record in metrics if int(record["step"]) in place]
            rows = [place[int(record["step"])] for record in metrics]
            per_head = {name: np.asarray(v, dtype=np.float64)[rows] for name, v in heads.values.items()}
        else:
            per_head = {}
        names = dict.fromkeys(name for record in metrics for name in record)
        values = {name: np.array([number(record.get(name)) for record in metrics]) for name in names}
        steps = values.get("step", np.zeros(0))
        if (np.diff(steps) <= 0).any():
            raise ShapeError("expected records in the order of their steps, each step once")
        rates = values.get("lr")
        if rates is not None and not np.isfinite(rates).all():
            rates = None
        return cls(steps=steps, rates=rates, values=values, heads=per_head, layers=tuple(layers), planned=planned)

    @classmethod
    def read(cls, run: RunDirectory, *, planned: PlannedRates | None = None) -> Self:
        """A recorded run."""
        heads = run.heads() if (run.path / "heads.json").exists() else None
        return cls.of(run.metrics(), heads, () if heads is None else heads.layers, planned=planned)

    def upto(self, n: int) -> History:
        """The first n records: what was known then."""
        return dataclasses.replace(
            self,
            steps=self.steps[:n],
            rates=None if self.rates is None else self.rates[:n],
            values={name: v[:n] for name, v in self.values.items()},
            heads={name: v[:n] for name, v in self.heads.items()},
            tops={name: v[:n] for name, v in self.tops.items()},
        )

    def series(self, name: str) -> np.ndarray | None:
        """[n layers heads] of a name: per head if recorded so, else the whole run as one layer of one head."""
        if name in self.heads:
            return self.heads[name]
        return self.values[name][:, None, None] if name in self.values else None

    def top(self, name: str) -> np.ndarray | None:
        """[n]: the largest of all heads at each record; NaN where none was measured."""
        if name in self.tops:
            return self.tops[name]
        series = self.series(name)
        return None if series is None else envelope(series)

    def where(self, place: Place) -> tuple[str | None, int | None]:
        """The layer's name and the head; None, None if the name was not recorded per head."""
        if place.name not in self.heads:
            return None, None
        return (self.layers[place.layer] if self.layers else f"layer {place.layer}"), place.head


def envelope(series: np.ndarray) -> np.ndarray:
    """[n layers heads] -> [n], the largest of each record; NaN only where nothing was measured."""
    return np.fmax.reduce(series.reshape(len(series), -1), axis=1, initial=np.nan)


def number(value: object) -> float:
    """A recorded number; NaN for what is none, like the null of a loss that was not evaluated."""
    return float(value) if isinstance(value, numbers.Real) else np.nan
