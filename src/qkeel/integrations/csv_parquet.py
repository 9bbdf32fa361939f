"""CSV and Parquet: every number of every head, as tables that pandas, polars, R or a spreadsheet read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qkeel.frames import Frame, TableFiles, heads_frame, steps_frame
from qkeel.frames.table_files import TableFormat
from qkeel.monitor import Alarm, Sample, Sink
from qkeel.records import HEAD_FIELDS, fresh_directory


class CSVSink(Sink):
    """Writes steps.csv, heads.csv and alarms.csv into a folder, those of passes in evaluation mode with eval_ before
    their names; whatever is on disk stays, as with a run directory. The files can be read while training goes on.
    """

    kind: TableFormat = "csv"

    def __init__(self, path: str | Path = "qkeel-runs/tables") -> None:
        self.asked = Path(path)
        self.path: Path | None = None
        self._files: TableFiles | None = None

    def require(self) -> None:
        """Parquet needs pyarrow."""
        TableFiles(Path(), self.kind)

    def open(self, about: Mapping[str, object]) -> None:
        """Make the folder."""
        fields = about.get("fields")
        names = ("step", "layer", "head", *(fields if isinstance(fields, (list, tuple)) else HEAD_FIELDS))
        announced: dict[str, tuple[str, ...]] = dict.fromkeys(("heads", "eval_heads"), names)
        self.path = fresh_directory(self.asked)
        self._files = TableFiles(self.path, self.kind, announced)

    def write(self, sample: Sample) -> None:
        """One row of steps and one row of each head."""
        before = "eval_" if sample.phase == "eval" else ""
        step = np.array([sample.step])
        self._append(f"{before}steps", steps_frame(step, {k: np.array([float(v)]) for k, v in sample.values.items()}))
        heads = {name: values[None] for name, values in sample.heads.items()}
        self._append(f"{before}heads", heads_frame(step, sample.layers, heads))

    def alarm(self, alarm: Alarm) -> None:
        """One row."""
        head = -1 if alarm.head is None else alarm.head
        row = {"step": alarm.step, "severity": str(alarm.severity), "rule": alarm.rule, "layer": alarm.layer or ""}
        row |= {"head": head, "value": alarm.value, "text": str(alarm)}
        self._append("alarms", Frame({name: np.array([value]) for name, value in row.items()}))

    def close(self, complete: bool) -> None:
        """Write what is held back."""
        if self._files is not None:
            self._files.close()

    def _append(self, name: str, frame: Frame) -> None:
        if self._files is not None:
            self._files.append(name, frame)


class ParquetSink(CSVSink):
    """The same as Parquet files, which can be read when watching has ended: of a process that was killed they are not
    whole. A run directory is, and `qkeel export` makes the same files of it.
    """

    kind = "parquet"
