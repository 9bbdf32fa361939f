"""Reads the directories of watched runs. Nothing on disk is changed.

Shapes: n samples, layers, heads.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from qkeel.metrics import Row
from qkeel.records import (
    OVER,
    Heads,
    RunDirectory,
    RunStatus,
    common_steps,
    fold_heads,
    layer_types,
    of_layers,
)
from qkeel.report.study_runs import as_number

KIND = "watch"
# Effects in runs of earlier versions.
INTERVENTIONS = (
    "autopilot",
    "decision",
    "refused",
    "effect",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watched:
    """A watched run; `records` [n] and `heads` [n layers heads] belong to the same n steps."""

    path: Path
    name: str
    status: RunStatus
    about: Row
    env: Row
    records: Sequence[Row]
    heads: Heads
    eval_records: Sequence[Row] = ()
    eval_heads: Heads
    alarms: Sequence[Row] = ()
    interventions: Sequence[
        Row
    ] = ()  # an autopilot's start, decisions, refusals and effects
    # The first step at which the notice of a rule held no longer.
    over: Mapping[str, int] = dataclasses.field(default_factory=dict)
    notes: Sequence[Row] = ()

    @property
    def steps(self) -> list[int]:
        """The step of each sample."""
        return [int(record["step"]) for record in self.records]

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the attention layers."""
        return self.heads.layers

    @property
    def types(self) -> dict[str, str]:
        """The type of each layer, if the run recorded it."""
        return layer_types(self.about, self.notes)

    def measured(self) -> list[str]:
        """Returns the head fields that were ever measured, in the order of the file."""
        return [
            name
            for name, values in self.heads.values.items()
            if not np.isnan(values).all()
        ]

    def by_layer(self, name: str) -> np.ndarray | None:
        """Returns [n layers], a head field folded over heads or a value of each layer or block; None if it was not
        measured."""
        heads = self.heads.values.get(name)
        if of_layers(name):
            columns = [
                [as_number(record.get(f"{name}/{layer}")) for record in self.records]
                for layer in self.layers
            ]
            values = np.array(columns).reshape(len(self.layers), -1).T
        elif heads is not None:
            values = fold_heads(name, heads)
        else:
            return None
        return None if np.isnan(values).all() else values

    def overall(self, name: str) -> np.ndarray:
        """Returns [n], a value of the entire model, as recorded or computed from its heads; NaN if neither exists."""
        return overall(self.records, self.heads, name)

    @property
    def acted(self) -> bool:
        """True if an autopilot applied a remedy during the run."""
        return any(
            event.get("event") == "decision" and event.get("remedy")
            for event in self.interventions
        )

    def leader(self) -> dict[str, int] | None:
        """Returns the layer and the head with the largest logit in the last sample; None if none was measured."""
        values = self.heads.values.get("max_logit")
        if values is None or not len(values) or np.isnan(values[-1]).all():
            return None
        layer, head = divmod(int(np.nanargmax(values[-1])), values.shape[-1])
        return {"layer": layer, "head": head}


def overall(records: Sequence[Row], heads: Heads, name: str) -> np.ndarray:
    """See Watched.overall."""
    recorded = np.array([as_number(record.get(name)) for record in records])
    values = heads.values.get(name)
    if values is None or not len(values) or not np.isnan(recorded).all():
        return recorded
    return fold_heads(name, values.reshape(len(values), -1))


def is_watched(path: Path) -> bool:
    """True if the directory belongs to a watched model."""
    directory = RunDirectory(path)
    if directory.status is RunStatus.MISSING:
        return False
    return directory.config().get("kind") == KIND


def read_watched(paths: Sequence[Path]) -> list[Watched]:
    """Reads the runs. Runs with equal names are named by their path.

    Raises:
        RunDirectoryError: a file is damaged.
    """
    runs = [_read(path) for path in paths]
    times = Counter(run.name for run in runs)
    renamed = []
    for run in runs:
        name = str(run.path) if times[run.name] > 1 else run.name
        renamed.append(dataclasses.replace(run, name=name))
    return renamed


def _read(path: Path) -> Watched:
    directory = RunDirectory(path)
    directory.check_complete()
    events = directory.events()
    over: dict[str, int] = {}
    for event in events:
        if event.get("event") == OVER:
            over[str(event["rule"])] = int(event["step"])
        elif event.get("event") == "alarm":
            # A forecast that was taken back may be made again.
            over.pop(str(event.get("rule")), None)
    records, heads = common_steps(directory.metrics(), directory.heads())
    eval_records, eval_heads = common_steps(
        directory.eval_metrics(), directory.eval_heads()
    )
    return Watched(
        path=path,
        name=path.resolve().name,
        status=directory.status,
        about=directory.config(),
        env=directory.env() if (path / "env.json").exists() else {},
        records=records,
        heads=heads,
        eval_records=eval_records,
        eval_heads=eval_heads,
        alarms=[event for event in events if event.get("event") == "alarm"],
        interventions=[
            event for event in events if event.get("event") in INTERVENTIONS
        ],
        over=over,
        notes=[
            event
            for event in events
            if event.get("event") not in ("alarm", OVER, *INTERVENTIONS)
        ],
    )
