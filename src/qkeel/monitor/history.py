"""The records of a run so far, as arrays that rules read, whether they come from a live run, a run directory or a test."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, final, get_args

import numpy as np

from qkeel.errors import ShapeError, unknown
from qkeel.frames import Foreign, Frame, heads_frame, layers_frame, steps_frame, tables
from qkeel.monitor.forecast import PlannedRates, forecast
from qkeel.monitor.thresholds import DIVERGES
from qkeel.options import lookup
from qkeel.records import (
    HEAD_FIELDS,
    LAYER_FIELDS,
    Heads,
    RunDirectory,
    common_steps,
    field_unit,
    fold_heads,
    layer_types,
    layer_values,
    measured_field,
    of_layers,
)

# Name of a figure of `History.plot` -> the field that it shows by default.
Rows = Literal["heads", "layers", "steps"]
FIGURES = {
    "drift": "max_logit",
    "entropy": "entropy",
    "heads": "max_logit",
    "forecast": "max_logit",
}


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


class LogitLimit(NamedTuple):
    """A logit, in nats, at which a clip or a cap holds the heads of a layer, and the clip or cap in words."""

    bound: float
    remedy: str


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class History:
    """Records 0..n-1 of a run.

    steps: the steps [n]. rates: the learning rates [n], or None.
    values: name -> [n] for names in records.STEP_FIELDS, NaN where not measured.
    heads: name -> [n layers heads] for names in records.HEAD_FIELDS, NaN where a layer has fewer heads.
    layers: the names of the layers. planned: the planned learning rates, if known.
    types: layer -> its type (capture.visible_sets), where it is known. phase: whether the records come from
    training or, if the model was never observed in training, from evaluation. limits: layer -> the clip or cap that is
    active there.
    """

    steps: np.ndarray
    rates: np.ndarray | None = None
    values: Mapping[str, np.ndarray]
    heads: Mapping[str, np.ndarray]
    layers: tuple[str, ...] = ()
    planned: PlannedRates | None = None
    phase: Literal["train", "eval"] = "train"
    types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limits: Mapping[str, LogitLimit] = dataclasses.field(default_factory=dict)

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
        """The records as a table: one row per step, layer and head; one per step and layer, aggregated over heads; or
        one per step. If layer types are known, rows of layers and heads have a column for the type.
        """
        if rows == "heads":
            return heads_frame(self.steps, self.layers, self.heads, self.types)
        if rows == "layers":
            return layers_frame(self.steps, *self._layers(), self.types)
        if rows != "steps":
            raise unknown("rows of a frame", rows, get_args(Rows))
        return steps_frame(self.steps, self.values)

    def _layers(self) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        """The names of the layers, including blocks without attention, and their numbers by name, [n layers] each."""
        fields, layers = dict[str, None](), dict.fromkeys(self.layers)
        for name in self.values:
            field, _, layer = name.partition("/")
            if layer and of_layers(field):
                fields[field] = layers[layer] = None
        every = dataclasses.replace(self, layers=tuple(layers))
        columns = {}
        for name in (*HEAD_FIELDS, *LAYER_FIELDS, *fields):
            values = every.by_layer(name)
            if values is not None:
                width = ((0, 0), (0, len(layers) - values.shape[1]))
                columns[name] = np.pad(values, width, constant_values=np.nan)
        return every.layers, columns

    def to_pandas(self, rows: Rows = "heads") -> Foreign:
        """The same table as a pandas.DataFrame."""
        return self.frame(rows).to_pandas()

    def plot(
        self, what: str = "drift", *, field: str | None = None, ax: Foreign = None
    ) -> Foreign:
        """Draws the records with matplotlib and returns the Axes.

        what: "drift" shows the largest logit of each layer over the steps, "entropy" the mean entropy of each layer,
        "heads" the last record as a map of layers and heads, and "forecast" when the largest logit passes 10,000.
        field: a name from records.HEAD_FIELDS to show instead. ax: the Axes to draw on.

        Raises: UnknownNameError for an unknown figure or a field that was not recorded, MissingLibraryError if
            matplotlib is not installed.
        """
        name = field or lookup("figure", FIGURES, what)
        measured = {
            n: values for n, values in self.heads.items() if not np.isnan(values).all()
        }
        lines = self.by_layer(name)
        if not of_layers(name) or lines is None:
            heads = lookup("recorded field", measured, measured_field(name))
            lines = fold_heads(name, heads)
        label = f"{name.replace('_', ' ')} [{field_unit(name)}]"
        layers = self.layers or tuple(f"layer {i}" for i in range(lines.shape[1]))
        ax = tables.axes(ax)
        if what == "heads" and name in measured:
            label = f"{label}, step {int(self.steps[-1]):,}"
            tables.draw_heads(ax, measured[name][-1], layers, label)
        elif what == "forecast":
            self._plot_forecast(ax, name, label)
        else:
            tables.draw_lines(ax, self.steps, lines, layers, label)
        return ax

    def _plot_forecast(self, ax: Foreign, name: str, label: str) -> None:
        top = self.top(name)
        assert top is not None
        tables.draw_lines(ax, self.steps, top[:, None], ["largest of all heads"], label)
        passing = forecast(
            self.steps, top, DIVERGES, rates=self.rates, planned=self.planned
        )
        now, value = float(self.steps[-1]), float(top[-1])
        farthest = WINDOW * now
        if value >= DIVERGES:
            title = "is already over 1e4"
        elif len(self) < LEAST_POINTS:
            title = f"{len(self)} records are too few for a forecast, which needs {LEAST_POINTS}"
        elif passing is None or farthest < passing.step < np.inf:
            title = (
                f"will not pass 10,000 by step {farthest:,.0f} if the trend continues"
            )
        else:
            title = str(passing)
            ends = (passing.low, passing.step, passing.high)
            tables.draw_forecast(ax, DIVERGES, (now, value), ends, farthest)
        ax.set_title(title, fontsize="medium")

    def __repr__(self) -> str:
        span = (
            f", steps {self.steps[0]:,.0f} to {self.steps[-1]:,.0f}"
            if len(self)
            else ""
        )
        return f"<History of {len(self):,} records{span}: {len(self.layers)} layers, {len(self.heads)} numbers per head>"

    def _repr_html_(self) -> str:
        return self.frame("steps")._repr_html_()

    def upto(self, n: int) -> History:
        """Returns the history of the first n records, as known at that time."""
        return dataclasses.replace(
            self,
            steps=self.steps[:n],
            rates=None if self.rates is None else self.rates[:n],
            values={name: v[:n] for name, v in self.values.items()},
            heads={name: v[:n] for name, v in self.heads.items()},
        )

    def of_type(self, layer_type: str) -> History:
        """Returns a copy in which the numbers of layers of other types are NaN."""
        others = [
            i
            for i, layer in enumerate(self.layers)
            if self.types.get(layer) != layer_type
        ]
        heads = {name: np.array(values) for name, values in self.heads.items()}
        for values in heads.values():
            values[:, others] = np.nan
        # Numbers of the whole model are of all types together.
        values = {name: x for name, x in self.values.items() if name not in heads}
        return dataclasses.replace(self, values=values, heads=heads)

    def series(self, name: str) -> np.ndarray | None:
        """Returns [n layers heads] for a name; a number that is not recorded per head has shape [n 1 1]."""
        if name in self.heads:
            return self.heads[name]
        return self.values[name][:, None, None] if name in self.values else None

    def by_layer(self, name: str) -> np.ndarray | None:
        """Returns [n layers]: a head field aggregated over heads, or a field of records.LAYER_FIELDS or BLOCK_FIELDS;
        None if it was not recorded."""
        return layer_values(name, self.layers, self.values, self.heads)

    def top(self, name: str) -> np.ndarray | None:
        """Returns [n], the largest value over all heads in each record; NaN if no head was measured."""
        series = self.series(name)
        if series is None:
            series = self.by_layer(name)
        if series is None:
            return None
        rows = series.reshape(len(series), -1)
        return np.fmax.reduce(rows, axis=1, initial=np.nan)

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
