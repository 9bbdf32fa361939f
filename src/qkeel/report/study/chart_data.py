"""The data that the page's charts draw, small enough to carry along. Only records as they were written are shown:
long runs are thinned by leaving records out, never by averaging."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qkeel.metrics import ALARM_THRESHOLD, Row
from qkeel.records import Heads
from qkeel.report.html.series import rounded, series, thin
from qkeel.report.study.collect import RunData, StudyData

MAX_COLUMNS = 60  # steps of a head map
MAX_ROWS = 96  # heads of a head map before it is folded to layers
HEAD_FIELDS = ("max_logit", "entropy")
SERIES = ("max_logit", "entropy", "train_loss")


def chart_data(study: StudyData) -> dict[str, object]:
    """Returns everything the charts need, as plain JSON values."""
    shown = [run for run in study.runs if run.metrics]
    return {
        "remedies": list(study.remedies),
        "unit": study.loss_unit(),
        "alarm": ALARM_THRESHOLD,
        "losses": [_loss_row(study, row) for row in study.rows()],
        "start": _start(study),
        "unigram": _unigram(study),
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


def _unigram(study: StudyData) -> float | None:
    """The loss of always guessing by frequency, where the corpus says it."""
    for run in study.runs:
        corpus = run.env.get("corpus")
        value = corpus.get("unigram_loss") if isinstance(corpus, dict) else None
        if isinstance(value, (int, float)):
            return rounded(value)
    return None
