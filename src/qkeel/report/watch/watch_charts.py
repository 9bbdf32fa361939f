"""The charts on the page of a watched model; assets/watch.js draws them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qkeel.report.html.figure import Chart
from qkeel.report.watch.watch_classes import class_names
from qkeel.report.watch.watch_findings import norm_product
from qkeel.report.watch.watched_run import Watched

RUNS = Chart(
    "runs",
    "The runs side by side",
    "The largest attention logit of each run. Logarithmic axis; the dashed line is the alarm line.",
    "Line chart: largest attention logit against step, one line per run.",
)
GROWTH = Chart(
    "growth",
    "Largest attention logit",
    "Thin lines: the largest logit of each layer, coloured by depth. Thick line: the largest of the model, with the "
    "head that leads now. Logarithmic axis; logits under 0.1 are drawn at its lower end. Dots are alarms, hollow dots "
    "are samples in evaluation mode.",
    "Line chart: largest attention logit against step, one line per layer.",
)
MAP = Chart(
    "map",
    "Head by head, last sample",
    "Each cell is one head. Empty cells were not measured, or the layer has fewer heads.",
    "Heat map: one row per layer, one column per head.",
)
ENTROPY = Chart(
    "entropy",
    "Attention entropy",
    "Mean over query rows and heads. Zero means that attention has collapsed: every row attends to a single key. Thick "
    "line: the mean of the model.",
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
    "The loss of the training batch, as the training loop reported it. The frame is fitted to what follows the first "
    "tenth of training.",
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
