"""The charts of a page, the words around each, and the data that they draw; assets/charts.js draws them.

Only records as they were written are shown: long runs are thinned by leaving records out, never by averaging.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qkeel.metrics import ALARM_THRESHOLD, Row
from qkeel.records import Heads
from qkeel.report.html.formats import MAX_RECORDS, rounded, series, thin
from qkeel.report.html.markup import Markup, join
from qkeel.report.html.page import Chart
from qkeel.report.study.collect import RunData, StudyData

MAX_COLUMNS = 60  # steps of a head map
MAX_ROWS = 96  # heads of a head map before it is folded to layers
HEAD_FIELDS = ("max_logit", "entropy")
SERIES = ("max_logit", "entropy", "train_loss", "logit_change")
LENGTHS = Chart(
    "lengths",
    "Accuracy by position in a long text",
    "Share of next tokens predicted in each stretch of one training length, mean over seeds; one panel per post-hoc "
    "method. The curve of a form that extrapolates stays level or rises behind the dashed line, the training length.",
    "Line charts: accuracy against position in the text, one line per attention form, one panel per post-hoc method.",
)
DRIFT = Chart(
    "drift",
    "Drift of the largest attention logit",
    "Largest attention logit over layers and heads, on a fixed held-out batch, at each logged step of the longer runs. "
    "Logarithmic axis; the red line is the alarm line.",
    "Line chart: largest attention logit against step for the longer runs.",
)
LOSS = Chart(
    "loss",
    "Held-out loss against learning rate",
    "Lines join the means over seeds; dots are single seeds, bars their range. The flatter the line, the less the "
    "learning rate matters. The dots of one learning rate stand side by side on its grey band, so that none hides "
    "another. A hollow dot marks a run whose attention collapsed.",
    "Line chart: held-out loss against learning rate, one line per remedy.",
)
LOGITS = Chart(
    "logits",
    "Largest attention logit during training",
    "One panel per learning rate, one line per run (each seed its own), before the cap where a remedy has one. "
    "Logarithmic axis, shared by the panels; the red line is the alarm line.",
    "Line charts: largest attention logit against step, one panel per learning rate.",
)
ENTROPY = Chart(
    "entropy",
    "Attention entropy during training",
    "Mean over query rows, heads and layers. Zero means that attention has "
    "collapsed: every row attends to a single key.",
    "Line charts: attention entropy against step, one panel per learning rate.",
)
CHANGE = Chart(
    "change",
    "Logit change per step",
    "Root mean square change of the attention logits by one step, over heads, layers and all visible pairs of the "
    "fixed held-out batch, at each logged step. Logarithmic axis.",
    "Line charts: logit change per step against step, one panel per learning rate.",
)
TRAIN = Chart(
    "train",
    "Loss during training",
    "Loss of the training batch at each logged step (lines), and held-out loss where it was evaluated (dots). "
    "As drawn first, lines are running means over the seeds of a remedy.",
    "Line charts: training loss against step, one panel per learning rate.",
)
HEADS = Chart(
    "heads",
    "Head by head",
    "Each row is one head: 1·3 is head 3 of layer 1. Each column is a logged step. All panels, and all choices, share "
    "one scale of colour; black is its lower end, or less: a head whose largest logit is near zero or below it."
    f" A model of more than {MAX_ROWS} heads shows the worst head of each layer instead.",
    "Heat maps: one row per head, one column per logged step.",
)


def charts(study: StudyData) -> list[Chart]:
    """Returns the charts that have data, in reading order."""
    runs = [run for run in study.runs if run.metrics]
    grid = any(run.role != "drift" for run in runs)
    long = any(run.long for run in runs)
    present = [
        (LENGTHS, any(line.get("segments") for run in runs for line in run.long)),
        (DRIFT, any(run.role == "drift" for run in runs)),
        (LOSS, len(study.rows()) > 1 and not long),
        (LOGITS, grid),
        (ENTROPY, grid),
        (CHANGE, grid and any(record.get("logit_change") for run in runs for record in run.metrics)),
        (TRAIN, grid),
        (HEADS, any(run.heads is not None and len(run.heads.steps) for run in runs)),
    ]
    return [chart for chart, wanted in present if wanted]


def figures(study: StudyData, present: Sequence[Chart]) -> Markup:
    """Returns the figures, empty until charts.js fills them."""
    notes = ""
    if any(len(run.metrics) > MAX_RECORDS for run in study.runs):
        notes += f" Of long runs {MAX_RECORDS} records are drawn; peaks of the logit are kept."
    if any(run.metrics and run.row is None for run in study.runs):
        notes += " A line that stops early is a run that failed or is not finished."
    return join(chart.figure("" if chart.name in ("lengths", "loss", "heads") else notes) for chart in present)


def chart_data(study: StudyData) -> dict[str, object]:
    """Returns everything the charts need, as plain JSON values."""
    shown = [run for run in study.runs if run.metrics]
    return {
        "remedies": list(study.remedies),
        "unit": study.loss_unit(),
        "alarm": ALARM_THRESHOLD,
        "losses": [_loss_row(study, row) for row in study.rows()],
        "start": _start(study),
        "runs": [_run(study, run) for run in shown],
        **_long(study),
    }


def _long(study: StudyData) -> dict[str, object]:
    """Accuracy by position in long texts: a curve per form, method and length, mean over seeds; {} without any."""
    found: dict[tuple[str, str, int], list[Sequence[float]]] = {}
    for run in study.runs:
        for line in run.long:
            if line.get("segments"):
                found.setdefault((run.remedy, line["posthoc"], line["test_length"]), []).append(line["segments"])
    curves = [
        {
            "remedy": study.remedies.index(form),
            "method": method,
            "length": length,
            "share": [rounded(sum(values) / len(values), 4) for values in zip(*several)],
        }
        for (form, method, length), several in found.items()
    ]
    if not curves:
        return {}
    context = next(run.config["data"]["context"] for run in study.runs if run.long)
    return {"long": curves, "context": context}


def _loss_row(study: StudyData, row: Row) -> list[object]:
    return [
        study.remedies.index(row["remedy"]),
        row["lr"],
        row["seed"],
        rounded(row["val_loss"]),
        rounded(row["max_logit"]),
        bool(row["collapsed"]),
    ]


def _run(study: StudyData, run: RunData) -> dict[str, object]:
    records = [run.metrics[i] for i in thin([record.get("max_logit") for record in run.metrics])]
    held = [(record["step"], record.get("val_loss")) for record in run.metrics if record.get("val_loss") is not None]
    return {
        "remedy": study.remedies.index(run.remedy),
        "lr": run.lr,
        "seed": run.seed,
        "role": run.role,
        "status": str(run.status),
        "step": [int(record["step"]) for record in records],
        "val_loss": [[int(step), rounded(value)] for step, value in held[:: max(1, len(held) // 60)]],
        "heads": head_maps(run.heads),
        **{name: [rounded(record.get(name)) for record in records] for name in SERIES},
    }


def head_maps(heads: Heads | None) -> dict[str, object] | None:
    """Returns rows (layer by layer, head by head) by logged steps; a model of many heads is folded to its layers."""
    if heads is None or not len(heads.steps) or "max_logit" not in heads.values:
        return None
    keep = np.unique(np.linspace(0, len(heads.steps) - 1, min(MAX_COLUMNS, len(heads.steps))).round().astype(int))
    names = [name for name in HEAD_FIELDS if name in heads.values]
    _, n_layers, n_heads = heads.values["max_logit"].shape
    folded = n_layers * n_heads > MAX_ROWS
    maps: dict[str, object] = {}
    for name in names:
        values = heads.values[name][keep]
        if folded:  # the head that would worry most
            values = values.max(axis=2, keepdims=True) if name == "max_logit" else values.min(axis=2, keepdims=True)
        maps[name] = [series(row, 3) for row in values.reshape(len(keep), -1).T]
    labels = [f"{layer}" if folded else f"{layer}·{head}" for layer in range(n_layers) for head in range(n_heads)]
    return {
        "step": heads.steps[keep].tolist(),
        "rows": labels[::n_heads] if folded else labels,
        "folded": folded,
        **maps,
    }


def _start(study: StudyData) -> float | None:
    values = [row["init_loss"] for row in study.rows() if math.isfinite(row["init_loss"])]
    return rounded(sum(values) / len(values)) if values else None
