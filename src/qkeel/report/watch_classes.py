"""What the page of a watched model says of token classes: who grows beside whom, and who looks at whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qkeel.metrics import drift
from qkeel.records import CLASS_FIELDS, fold_heads
from qkeel.report.formats import number
from qkeel.report.markup import Markup, join, tag
from qkeel.report.tables import cell, column, table
from qkeel.report.watched import Watched

_INDEX = {"query_competition": "|q| ratio", "key_competition": "|k| ratio"}


def class_names(run: Watched) -> list[str]:
    """The measured numbers that are split by token classes."""
    return [name for name in run.measured() if name.partition("/")[0] in CLASS_FIELDS]


def class_tables(runs: Sequence[Watched]) -> Markup:
    """Per run and layer, in the last sample: the competition index and how it moved, attention by pairs of classes."""
    parts = []
    for run in runs:
        names = class_names(run)
        if not names or not run.records:
            continue
        pairs = [name for name in names if name.startswith("class_mass/")]
        shown = [name for name in _INDEX if name in names]
        head = [column("Layer", "text")]
        for name in shown:
            head += [column(_INDEX[name]), column("since the start")]
        head += [column(f"{name.partition('/')[2].replace('->', ' → ')}, weight") for name in pairs]
        body = [_line(run, i, shown, pairs) for i in range(len(run.layers))]
        text = (
            "Ratio: mean norm of the longest class over that of the shortest, mean of the heads; beside it the factor "
            "by which it moved since the first sample. Weight: what queries of the first class give to all keys of the "
            "second, in brackets what they would give if they weighed all keys alike."
        )
        title = f"Token classes of {run.name} at step {run.steps[-1]:,}"
        parts += [tag("p", {}, text), table(title, head, body, sortable=True)]
    return join(parts)


def _line(run: Watched, layer: int, shown: Sequence[str], pairs: Sequence[str]) -> Markup:
    cells = []
    for name in shown:
        course = fold_heads(name, run.heads.values[name][:, layer])
        for value in (float(course[-1]), drift(course)):
            cells.append(cell("–" if np.isnan(value) else number(value), value))
    for name in pairs:
        value = float(fold_heads(name, run.heads.values[name][-1, layer]))
        uniform = run.heads.values.get(f"class_uniform_mass/{name.partition('/')[2]}")
        beside = "" if uniform is None else f"({number(float(fold_heads(name, uniform[-1, layer])))})"
        cells.append(cell("–" if np.isnan(value) else number(value), value, "" if np.isnan(value) else beside))
    return tag("tr", {}, tag("th", {"scope": "row"}, run.layers[layer]), *cells)
