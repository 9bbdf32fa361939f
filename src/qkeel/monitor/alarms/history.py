"""The records so far, as arrays that rules read: the same live, from a run directory, or made up in a test."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, final

import numpy as np

from qkeel.errors import ShapeError, unknown
from qkeel.frames import Foreign, Frame, figures, heads_frame, steps_frame
from qkeel.monitor.alarms import thresholds
from qkeel.monitor.alarms.forecast import LEAST_POINTS, WINDOW, PlannedRates, forecast
from qkeel.records import Heads, RunDirectory, field_unit, fold_heads
from qkeel.registry import lookup

# What `History.plot` draws -> the field that it shows by default.
FIGURES = {"drift": "max_logit", "entropy": "entropy", "heads": "max_logit", "forecast": "max_logit"}


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
    phase: whether the records are of training, or, where a model was never seen training, of evaluation.
    """

    steps: np.ndarray
    rates: np.ndarray | None = None
    values: Mapping[str, np.ndarray]
    heads: Mapping[str, np.ndarray]
    layers: tuple[str, ...] = ()
    tops: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    planned: PlannedRates | None = None
    phase: Literal["train", "eval"] = "train"

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

    def frame(self, rows: Literal["heads", "steps"] = "heads") -> Frame:
        """The records as a table: one row per step, layer and head, or one row per step."""
        if rows == "heads":
            return heads_frame(self.steps, self.layers, self.heads)
        if rows != "steps":
            raise unknown("rows of a frame", rows, ("heads", "steps"))
        return steps_frame(self.steps, self.values)

    def to_pandas(self, rows: Literal["heads", "steps"] = "heads") -> Foreign:
        """The same as a pandas.DataFrame."""
        return self.frame(rows).to_pandas()

    def to_polars(self, rows: Literal["heads", "steps"] = "heads") -> Foreign:
        """The same as a polars.DataFrame."""
        return self.frame(rows).to_polars()

    def plot(self, what: str = "drift", *, field: str | None = None, ax: Foreign = None) -> Foreign:
        """Draws the records by matplotlib and returns the Axes.

        what: "drift", the largest logit of each layer over the steps; "entropy", the mean entropy of each layer;
        "heads", the last record as a map of layers and heads; "forecast", when the largest logit passes 1e4. field: a
        name of records.HEAD_FIELDS to show instead. ax: the Axes to draw on.

        Raises: UnknownNameError for another figure or a field that was not recorded, MissingLibraryError without
        matplotlib.
        """
        name = field or lookup("figure", FIGURES, what)
        measured = {n: values for n, values in self.heads.items() if not np.isnan(values).all()}
        values = lookup("recorded field", measured, name)
        label = f"{name.replace('_', ' ')} [{field_unit(name)}]"
        layers = self.layers or tuple(f"layer {i}" for i in range(values.shape[1]))
        ax = figures.axes(ax)
        if what == "heads":
            figures.draw_heads(ax, values[-1], layers, f"{label}, step {int(self.steps[-1]):,}")
        elif what == "forecast":
            self._plot_forecast(ax, name, label)
        else:
            folded = np.stack([fold_heads(name, record) for record in values])
            figures.draw_lines(ax, self.steps, folded, layers, label)
        return ax

    def _plot_forecast(self, ax: Foreign, name: str, label: str) -> None:
        top = self.top(name)
        assert top is not None
        figures.draw_lines(ax, self.steps, top[:, None], ["largest of all heads"], label)
        found = forecast(self.steps, top, thresholds.DIVERGES, rates=self.rates, planned=self.planned)
        now, value = float(self.steps[-1]), float(top[-1])
        farthest = WINDOW * now
        if value >= thresholds.DIVERGES:
            title = "is over 1e4 already"
        elif len(self) < LEAST_POINTS:
            title = f"{len(self)} records are too few for a forecast; it takes {LEAST_POINTS}"
        elif found is None or farthest < found.step < np.inf:
            title = f"does not pass 1e4 by step {farthest:,.0f} if it continues as now"
        else:
            title = str(found)
            figures.draw_forecast(ax, found.threshold, (now, value), (found.low, found.step, found.high), farthest)
        ax.set_title(title, fontsize="medium")

    def __repr__(self) -> str:
        span = f", steps {self.steps[0]:,.0f} to {self.steps[-1]:,.0f}" if len(self) else ""
        return (
            f"<History of {len(self):,} records{span}: {len(self.layers)} layers, {len(self.heads)} numbers per head>"
        )

    def _repr_html_(self) -> str:
        return self.frame("steps")._repr_html_()

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
