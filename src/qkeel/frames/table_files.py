"""Tables on disk, CSV or Parquet, that grow frame by frame."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Literal, final

import numpy as np

from qkeel.errors import caution, check_known, needed
from qkeel.frames.frame import Foreign, Frame
from qkeel.records import disk

TableFormat = Literal["csv", "parquet"]
TABLE_FORMATS: tuple[TableFormat, ...] = ("csv", "parquet")
_ROWS = 100_000  # rows of Parquet held back: a file has a row group for each write


@final
class TableFiles:
    """Files of one `folder`, NAME.csv or NAME.parquet by `kind`: `append("heads", frame)` adds the rows of a frame.

    A file's columns are those of its first frame, or those `announced` for it; what comes later and has no column is
    left out, with one warning. CSV can be read at every moment, Parquet after `close()`. NaN is an empty cell in CSV.

    Raises: MissingLibraryError for Parquet without pyarrow, UnknownNameError for another format.
    """

    def __init__(self, folder: Path, kind: str, announced: dict[str, tuple[str, ...]] | None = None) -> None:
        check_known("table format", kind, TABLE_FORMATS)
        self.folder, self.kind = folder, kind
        self._arrow: Foreign = None
        if kind == "parquet":
            with needed("Parquet", "'qkeel[frames]'"):
                import pyarrow
                import pyarrow.parquet
            self._arrow = pyarrow
        self._names = dict(announced or {})
        self._writers: dict[str, Foreign] = {}
        self._held: dict[str, list[Frame]] = {}
        self._left_out: set[str] = set()

    def append(self, name: str, frame: Frame) -> None:
        """Adds the rows of a frame."""
        names = self._names.setdefault(name, tuple(frame.columns))
        late = frame.columns.keys() - set(names) - self._left_out
        if late:
            self._left_out |= late
            caution(f"{', '.join(sorted(late))} came after {name}.{self.kind} was begun, and has no column there")
        unmeasured = np.full(len(frame), np.nan)
        frame = Frame({column: frame.columns.get(column, unmeasured) for column in names})
        if self.kind == "csv":
            path = self.folder / f"{name}.csv"
            disk.append(path, _lines(frame, head=not path.exists()).encode())
            return
        held = self._held.setdefault(name, [])
        held.append(frame)
        if sum(map(len, held)) >= _ROWS:
            self._write_held(name)

    def _write_held(self, name: str) -> None:
        frames, self._held[name] = self._held[name], []
        columns = {column: np.concatenate([f[column] for f in frames]) for column in self._names[name]}
        table = self._arrow.table(columns)
        if name not in self._writers:
            writer = self._arrow.parquet.ParquetWriter
            self._writers[name] = writer(str(self.folder / f"{name}.parquet"), table.schema, compression="zstd")
        self._writers[name].write_table(table.cast(self._writers[name].schema))

    def close(self) -> list[Path]:
        """Writes what is held back; returns the files."""
        for name, held in self._held.items():
            if held:
                self._write_held(name)
        for writer in self._writers.values():
            writer.close()
        return [path for name in self._names if (path := self.folder / f"{name}.{self.kind}").exists()]


def _lines(frame: Frame, *, head: bool) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if head:
        writer.writerow(frame.columns)
    columns = [[_cell(value) for value in values.tolist()] for values in frame.columns.values()]
    writer.writerows(zip(*columns, strict=True))
    return text.getvalue()


def _cell(value: object) -> object:
    return "" if isinstance(value, float) and math.isnan(value) else value
