"""The charts of a page and the words around each; assets/charts.js draws them."""

from __future__ import annotations

from collections.abc import Sequence

from qkeel.report.html.figure import Chart
from qkeel.report.html.markup import Markup, join
from qkeel.report.html.series import MAX_RECORDS
from qkeel.report.study.chart_data import MAX_ROWS
from qkeel.report.study.collect import StudyData

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
    "Logarithmic axis; the dashed line is the alarm line.",
    "Line chart: largest attention logit against step for the longer runs.",
)
LOSS = Chart(
    "loss",
    "Held-out loss against learning rate",
    "Lines join the means over seeds; dots are single seeds, bars their range. The flatter the line, the less the "
    "learning rate matters. Remedies are drawn slightly apart, so that their dots do not hide each other. A hollow dot "
    "marks a run whose attention collapsed.",
    "Line chart: held-out loss against learning rate, one line per remedy.",
)
LOGITS = Chart(
    "logits",
    "Largest attention logit during training",
    "One panel per learning rate, one line per run (each seed its own), before the cap where a remedy has one. "
    "Logarithmic axis, shared by the panels; the dashed line is the alarm line.",
    "Line charts: largest attention logit against step, one panel per learning rate.",
)
ENTROPY = Chart(
    "entropy",
    "Attention entropy during training",
    "Mean over query rows, heads and layers. Zero means that attention has "
    "collapsed: every row attends to a single key.",
    "Line charts: attention entropy against step, one panel per learning rate.",
)
TRAIN = Chart(
    "train",
    "Loss during training",
    "Loss of the training batch at each logged step (lines), and held-out loss where it was evaluated (dots). "
    "The frame is fitted to what follows the first tenth of training.",
    "Line charts: training loss against step, one panel per learning rate.",
)
HEADS = Chart(
    "heads",
    "Head by head",
    "Each row is one head (layer·head), each column a logged step. All panels, and all choices, share one scale of "
    f"colour. A model of more than {MAX_ROWS} heads shows the worst head of each layer instead.",
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
