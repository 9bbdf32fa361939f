"""Records as tables: a small frame of arrays with conversions to pandas, CSV, Parquet and matplotlib."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from qkeel.errors import needed
from qkeel.options import lookup

# Tables of named columns, and the tables of a run: one row per step, or per step, layer and head.

# An object of an optional library: a DataFrame, an Axes.
Foreign = Any


@final
class Frame:
    """A table with `columns` by name, all of the same length; `frame["max_logit"]` is an array [rows].

    >>> frame = Frame({"step": np.array([0, 5]), "loss": np.array([2.0, 1.5])})
    >>> frame["loss"].tolist()
    [2.0, 1.5]
    """

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self.columns = dict(columns)

    def __getitem__(self, name: str) -> np.ndarray:
        return lookup("column", self.columns, name)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def without(self, name: str) -> Frame:
        """Returns a copy of the frame without the column `name`."""
        return Frame({k: v for k, v in self.columns.items() if k != name})

    def to_pandas(self) -> Foreign:
        """Returns a pandas.DataFrame.

        Raises:
            MissingLibraryError: pandas is not installed.
        """
        with needed("to_pandas()", "pandas"):
            import pandas  # pyright: ignore[reportMissingImports]
        return pandas.DataFrame(self.columns)

    def to_csv(self, *, head: bool = True) -> str:
        """Returns the rows as comma-separated lines, after a line of the names if `head`; NaN is an empty cell."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if head:
            writer.writerow(self.columns)
        columns = []
        for values in self.columns.values():
            # NaN is the one value that differs from itself; `isnan` would raise an error for names.
            cells = values.tolist()
            columns.append(["" if cell != cell else cell for cell in cells])
        writer.writerows(zip(*columns, strict=True))
        return text.getvalue()

    def to_parquet(self, path: Path) -> None:
        """Writes the rows as a Parquet file.

        Raises:
            MissingLibraryError: pyarrow is not installed.
        """
        pyarrow = arrow()
        table = pyarrow.table(self.columns)
        pyarrow.parquet.write_table(table, path, compression="zstd")

    def __repr__(self) -> str:
        return f"<Frame of {len(self):,} rows: {', '.join(self.columns)}>"


def arrow() -> Foreign:
    """Returns the module pyarrow, with its submodule parquet.

    Raises:
        MissingLibraryError: pyarrow is not installed.
    """
    with needed("Parquet", "pyarrow"):
        import pyarrow.parquet
    return pyarrow


def steps_frame(steps: np.ndarray, values: Mapping[str, np.ndarray]) -> Frame:
    """Returns one row per record: the step [n] and the values of the whole model, each [n].

    >>> steps_frame(np.array([0, 5]), {"max_logit": np.array([1.0, 2.0])})
    <Frame of 2 rows: step, max_logit>
    """
    step = np.asarray(steps).astype(np.int64)
    return Frame({"step": step, **Frame(values).without("step").columns})


def heads_frame(
    steps: np.ndarray,
    layers: Sequence[str],
    heads: Mapping[str, np.ndarray],
    types: Mapping[str, str] | None = None,
) -> Frame:
    """Returns one row per record, layer and head, with the columns step, layer, head and the measured fields.

    There is no row for heads that a layer does not have and no column for fields that were never measured; a missing
    value is NaN.

    Args:
        steps: [n].
        layers: names, or () for layer 0, layer 1, …
        heads: name -> [n layers heads], with names in records.HEAD_FIELDS.
        types: layer -> its type, one of records.LAYER_TYPES; if any types are known, the table has a column for them,
            which is "" for layers of unknown type.

    >>> heads_frame(np.array([0]), ["attn"], {"entropy": np.array([[[1.0, np.nan]]])})
    <Frame of 1 rows: step, layer, head, entropy>
    """
    measured = {
        name: values for name, values in heads.items() if not np.isnan(values).all()
    }
    n, n_layers, n_heads = next(iter(measured.values()), np.zeros((0, 0, 0))).shape
    names = np.array(
        # As objects, the rows share one string per layer, which numpy's own strings would copy at the longest length.
        [layers[i] if layers else f"layer {i}" for i in range(n_layers)],
        dtype=object,
    )
    step, layer, head = np.indices((n, n_layers, n_heads)).reshape(3, -1)
    there = np.zeros(len(step), bool)
    for values in measured.values():
        there |= ~np.isnan(values.reshape(-1))
    columns = {"step": np.asarray(steps).astype(np.int64)[step], "layer": names[layer]}
    if types:
        of_layers = [types.get(name, "") for name in names]
        columns["type"] = np.array(of_layers, dtype=object)[layer]
    columns["head"] = head
    return Frame(
        {name: v.reshape(-1)[there] for name, v in {**columns, **measured}.items()}
    )


# Figures in matplotlib: one line per layer over the steps, and a heat map of heads.

# a legend lists at most this many lines; if there are more, the title explains the
# colors.
_NAMED = 8


def draw_lines(
    ax: Foreign, steps: np.ndarray, values: np.ndarray, names: Sequence[str], label: str
) -> None:
    """Draws one line per column of values [n k] over steps [n], on a log axis if the values span a factor of 30."""
    from matplotlib import colormaps  # pyright: ignore[reportMissingImports]

    # The last tenth of viridis is a yellow that hardly shows on white.
    colours = colormaps["viridis"](np.linspace(0, 0.9, max(len(names), 2)))
    for column, name, colour in zip(values.T, names, colours, strict=False):
        ax.plot(
            steps,
            column,
            color=colour,
            label=name,
            # A line through a single point draws nothing.
            marker="." if len(steps) < 3 else None,
        )
    if len(names) <= _NAMED:
        ax.legend()
    else:
        ax.set_title(
            f"from {names[0]} (dark) to {names[-1]} (light)", fontsize="medium"
        )
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() > 0 and finite.max() > 30 * finite.min():
        ax.set_yscale("log")
    ax.set(xlabel="optimizer step", ylabel=label)


def draw_heads(
    ax: Foreign, values: np.ndarray, names: Sequence[str], label: str
) -> None:
    """Draws a heat map of one record [layers heads]; heads that a layer does not have stay empty.

    The colours are those of a scale that is linear between -1 and 1 and logarithmic beyond.
    """
    from matplotlib import colors  # pyright: ignore[reportMissingImports]

    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    norm = colors.SymLogNorm(1.0, vmin=low, vmax=high)
    image = ax.imshow(
        values, aspect="auto", interpolation="nearest", cmap="viridis", norm=norm
    )
    ax.figure.colorbar(image, ax=ax, label=label)
    if len(names) <= 3 * _NAMED:
        ax.set_yticks(range(len(names)), names)
    ax.set(xlabel="head", ylabel="layer")
    ax.xaxis.get_major_locator().set_params(integer=True)
