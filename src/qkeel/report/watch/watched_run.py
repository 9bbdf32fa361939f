"""The directory of a watched model, read as plain data. Reading changes nothing on disk."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qkeel.metrics import Row, growth_exponent
from qkeel.records import Heads, RunDirectory, RunStatus, fold_heads
from qkeel.records.rundir import note_checksums
from qkeel.report.run_names import differences

KIND = "watch"
INTERVENTIONS = ("autopilot", "decision", "refused", "effect")
LEAST_SAMPLES = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The head with the largest logit in the last sample."""

    layer: int
    head: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watched:
    """A watched run. `records` [n] and `heads` [n layers heads] are those of the same n steps."""

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
    interventions: Sequence[Row] = ()  # of an autopilot: its start, decisions, refusals and effects
    notes: Sequence[Row] = ()

    @property
    def steps(self) -> list[int]:
        """The step of each sample."""
        return [int(record["step"]) for record in self.records]

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the attention layers."""
        return self.heads.layers

    def measured(self) -> list[str]:
        """The head fields that were ever measured, in the order of the file."""
        return [name for name, values in self.heads.values.items() if not np.isnan(values).all()]

    def overall(self, name: str) -> np.ndarray:
        """Returns [n], a number of the whole model: as recorded, else from its heads; NaN where neither is there."""
        return overall(self.records, self.heads, name)

    @property
    def acted(self) -> bool:
        """Returns whether somebody acted on the run while it went on: an autopilot that decided something."""
        return any(event.get("event") == "decision" and event.get("remedy") for event in self.interventions)

    def leader(self) -> Leader | None:
        """Returns the head with the largest logit; None if no head was ever measured."""
        values = self.heads.values.get("max_logit")
        if values is None or not len(values) or np.isnan(values[-1]).all():
            return None
        layer, head = (int(i) for i in np.unravel_index(int(np.nanargmax(values[-1])), values[-1].shape))
        return Leader(layer=layer, head=head, name=self.layers[layer] if self.layers else f"layer {layer}")

    def exponent(self) -> float:
        """Returns the p of max_logit ~ steps^p over the later half of the samples; NaN with few samples."""
        since = -max(LEAST_SAMPLES, len(self.records) // 2)
        return growth_exponent(self.steps[since:], self.overall("max_logit")[since:].tolist(), LEAST_SAMPLES)


def overall(records: Sequence[Row], heads: Heads, name: str) -> np.ndarray:
    """Returns [n]: see Watched.overall."""
    recorded = np.array([as_number(record.get(name)) for record in records])
    values = heads.values.get(name)
    if values is None or not len(values) or not np.isnan(recorded).all():
        return recorded
    return fold_heads(name, values.reshape(len(values), -1))


def as_number(value: object) -> float:
    """Returns a recorded number; NaN for null and text."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else float("nan")


def is_watched(path: Path) -> bool:
    """Returns whether a directory was written by a watched model."""
    directory = RunDirectory(path)
    if directory.status is RunStatus.MISSING:
        return False
    return directory.config().get("kind") == KIND


def read_watched(paths: Sequence[Path]) -> list[Watched]:
    """Reads the runs; those of one name are called by their path, and several also by what differs.

    Raises: RunDirectoryError if a file is damaged.
    """
    runs = [_read(path) for path in paths]
    times = Counter(run.name for run in runs)
    apart = differences([{**run.about, **run.env} for run in runs]) if len(runs) > 1 else [""]
    names = [str(run.path) if times[run.name] > 1 else run.name for run in runs]
    return [dataclasses.replace(r, name=f"{n} ({d})" if d else n) for r, n, d in zip(runs, names, apart, strict=True)]


def _read(path: Path) -> Watched:
    directory = RunDirectory(path)
    note_checksums(directory)
    events = directory.events()
    records, heads = _aligned(directory.metrics(), _heads(directory, "heads"))
    eval_records, eval_heads = _aligned(directory.eval_metrics(), _heads(directory, "eval_heads"))
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
        interventions=[event for event in events if event.get("event") in INTERVENTIONS],
        notes=[event for event in events if event.get("event") not in ("alarm", *INTERVENTIONS)],
    )


def _heads(directory: RunDirectory, name: str) -> Heads:
    if not (directory.path / f"{name}.json").exists():
        return Heads(steps=np.zeros(0, np.int64), values={})
    return directory.heads() if name == "heads" else directory.eval_heads()


def _aligned(records: Sequence[Row], heads: Heads) -> tuple[Sequence[Row], Heads]:
    """Records and heads of the steps that both have: a run that was killed may lack the heads of its last step."""
    if not heads.values:
        return records, heads
    row = {int(step): i for i, step in enumerate(heads.steps)}
    records = [record for record in records if record["step"] in row]
    rows = [row[record["step"]] for record in records]
    values = {name: v[rows].astype(np.float64) for name, v in heads.values.items()}
    return records, Heads(steps=heads.steps[rows], values=values, layers=heads.layers)
