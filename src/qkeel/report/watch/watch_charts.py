"""The charts of a watched model and their data; assets/watch.js draws them. Records are left out, not averaged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qkeel.metrics import ALARM_THRESHOLD, Row
from qkeel.records import Heads, fold_heads, head_field
from qkeel.report.html.formats import MAX_RECORDS, series, thin
from qkeel.report.html.page import Chart
from qkeel.report.watch.watch_classes import class_names
from qkeel.report.watch.watch_findings import norm_product
from qkeel.report.watch.watched_run import Watched, overall

RUNS = Chart(
    "runs",
    "The runs side by side",
    "Largest attention logit, entropy or training loss of each run. The red line is the alarm line of logits.",
    "Line chart: the chosen number against step, one line per run.",
)
GROWTH = Chart(
    "growth",
    "Largest attention logit",
    "Thin lines: the largest logit of each layer, coloured by depth. Pale band: the largest of the model, with the "
    "head that leads now. Logarithmic axis; logits under 0.1 are drawn at its lower end. Dots are alarms, hollow dots "
    "are samples in evaluation mode; vertical lines are what an autopilot did, with its reasons under the pointer.",
    "Line chart: largest attention logit against step, one line per layer.",
)
MAP = Chart(
    "map",
    "Head by head, last sample",
    "Each cell is one head. Empty cells were not measured, or the layer has fewer heads. "
    "Where values have both signs, white is zero.",
    "Heat map: one row per layer, one column per head.",
)
ENTROPY = Chart(
    "entropy",
    "Attention entropy",
    "Mean over query rows and heads. Zero means that attention has collapsed: every row attends to a single key. Pale "
    "band: the mean of the model.",
    "Line chart: attention entropy against step, one line per layer.",
)
NORMS = Chart(
    "norms",
    "Length of queries and keys",
    "Mean L2 norm as they enter the dot product, by layer. Logarithmic axis.",
    "Two line charts: query norm and key norm against step, one line per layer.",
)
ANGLE = Chart(
    "angle",
    "Is it the norms or the angle?",
    "A logit is scale · |q| · |k| · cosine. Each dot is a head in the last sample; the line is the path of the leading "
    "head. To the right: its norms grew. Upwards: its q and k turned towards each other.",
    "Scatter plot: largest cosine against norm product, one dot per head, with the course of the leading head.",
)
LOSS = Chart(
    "loss",
    "Training loss",
    "The loss of the training batch, as the training loop reported it.",
    "Line chart: training loss against step.",
)
MORE = Chart(
    "more",
    "Any other number, by layer",
    "One line per layer, coloured by depth; a layer's heads are folded as the definitions below say.",
    "Line chart: the chosen number against step, one line per layer.",
)
EXTRA = ("cos_max", "logit_change_rms", "gain_bound")


def charts(runs: Sequence[Watched]) -> list[Chart]:
    """Returns the charts that have data, in reading order."""
    shown = [run for run in runs if run.records]
    measured = {name for run in shown for name in run.measured()}
    present = [
        (RUNS, len(shown) > 1),
        (GROWTH, _any(shown, "max_logit")),
        (MAP, bool(measured)),
        (ENTROPY, _any(shown, "entropy")),
        (NORMS, bool({"query_norm", "key_norm"} & measured)),
        (ANGLE, "cos_max" in measured and any(norm_product(run) is not None for run in shown)),
        (MORE, any(name in measured for name in EXTRA) or any(map(class_names, shown))),
        (LOSS, _any(shown, "train_loss")),
    ]
    return [chart for chart, wanted in present if wanted]


def _any(runs: Sequence[Watched], name: str) -> bool:
    return any(np.isfinite(run.overall(name)).any() for run in runs)


LINES = ("max_logit", "entropy", "query_norm", "key_norm", "cos_max", "logit_change_rms", "gain_bound")
VALUES = ("max_logit", "entropy", "train_loss", "val_loss", "grad_norm", "lr", "final_hidden_norm")
MOST_LINES = 120_000  # numbers of all lines of a page: about 600 KB
MOST_CELLS = 60_000  # numbers of all head maps of a page
LEAST_RECORDS = 30


def chart_data(runs: Sequence[Watched]) -> dict[str, object]:
    """Returns everything the charts need, as plain JSON values."""
    shown = [run for run in runs if run.records]
    width = sum(max(1, len(run.layers)) * len((*LINES, *class_names(run))) for run in shown)
    most = int(min(MAX_RECORDS, max(LEAST_RECORDS, MOST_LINES // max(1, width))))
    names = {name for run in shown for name in run.heads.values} | set(LINES)
    fields = {name: field for name in sorted(names) if (field := head_field(name)) is not None}
    known = {n: {"meaning": _meaning(n, f.meaning), "unit": f.unit} for n, f in fields.items()}
    return {
        "alarm": ALARM_THRESHOLD,
        "fields": known,
        "runs": [_run(run, most, MOST_CELLS // len(shown)) for run in shown],
    }


def _meaning(name: str, meaning: str) -> str:
    of = name.partition("/")[2]
    return f"{meaning}: {of}" if of else meaning


def _run(run: Watched, most: int, cells: int) -> dict[str, object]:
    rows = np.array(thin(run.overall("max_logit").tolist(), most))
    head, names = run.leader(), (*class_names(run), *LINES)
    return {
        "name": run.name,
        "status": str(run.status),
        "step": [run.steps[i] for i in rows],
        "values": {name: series(values[rows]) for name in VALUES if np.isfinite(values := run.overall(name)).any()},
        "layers": short_names(run.layers),
        "lines": {name: _lines(run.heads, name, rows) for name in names if name in run.measured()},
        "leader": None if head is None else {"layer": head.layer, "head": head.head, **_leading(run, rows)},
        "last": _last(run, cells),
        "alarms": [_alarm(run, alarm) for alarm in run.alarms],
        "interventions": _interventions(run),
        "eval": _evaluation(run),
    }


def short_names(layers: Sequence[str]) -> list[str]:
    """Returns layer names without the words that all share, front and back.

    >>> short_names(["model.layers.0.self_attn", "model.layers.1.self_attn"])
    ['0', '1']
    """
    parts = [name.split(".") for name in layers]
    if len(parts) < 2:
        return list(layers)
    least = min(map(len, parts))
    front = next((i for i in range(least) if len({p[i] for p in parts}) > 1), least)
    back = next((i for i in range(least - front) if len({p[-1 - i] for p in parts}) > 1), least - front)
    short = [".".join(p[front : len(p) - back]) for p in parts]
    return short if all(short) and len(set(short)) == len(short) else list(layers)


def _lines(heads: Heads, name: str, rows: np.ndarray) -> list[list[float | int | None]]:
    """One line per layer, folded over heads."""
    return [series(line) for line in fold_heads(name, heads.values[name][rows]).T]


def _leading(run: Watched, rows: np.ndarray) -> dict[str, object]:
    """The numbers of the leading head in each record, which show whether its norms or its angle grew."""
    head, product = run.leader(), norm_product(run)
    if head is None:
        return {}
    found = {"max_logit": run.heads.values["max_logit"], "cos_max": run.heads.values.get("cos_max"), "norm": product}
    return {
        name: series(values[rows, head.layer, head.head])
        for name, values in found.items()
        if values is not None and not np.isnan(values).all()
    }


def _last(run: Watched, cells: int) -> dict[str, object] | None:
    """[layer][head] of each field in the last sample, the fields of LINES first, as many as there is room for."""
    if not run.records or not run.heads.values:
        return None
    measured = [name for name in run.measured() if not np.isnan(run.heads.values[name][-1]).all()]
    ordered = [*(n for n in LINES if n in measured), *(n for n in measured if n not in LINES)]
    size = run.heads.values[ordered[0]][-1].size if ordered else 1
    fields = {n: [series(line, 3) for line in run.heads.values[n][-1]] for n in ordered[: max(2, cells // size)]}
    product = norm_product(run)
    norm = {} if product is None else {"norm": [series(line, 3) for line in product[-1]]}
    return {"step": run.steps[-1], "fields": fields, **norm} if fields else None


def _alarm(run: Watched, alarm: Row) -> dict[str, object]:
    layer = alarm.get("layer")
    return {
        "step": int(alarm["step"]),
        "severity": str(alarm.get("severity")),
        "rule": str(alarm.get("rule")),
        "layer": run.layers.index(layer) if layer in run.layers else None,
        "head": alarm.get("head"),
    }


def _interventions(run: Watched) -> list[dict[str, object]]:
    """The decisions of each step that changed anything, with their sentences."""
    found: dict[int, list[Row]] = {}
    for event in run.interventions:
        if event.get("event") == "decision" and event.get("action") != "watch_closer":
            found.setdefault(int(event["step"]), []).append(event)
    return [
        {
            "step": step,
            "label": ", ".join(dict.fromkeys(f"{'−' if e.get('release') else ''}{e.get('action')}" for e in own)),
            "text": "\n".join(str(e.get("text")) for e in own),
        }
        for step, own in found.items()
    ]


def _evaluation(run: Watched) -> dict[str, object]:
    found = {name: overall(run.eval_records, run.eval_heads, name) for name in ("max_logit", "entropy", "val_loss")}
    every = max(1, len(run.eval_records) // MAX_RECORDS)
    steps = [int(record["step"]) for record in run.eval_records]
    return {"step": steps[::every], **{n: series(v[::every]) for n, v in found.items() if np.isfinite(v).any()}}
