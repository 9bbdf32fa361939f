"""The table of token classes on the page of a watched model: norms of a class over another's, attention by pairs."""

from __future__ import annotations

from collections.abc import Sequence

from qkeel.metrics import drift
from qkeel.records import CLASS_FIELDS, fold_heads
from qkeel.report.html.formats import number
from qkeel.report.html.markup import Markup, columns, join, measured, table, table_row, tag
from qkeel.report.watch.watched_run import Watched

_INDEX = {"query_competition": "|q| ratio", "key_competition": "|k| ratio"}


def class_names(run: Watched) -> list[str]:
    """Returns the measured numbers that are split by token classes."""
    return [name for name in run.measured() if name.partition("/")[0] in CLASS_FIELDS]


def class_tables(runs: Sequence[Watched]) -> Markup:
    """Returns a table per run of its last sample, by layer: competition index and its change, attention by pairs."""
    parts = []
    for run in runs:
        names = class_names(run)
        if not names or not run.records:
            continue
        pairs = [name for name in names if name.startswith("class_mass/")]
        shown = [name for name in _INDEX if name in names]
        head = columns("Layer", kind="text")
        for name in shown:
            head += columns(_INDEX[name], "since the start")
        head += columns(*(f"{name.partition('/')[2].replace('->', ' → ')}, weight" for name in pairs))
        body = [_line(run, i, shown, pairs) for i in range(len(run.layers))]
        text = (
            "Ratio: mean norm of the class with the longest vectors over that of the class with the shortest, mean of "
            "the heads; next to it the factor by which it changed since the first sample. Weight: what queries of the "
            "first class give to all keys of the second; in brackets what they would give if all keys counted alike."
        )
        title = f"Token classes of {run.name} at step {run.steps[-1]:,}"
        parts += [tag("p", {}, text), table(title, head, body, sortable=True)]
    return join(parts)


def _line(run: Watched, layer: int, shown: Sequence[str], pairs: Sequence[str]) -> Markup:
    cells = []
    for name in shown:
        course = fold_heads(name, run.heads.values[name][:, layer])
        for value in (float(course[-1]), drift(course)):
            cells.append(measured(value))
    for name in pairs:
        value = float(fold_heads(name, run.heads.values[name][-1, layer]))
        uniform = run.heads.values.get(f"class_uniform_mass/{name.partition('/')[2]}")
        even = "" if uniform is None else f"({number(float(fold_heads(name, uniform[-1, layer])))})"
        cells.append(measured(value, even))
    return table_row(run.layers[layer], *cells)
