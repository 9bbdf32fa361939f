"""The history of a run's records, and the forecast of its largest logit."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, final, get_args

import numpy as np

from qkeel.errors import InvalidValueError, ShapeError, unknown
from qkeel.frames import Foreign, Frame, heads_frame, layers_frame, steps_frame, tables
from qkeel.metrics import slope
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

# A forecast of the step at which a logit passes a threshold: a power law in the learning-rate clock, as planned.
#
# It does not use torch, so recorded runs can be replayed through it anywhere.

LEAST_POINTS = 6
# Of the clock; within less, noise has any slope (records may begin late, in a run that
# was resumed).
LEAST_SPAN = 1.5
# Below it, a logit takes a million times the training to double, which is negligible.
LEAST_EXPONENT = 0.05
# The fit uses the last decade of the clock; in a long warm-up, the logit hardly changes
# before that.
WINDOW = 10.0
# Times the low end of an interval; a wider forecast says only before which step the
# logit will not pass.
VAGUE = 10.0
# In ln clock; further than any training goes.
FARTHEST = 50.0
# The interval is measured, not derived: residuals of one run are not independent draws, and they do not show what bends
# the curve later. It was calibrated on the tuning seeds of experiments/notes/alarms.md; its coverage is measured on
# other seeds.
_SLACK = (0.1, 0.12)
_SLACK_PER_DISTANCE = (0.45, 0.55)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """`value` grows like clock^exponent and passes `threshold` at `step`, with a 90 % interval from `low` to `high`.

    If the schedule is known up to the end of the run (step `end`), infinity means "not within this run". If the
    schedule is unknown, `end` is None, and the three steps hold only if the learning rate stays the same.
    """

    threshold: float
    value: float
    exponent: float
    step: float
    low: float
    high: float
    end: int | None = None

    def __str__(self) -> str:
        """`will pass 10,000 at step 2,140 (90 % interval 1,950 to 2,340)`, followed by the condition, if any. If the
        interval is too wide for its middle to be informative, the text names a step before which the logit will not
        pass the threshold."""
        condition = " if the learning rate stays the same" if self.end is None else ""
        if not math.isfinite(self.step):
            return f"will not pass {self.threshold:,g} within this run"
        if self.vague:
            return f"will not pass {self.threshold:,g} before step {_round(self.low):,}{condition}"
        return f"will pass {self.threshold:,g} at step {_round(self.step):,} ({self.interval}){condition}"

    @property
    def vague(self) -> bool:
        """Returns whether the interval spans more than a factor of VAGUE."""
        return (
            min(self.high, math.inf if self.end is None else float(self.end))
            > VAGUE * self.low
        )

    @property
    def interval(self) -> str:
        """Returns text such as `90 % interval 1,950 to 2,340`, in which `never` means not within this run."""
        low, high = (
            f"{_round(x):,}" if math.isfinite(x) else "never"
            for x in (self.low, self.high)
        )
        return f"90 % interval {low} to {high}"


def _round(x: float) -> int:
    """Rounds to two or three digits, because the rest is noise."""
    digits = max(0, math.floor(math.log10(max(abs(x), 1))) - 2)
    return round(x / 10**digits) * 10**digits


def clock(steps: np.ndarray, rates: np.ndarray | None) -> np.ndarray:
    """The learning rate summed over steps [n], which Adam's weights follow, or the steps themselves if no rates are
    given.

    A warm-up or decay bends the power law in steps, not in this clock. `rates[i]` is the rate at `steps[i]`; between
    two records the rate of the later one applies.
    """
    steps = np.asarray(steps, dtype=np.float64)
    if rates is None:
        return steps
    rates = np.asarray(rates, dtype=np.float64)
    if rates.shape != steps.shape:
        raise ShapeError(
            f"expected one learning rate per step, got {rates.shape} for {steps.shape}"
        )
    return np.cumsum(rates * np.diff(steps, prepend=0.0))


def forecast(
    steps: np.ndarray,
    values: np.ndarray,
    threshold: float,
    *,
    rates: np.ndarray | None = None,
    planned: PlannedRates | None = None,
) -> Forecast | None:
    """The step at which the power law through `values` [n] passes `threshold`; None if they never pass it or already
    have.

    ln v = a + p ln c is fitted by least squares to the records in which c is at least a tenth of its last value (at
    least 6 records, over which c grows by a factor of at least 1.5); extrapolated from the last record,
    c* = c · (threshold / v)^(1/p). The clock c continues as planned; without a plan, or if the last record does not
    follow the plan, it continues at the last learning rate. The interval around ln c*, with L = ln(c* / c), is from
    -(0.45 L + 0.1) to +(0.55 L + 0.12), but never before the last record.

    >>> steps = np.arange(100, 1100, 100)
    >>> print(forecast(steps, 2.0 * steps**0.5, 100.0))
    will pass 100 at step 2,500 (90 % interval 1,500 to 4,670) if the learning rate stays the same

    Args:
        steps, values: the steps [n] of the records and their logits [n]. threshold: the logit to reach.
        rates: the learning rates [n] at `steps`. planned: the learning rates of the whole run, if known.

    Source: experiments of this project (logits of small runs drift as a power of steps); the clock and the interval
    were developed in this project and are evaluated in experiments/notes/alarms.md.
    """
    if planned is not None and not planned.followed(steps, rates):
        planned = None
    ticks = clock(steps, rates) if planned is None else planned.ticks(steps)
    values = np.asarray(values, dtype=np.float64)
    fine = np.flatnonzero((ticks > 0) & (values > 0) & np.isfinite(values))
    # A forecast begins at the last record, so that one has to be among them.
    if len(fine) < LEAST_POINTS or fine[-1] != len(steps) - 1:
        return None
    now, tick, value = float(steps[-1]), float(ticks[-1]), float(values[-1])
    late = fine[
        (ticks[fine] >= tick / WINDOW)
        | (np.arange(len(fine)) >= len(fine) - LEAST_POINTS)
    ]
    if value >= threshold or tick < LEAST_SPAN * ticks[late[0]]:
        return None
    exponent = slope(np.log(ticks[late]), np.log(values[late]))
    if not exponent > LEAST_EXPONENT:
        return None
    distance = math.log(threshold / value) / exponent
    rate = tick / now if rates is None else float(rates[-1])
    if distance > FARTHEST or (planned is None and rate <= 0):
        return None

    def when(distance: float) -> float:
        then = tick * math.exp(max(0.0, distance))
        return now + (then - tick) / rate if planned is None else planned.when(then)

    below, above = (
        share * distance + least for share, least in zip(_SLACK_PER_DISTANCE, _SLACK)
    )
    return Forecast(
        threshold=threshold,
        value=value,
        exponent=exponent,
        step=when(distance),
        low=when(distance - below),
        high=when(distance + above),
        end=None if planned is None else planned.steps,
    )


# a rate this close to the planned rate counts as equal to it.
_NEAR = 0.01


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedRates:
    """The cumulative sum of planned learning rates: `clock` [steps + 1] starts at 0, and `clock[s]` is the sum over
    steps 1 to s.

    >>> PlannedRates.of([0.5, 0.25]).clock.tolist()
    [0.0, 0.5, 0.75]
    """

    clock: np.ndarray

    @classmethod
    def of(
        cls,
        rates: Sequence[float] | np.ndarray | Callable[[int], float],
        steps: int | None = None,
    ) -> Self:
        """Builds the plan from the learning rate at each step of the run, in the units of the recorded "lr".

        rates: the rates [steps], starting with that of step 1, or a function of the step, from 1 to `steps`.

        Raises: InvalidValueError if a rate is negative or not a number, or a function is given without `steps`.

        >>> PlannedRates.of([0.1, 0.2, 0.2]).clock.round(3).tolist()
        [0.0, 0.1, 0.3, 0.5]
        """
        if callable(rates):
            if steps is None:
                raise InvalidValueError(
                    "rates as a function of the step need the number of steps of the run; pass steps="
                )
            rates = [rates(step) for step in range(1, steps + 1)]
        known = np.asarray(rates, dtype=np.float64)
        n = len(known) if steps is None else steps
        if not n or known.shape != (n,):
            raise ShapeError(
                f"expected one learning rate for each of {steps or 'the'} steps, got shape {known.shape}"
            )
        if not (np.isfinite(known).all() and (known >= 0).all()):
            raise InvalidValueError(
                "expected planned learning rates to be finite and not negative"
            )
        return cls(clock=np.concatenate([[0.0], np.cumsum(known)]))

    @property
    def steps(self) -> int:
        """The length of the run in steps."""
        return len(self.clock) - 1

    def ticks(self, steps: np.ndarray) -> np.ndarray:
        """The clock at `steps` [n], which the plan covers."""
        return self.clock[np.asarray(steps, dtype=np.int64)]

    def when(self, tick: float) -> float:
        """The step, interpolated, at which the clock first reaches `tick`; infinity if it does not in this run."""
        if tick > self.clock[-1]:
            return math.inf
        after = int(np.searchsorted(self.clock, tick))
        if after == 0:
            return 0.0
        before, then = self.clock[after - 1 : after + 1]
        return after - 1 + float((tick - before) / (then - before))

    def followed(self, steps: np.ndarray, rates: np.ndarray | None) -> bool:
        """True if the last record follows this plan: its step is in the plan, with the planned rate of that or a
        neighbouring step. A neighbouring step is accepted because a rate that is read after the scheduler's step is
        that of the next step.
        """
        if not len(steps) or steps[-1] > self.steps or (steps != np.floor(steps)).any():
            return False
        if rates is None:
            return True
        near = np.diff(self.clock)[max(0, int(steps[-1]) - 2) : int(steps[-1]) + 1]
        return bool(near.min() * (1 - _NEAR) <= rates[-1] <= near.max() * (1 + _NEAR))


# The records so far, as arrays that rules read, whether they come from a live run, a run directory or a test.

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
