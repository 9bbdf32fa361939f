"""The pages of studies: charts and sections."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from qkeel.metrics import ALARM_THRESHOLD, Row
from qkeel.records import Heads
from qkeel.report import html as h
from qkeel.report.html import Chart, Finding, Markup, Page, Section
from qkeel.report.study import compare, other_findings, provenance
from qkeel.report.study.collect import RunData, StudyData
from qkeel.report.study.compare import PairedGain, collapses, gain_cell, judge, swatch
from qkeel.report.study.findings import accuracy_findings, chaos_findings, findings, floors_table, table_of
from qkeel.report.study.other_findings import by_modality
from qkeel.report.study.provenance import verdict_table

# The charts, their captions and their data; assets/charts.js draws them. Long runs are thinned by omitting records,
# never by averaging, so every point shown was recorded.

MAX_COLUMNS = 60  # largest number of steps in a head map
MAX_ROWS = 96  # largest number of heads in a head map; with more heads it shows layers
HEAD_FIELDS = ("max_logit", "entropy")
SERIES = ("max_logit", "entropy", "train_loss", "logit_change")
LENGTHS = Chart(
    "lengths",
    "Accuracy by position in a long text",
    "Share of next tokens predicted in each part of a text, one training length at a time, averaged over seeds, with "
    "one panel per post-hoc method. The curve of a form that extrapolates stays level or rises beyond the dashed line, "
    "the training length.",
    "Line charts: accuracy against position in the text, one line per attention form, one panel per post-hoc method.",
)
DRIFT = Chart(
    "drift",
    "Drift of the largest attention logit",
    "Largest attention logit over layers and heads, on a fixed held-out batch, at each logged step of the longer runs. "
    "Logarithmic axis; the red line is the alarm threshold.",
    "Line chart: largest attention logit against step for the longer runs.",
)
LOSS = Chart(
    "loss",
    "Held-out loss against learning rate",
    "Lines connect the means over seeds; dots are single seeds, and bars are their range. The flatter the line, the "
    "less the learning rate matters. The dots for one learning rate are side by side on a grey band, so that no dot "
    "hides another. A hollow dot marks a run whose attention collapsed. Dashed lines are the loss before training and "
    "that of a bigram model.",
    "Line chart: held-out loss against learning rate, one line per remedy.",
)
LOGITS = Chart(
    "logits",
    "Largest attention logit during training",
    "One panel per learning rate and one line per run, with a separate run for each seed. If a remedy has a cap, the "
    "logits are those before it. "
    "Logarithmic axis, shared by the panels; the red line is the alarm threshold.",
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
    "Root mean square change of the attention logits caused by one step, over heads, layers and all visible pairs of "
    "the fixed held-out batch, at each logged step. Logarithmic axis.",
    "Line charts: logit change per step against step, one panel per learning rate.",
)
TRAIN = Chart(
    "train",
    "Loss during training",
    "Loss of the training batch at each logged step (lines), and held-out loss when it was evaluated (dots). "
    "By default, lines are running means over the seeds of a remedy.",
    "Line charts: training loss against step, one panel per learning rate.",
)
HEADS = Chart(
    "heads",
    "Head by head",
    "Each row is one head, where 1·3 is head 3 of layer 1, and each column is a logged step. All panels and choices "
    "share one colour scale; black marks values at or below its lower end, such as a largest logit near zero or below."
    f" For a model with more than {MAX_ROWS} heads, the chart shows the worst head of each layer instead.",
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
    if any(len(run.metrics) > h.MAX_RECORDS for run in study.runs):
        notes += f" Long runs are drawn with {h.MAX_RECORDS} records, which include the peaks of the logit."
    if any(run.metrics and run.row is None for run in study.runs):
        notes += " A line that stops early is a run that failed or is not finished."
    return h.join(chart.figure("" if chart.name in ("lengths", "loss", "heads") else notes) for chart in present)


def chart_data(study: StudyData) -> dict[str, object]:
    """Returns everything that the charts need, as plain JSON values."""
    shown = [run for run in study.runs if run.metrics]
    return {
        "remedies": list(study.remedies),
        "unit": study.loss_unit(),
        "alarm": ALARM_THRESHOLD,
        "losses": [_loss_row(study, row) for row in study.rows()],
        "start": _start(study),
        "counted": None if (counted := study.counted_bigrams()) is None else h.rounded(counted),
        "runs": [_run(study, run) for run in shown],
        **_long(study),
    }


def _long(study: StudyData) -> dict[str, object]:
    """Returns the accuracy by position in long texts, as one curve per form, method and length, averaged over seeds.

    Returns {} if it was not measured.
    """
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
            "share": [h.rounded(sum(values) / len(values), 4) for values in zip(*several)],
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
        h.rounded(row["val_loss"]),
        h.rounded(row["max_logit"]),
        bool(row["collapsed"]),
    ]


def _run(study: StudyData, run: RunData) -> dict[str, object]:
    records = [run.metrics[i] for i in h.thin([record.get("max_logit") for record in run.metrics])]
    held = [(record["step"], record.get("val_loss")) for record in run.metrics if record.get("val_loss") is not None]
    return {
        "remedy": study.remedies.index(run.remedy),
        "lr": run.lr,
        "seed": run.seed,
        "role": run.role,
        "status": str(run.status),
        "step": [int(record["step"]) for record in records],
        "val_loss": [[int(step), h.rounded(value)] for step, value in held[:: max(1, len(held) // 60)]],
        "heads": head_maps(run.heads),
        **{name: [h.rounded(record.get(name)) for record in records] for name in SERIES},
    }


def head_maps(heads: Heads | None) -> dict[str, object] | None:
    """Returns the values of heads (layer by layer) by logged steps; for models with many heads, one head per layer."""
    if heads is None or not len(heads.steps) or "max_logit" not in heads.values:
        return None
    keep = np.unique(np.linspace(0, len(heads.steps) - 1, min(MAX_COLUMNS, len(heads.steps))).round().astype(int))
    names = [name for name in HEAD_FIELDS if name in heads.values]
    _, n_layers, n_heads = heads.values["max_logit"].shape
    folded = n_layers * n_heads > MAX_ROWS
    maps: dict[str, object] = {}
    for name in names:
        values = heads.values[name][keep]
        if folded:  # show the most critical head of each layer
            values = values.max(axis=2, keepdims=True) if name == "max_logit" else values.min(axis=2, keepdims=True)
        maps[name] = [h.series(row, 3) for row in values.reshape(len(keep), -1).T]
    labels = [f"{layer}" if folded else f"{layer}·{head}" for layer in range(n_layers) for head in range(n_heads)]
    return {
        "step": heads.steps[keep].tolist(),
        "rows": labels[::n_heads] if folded else labels,
        "folded": folded,
        **maps,
    }


def _start(study: StudyData) -> float | None:
    values = [row["init_loss"] for row in study.rows() if math.isfinite(row["init_loss"])]
    return h.rounded(sum(values) / len(values)) if values else None


# Every remedy against every other: a matrix of paired differences with intervals, for each learning rate.


def pairs(study: StudyData) -> list[PairedGain]:
    """Returns the gain of each remedy over each later remedy at each rate, corrected together by Holm's method."""
    rows = study.rows()
    present = [remedy for remedy in study.remedies if any(row["remedy"] == remedy for row in rows)]
    return judge(rows, [(a, b, lr) for lr in study.lrs() for a, b in itertools.combinations(present, 2)])


def pair_tables(study: StudyData) -> Markup:
    """Returns a matrix per learning rate; empty for two remedies, whose only comparison is shown above."""
    found = pairs(study)
    present = list(dict.fromkeys(name for gain in found for name in (gain.remedy, gain.baseline)))
    if len(present) < 3:
        return Markup("")
    judged = sum(gain.effect is not None for gain in found)
    text = (
        "Held-out loss of the column's remedy minus that of the row's remedy, as the mean over pairs of runs with the "
        "same seed. A positive value means that the row's remedy is "
        "better. Below it is the 95 % interval (Student's t), corrected "
        "by Holm's "
        f"method for all {judged} comparisons of this section. Grey means that the verdict is equal or undecided, or "
        "that a remedy collapsed."
    )
    parts: list[Markup] = [h.note(text)]
    for i, lr in enumerate(reversed(study.lrs())):
        here = {(gain.remedy, gain.baseline): gain for gain in found if gain.lr == lr}
        head = [*h.columns("Better by", kind="text"), *h.columns(*present)]
        body = [
            h.table_row(swatch(study, a), *(_cell(here, a, b, collapses(study.rows(), a, lr)) for b in present))
            for a in present
        ]
        matrix = h.table(f"Every pair at LR {h.rate(lr)}", head, body)
        parts.append(h.details(f"LR {h.rate(lr)}", matrix, shown=i == 0))
    return h.join(parts)


def _cell(here: dict[tuple[str, str], PairedGain], a: str, b: str, collapsed: bool) -> Markup:
    """Returns the gain of a over b, or the mirrored gain of b over a; `collapsed`: whether attention of a collapsed."""
    if a == b:
        return h.cell("", 0.0)
    other = here.get((b, a))
    gain = here.get((a, b)) or (other and other.reversed())
    if gain is None:
        return h.NOTHING
    return gain_cell(dataclasses.replace(gain, collapsed=collapsed), gain.over())


# The page about a study, or about single runs of the lab.

TITLES = {
    "extrapolation": "Length extrapolation",
    "lr": "Learning-rate study",
    "demo": "Learning-rate demo",
    "mla": "Latent-attention study",
    "multimodal": "Text and images in one sequence",
    "chaos": "Chaos study",
    "edge": "Edge of chaos",
    "transfer": "Transfer between sizes",
}


def study_page(study: StudyData) -> Page:
    """Returns the page about a study or about runs of the lab."""
    drawn = {name: part for name, part in study.parts().items() if charts(part)}
    # charts.js draws one part at a time, so a study in parts shows only charts for which every part has data.
    each = [charts(part) for part in drawn.values()] or [charts(study)]
    present = [chart for chart in each[0] if all(chart in others for others in each)]
    data = {"parts": {name: chart_data(part) for name, part in drawn.items()}} if drawn else chart_data(study)
    return Page(
        title=heading(study),
        meta=_meta(study),
        findings=_findings(study),
        mark=lambda text: _named(text, study.remedies),
        sections=_sections(study, present),
        data=data if present else None,
        drawing="charts.js",
        made=_made(study),
    )


def _sections(study: StudyData, present: Sequence[Chart]) -> list[Section]:
    parts = study.parts()
    choice = h.choices("part") if parts and present else ""
    wanted = _compares(study) and not parts and study.primary is None
    return [
        Section("nothing", "Nothing to draw yet", Markup("") if present else _nothing(study)),
        Section("verdict", "Counts" if study.primary else "Verdict", Markup("") if parts else _verdict(study)),
        Section("charts", "Charts", h.join([choice, figures(study, present)])),
        Section("modality", "By modality", by_modality(study) if other_findings.is_multimodal(study) else Markup("")),
        Section("chaos", "What rounding does", floors_table(study)),
        Section("accuracy", "Accuracy", table_of(study)),
        Section("ranking", "Secondary comparisons" if study.primary else "Ranking", _ranking(study)),
        Section("pairs", "Every pair", pair_tables(study) if wanted else Markup("")),
        *(Section(f"part-{i}", name, _part(part)) for i, (name, part) in enumerate(parts.items())),
        Section("without", "Runs without a result", compare.without_result(study)),
        Section(
            "remedies",
            "What each form computes" if other_findings.is_long(study) else "What each remedy does",
            provenance.remedies(study),
        ),
        Section("runs", "Every run", compare.every_run(study)),
        Section("provenance", "Provenance", provenance.provenance(study)),
        Section("definitions", "Definitions", provenance.definitions()),
    ]


def heading(study: StudyData) -> str:
    """Returns a short title for the page."""
    if study.name:
        return TITLES.get(study.name, f"{study.name[0].upper()}{study.name[1:]} study")
    if len(study.runs) == 1:
        run = study.runs[0]
        return f"{run.remedy} at LR {h.rate(run.lr)}"
    return f"{len(study.runs)} runs compared"


def _findings(study: StudyData) -> list[Finding]:
    """Returns the findings of the first screen or, for a study in parts, the lead of each part."""
    if other_findings.is_multimodal(study):
        return other_findings.modality_findings(study)
    if study.chaos:
        return chaos_findings(study)
    parts = study.parts()
    if parts:
        leads = {name: [f for f in _read(part) if f.kind == "lead"] for name, part in parts.items()}
        return [Finding(f.kind, f"{name}: {f.text}") for name, found in leads.items() for f in found]
    differs = provenance.unlike(study)
    text = f"These runs differ in {differs}: their losses are not comparable."
    return [*([Finding("caution", text)] if differs else []), *_read(study)]


def _read(study: StudyData) -> list[Finding]:
    """Returns the findings about long contexts if they were measured, otherwise those about remedies."""
    if other_findings.is_long(study):
        return other_findings.length_findings(study)
    return [*findings(study), *accuracy_findings(study)]


def _named(text: str, remedies: Sequence[str]) -> Markup:
    """Highlights the names of remedies in a sentence, because a name may be a common word such as "none"."""
    names = "|".join(re.escape(name) for name in sorted(remedies, key=len, reverse=True))
    parts = re.split(rf"(?<![\w:+])({names})(?![\w=+]|:\w)", text) if names else [text]
    return h.join(h.tag("span", {"class": "name"}, part) if i % 2 else part for i, part in enumerate(parts))


def _meta(study: StudyData) -> str:
    """Returns the size of the study in one line."""
    if len(study.runs) == 1:
        run = study.runs[0]
        steps = run.row["steps"] if run.row else None
        return f"seed {run.seed} · {run.status if steps is None else h.count(steps, 'step')} · run {run.run_id}"
    grid = [run for run in study.runs if run.role != "drift"]
    longer = len(study.runs) - len(grid)
    sizes = [
        h.count(len(study.runs), "run"),
        h.count(len({run.remedy for run in grid}), "variant") if grid else "",
        h.count(len({run.lr for run in grid}), "learning rate") if grid else "",
        h.count(len({run.seed for run in grid}), "seed") if grid else "",
        f"{h.count(longer, 'longer run')} for drift" if longer else "",
    ]
    return " · ".join(size for size in sizes if size)


def _part(part: StudyData) -> Markup:
    """Returns one part of a study: its findings except the lead, and its ranking."""
    mine = [f for f in _read(part) if f.kind != "lead"]
    return h.join([_verdict(part), h.finding_list(mine, lambda text: _named(text, part.remedies)), _ranking(part)])


def _verdict(study: StudyData) -> Markup:
    """Returns the answer above the charts; studies that do not compare remedies show their answer elsewhere."""
    return verdict_table(study) if _compares(study) else Markup("")


def _compares(study: StudyData) -> bool:
    """True if the study asks which remedy is better."""
    return not (other_findings.is_long(study) or other_findings.is_multimodal(study) or study.name == "chaos")


def _ranking(study: StudyData) -> Markup:
    if other_findings.is_long(study):
        return Markup("") if study.parts() else other_findings.comparison(study)
    table = compare.ranking(study)
    text = (
        "Sorted by the largest LR without collapse, then by LR sensitivity; click a heading to sort by it. "
        f"Losses and gains are means over seeds, in {study.loss_unit()}. Below gains and LR sensitivity is the "
        "95 % interval. Grey means that the verdict is equal or undecided, or that the remedy collapsed."
    )
    if study.primary and table:
        few = min(len({row["seed"] for row in study.rows() if row["lr"] == lr}) for lr in study.lrs())
        explained = (
            f"Only the gain of {study.primary['remedy']} at LR {h.rate(study.primary['lr'])} was named before "
            "the runs. All other gains, in grey, are secondary: each has a separate, uncorrected 95 % interval, "
            f"from which no verdict is drawn; some are based on only {h.count(few, 'seed')}."
        )
        return h.join(
            [
                h.note(explained),
                h.details("Gains, intervals and LR sensitivity of all remedies", h.join([h.note(text), table])),
            ]
        )
    return h.join([h.note(text), table]) if table else table


def _nothing(study: StudyData) -> Markup:
    where = (
        f"None of the {h.count(len(study.runs), 'run')} has written a record." if study.runs else "No run is listed."
    )
    again = " Run the command below again: finished runs are kept, and all others resume." if study.command else ""
    return h.empty_note(f"{where}{again} Then create this page again.")


def _made(study: StudyData) -> str:
    versions = sorted({str(run.env["qkeel"]) for run in study.runs if run.env.get("qkeel")})
    return f"Made by qkeel from runs of version {h.listing(versions)}." if versions else "Made by qkeel."


# The page of a precision study.

PrecisionTableRow = Mapping[str, float | str]
ERROR = Chart(
    "error",
    "Error of logits against their size",
    "Each line is a format and a kernel, solid for the computed error and dashed for the error predicted from norms "
    "alone. The red line is the tolerance. A line ends where numbers overflow.",
    "Line chart: error of logits against the largest logit, one line per format and kernel.",
)
_WORDS = {
    "data": "Logits",
    "logit": "Measured in logits",
    "output": "Measured in the output",
    "overflow": "Overflows at",
    "max_logit": "Largest logit",
    "logit_error": "Logit error, nats",
    "predicted_error": "… predicted",
    "output_error": "Output error",
    "flipped": "Top key flipped",
}


def precision_page(
    rows: Sequence[PrecisionTableRow],
    thresholds: Sequence[PrecisionTableRow],
    tolerance: float,
    made: Mapping[str, str],
    command: str,
) -> str:
    """Returns the HTML of the page.

    Args:
        rows: one row per size, from lab.studies.grids.rows.
        thresholds: the logits at which each format fails, from lab.studies.grids.thresholds.
        tolerance: the tolerance for logits in nats, and for the output relative to its norm.
        made: the date, system and versions.
        command: the command that reproduces the page.
    """
    what = (
        "Spread: independent logits with a growing standard deviation. Shifted: logits with standard deviation 1 "
        "around a growing mean, which does not change softmax but is rounded. Fused kernels read q, k and v in the "
        "format; eager kernels also store the scores in it. Nothing is trained. Each value is the size of the largest "
        f"logit at which rounding first changes logits by {h.number(tolerance)} nats (root mean square), or the output "
        f"by {h.number(100 * tolerance)} % of its norm; a dash means that this did not happen at any size tried."
    )
    harmed = [row for row in thresholds if any(isinstance(v, float) and math.isfinite(v) for v in row.values())]
    left = len(thresholds) - len(harmed)
    safe = (
        f" {left} of {len(thresholds)} settings are omitted, because their errors stay below both limits at every size."
        if left
        else ""
    )
    return Page(
        title="Where low precision loses attention",
        findings=_answer(thresholds, tolerance),
        sections=[
            Section("charts", "Charts", ERROR.figure()),
            Section("thresholds", "Thresholds", h.join([h.note(what + safe), _table("Thresholds", harmed)])),
            Section("sizes", "Every size", h.details(f"{len(rows):,} measurements", _table("Every size", rows))),
            Section("provenance", "Provenance", h.join([h.facts(made), h.make_again(command)])),
        ],
        data=_data(rows, tolerance),
        drawing="precision.js",
    ).html()


def _answer(thresholds: Sequence[PrecisionTableRow], tolerance: float) -> list[Finding]:
    """Returns the logit above which each format is too coarse, without a remedy and with each remedy."""
    found = [row for row in thresholds if row["data"] == "spread"]
    parts = [
        f"{row['format']} from a largest logit of {h.number(seen, 2)} on ({row['kernel']})"
        for row in found
        if row["remedy"] == "none" and math.isfinite(seen := _float(row["logit"]))
    ]
    if not parts:
        return [
            Finding("lead", f"Without a remedy, no format changes logits by {h.number(tolerance)} nats at these sizes.")
        ]
    lead = f"Rounding changes attention logits by {h.number(tolerance)} nats in {h.listing(parts)}."
    held = [r for r in dict.fromkeys(str(row["remedy"]) for row in found) if r != "none"]
    safe = [r for r in held if not any(math.isfinite(_float(row["logit"])) for row in found if row["remedy"] == r)]
    over = [row for row in found if row["remedy"] == "none" and math.isfinite(_float(row["overflow"]))]
    ends = [f"{row['format']} ({row['kernel']}) from {h.number(_float(row['overflow']), 2)} on" for row in over]
    texts = [f"It never does so with {h.listing(safe)}, because their logits stay small." if safe else ""]
    texts.append(f"Numbers overflow in {h.listing(ends)}." if ends else "")
    return [Finding("lead", lead), *(Finding("note", text) for text in texts if text)]


def _float(value: float | str) -> float:
    return value if isinstance(value, float) else math.nan


def _data(rows: Sequence[PrecisionTableRow], tolerance: float) -> dict[str, object]:
    names = ("data", "remedy", "format", "kernel")
    numbers = ("max_logit", "logit_error", "predicted_error", "output_error")
    points = [{n: row[n] for n in names} | {n: h.rounded(_float(row[n])) for n in numbers} for row in rows]
    return {"rows": points, "tolerance": tolerance}


def _table(title: str, rows: Sequence[PrecisionTableRow]) -> Markup:
    head = _columns(rows[0]) if rows else []
    body = [
        h.tag("tr", {}, *(h.words(v) if isinstance(v, str) else h.measured(v) for v in row.values())) for row in rows
    ]
    return h.table(title, head, body, sortable=True)


def _columns(row: PrecisionTableRow) -> list[Markup]:
    return [
        heading
        for name, value in row.items()
        for heading in h.columns(_WORDS.get(name, name.capitalize()), kind="text" if isinstance(value, str) else "num")
    ]
