"""A table of named columns, and the two tables of a run: one row per step, one row per step, layer and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from qkeel.errors import needed
from qkeel.frames.markup import plain_table, tag
from qkeel.registry import lookup

Foreign = Any  # what a library makes that need not be installed: a DataFrame, an Axes
_SHOWN = 6  # rows at each end of what a notebook shows


@final
class Frame:
    """A table of `columns` of one length by name; a column is `frame["max_logit"]`, an array [rows]."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self.columns = dict(columns)

    def __getitem__(self, name: str) -> np.ndarray:
        return lookup("column", self.columns, name)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def to_pandas(self) -> Foreign:
        """Returns a pandas.DataFrame.

        Raises: MissingLibraryError if pandas is not installed.
        """
        with needed("to_pandas()", "'qkeel[frames]'"):
            import pandas  # pyright: ignore[reportMissingImports]
        return pandas.DataFrame(self.columns)

    def to_polars(self) -> Foreign:
        """Returns a polars.DataFrame.

        Raises: MissingLibraryError if polars is not installed.
        """
        with needed("to_polars()", "'qkeel[frames]'"):
            import polars  # pyright: ignore[reportMissingImports]
        return polars.DataFrame(self.columns)

    def __repr__(self) -> str:
        return f"<Frame of {len(self):,} rows: {', '.join(self.columns)}>"

    def _repr_html_(self) -> str:
        """The first and the last rows."""
        n = len(self)
        rows = [*range(min(n, _SHOWN)), *range(max(_SHOWN, n - _SHOWN), n)]
        lines = [[_cell(values[row]) for values in self.columns.values()] for row in rows]
        if n > len(rows):
            lines.insert(_SHOWN, ["…"] * len(self.columns))
        return tag("div", {}, tag("p", {}, f"{n:,} rows"), plain_table(self.columns, lines))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else str(value)


def steps_frame(steps: np.ndarray, values: Mapping[str, np.ndarray]) -> Frame:
    """One row per record: the step [n] and the numbers of the whole model, each [n].

    >>> steps_frame(np.array([0, 5]), {"max_logit": np.array([1.0, 2.0])})
    <Frame of 2 rows: step, max_logit>
    """
    return Frame({"step": np.asarray(steps).astype(np.int64), **{k: v for k, v in values.items() if k != "step"}})


def heads_frame(steps: np.ndarray, layers: Sequence[str], heads: Mapping[str, np.ndarray]) -> Frame:
    """One row per record, layer and head: step, layer, head, and the fields that were measured, NaN where one was not.

    steps [n]; layers: names, or () for layer 0, layer 1, …; heads: name -> [n layers heads] by records.HEAD_FIELDS.
    Heads that a layer does not have get no row, fields that were never measured no column.

    >>> heads_frame(np.array([0]), ["attn"], {"entropy": np.array([[[1.0, np.nan]]])})
    <Frame of 1 rows: step, layer, head, entropy>
    """
    measured = {name: values for name, values in heads.items() if not np.isnan(values).all()}
    if not measured:
        return Frame({"step": np.zeros(0, np.int64), "layer": np.zeros(0, object), "head": np.zeros(0, np.int64)})
    n, n_layers, n_heads = next(iter(measured.values())).shape
    names = np.array([layers[i] if layers else f"layer {i}" for i in range(n_layers)], dtype=object)
    step, layer, head = np.indices((n, n_layers, n_heads)).reshape(3, -1)
    there = np.any([~np.isnan(values.reshape(-1)) for values in measured.values()], axis=0)
    columns = {"step": np.asarray(steps).astype(np.int64)[step], "layer": names[layer], "head": head}
    return Frame({name: v.reshape(-1)[there] for name, v in {**columns, **measured}.items()})
