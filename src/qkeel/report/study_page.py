"""The page about a study, or about single runs of the lab: one lead sentence, the charts, and one table."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from qkeel.metrics import ALARM_THRESHOLD, COLLAPSE_ENTROPY, Row
from qkeel.records import RunStatus
from qkeel.report import html as h
from qkeel.report.compare import (
    Cell,
    Difference,
    LongCell,
    cells,
    long_cells,
    primary_cell,
)
from qkeel.report.html import Chart, Markup, Page, Section
from qkeel.report.study_runs import DRIFT, GRID, RunData, StudyData

TITLES = {
    "extrapolation": "Length extrapolation",
    "lr": "Learning-rate study",
    "demo": "Learning-rate demo",
    "mla": "Latent-attention study",
    "multimodal": "Text and images in one sequence",
}


def study_page(study: StudyData) -> Page:
    """Returns the page about a study or about runs of the lab."""
    # charts.js draws one part at a time, so a study in parts shows only charts for which every part has data.
    parts = study.parts()
    drawn = {
        name: part_of_study
        for name, part_of_study in parts.items()
        if charts(part_of_study)
    } or {"": study}
    present = [
        chart
        for chart in charts(study)
        if all(chart in charts(part_of_study) for part_of_study in drawn.values())
    ]
    several = len(drawn) > 1
    data = (
        {
            "parts": {
                name: chart_data(part_of_study) for name, part_of_study in drawn.items()
            }
        }
        if several
        else chart_data(study)
    )
    versions = sorted(
        {str(run.env["qkeel"]) for run in study.runs if run.env.get("qkeel")}
    )
    return Page(
        title=heading(study),
        meta=_meta(study),
        lead=_long_lead(study) or _lead(study),
        cautions=_cautions(study),
        sections=[
            Section(
                "nothing",
                "Nothing to draw yet",
                Markup("") if present else _nothing(study),
            ),
            Section(
                "charts",
                "Charts",
                h.join(
                    [h.choices("part") if several else "", *_figures(study, present)]
                ),
            ),
            Section("table", "Every form and length", _long_table(study)),
            Section(
                "table",
                "Every remedy and rate",
                Markup("") if long_cells(study) else _table(study),
            ),
            Section("without", "Runs without a result", _without_result(study)),
            Section("provenance", "Provenance", _provenance(study)),
        ],
        data=data if present else None,
        drawing="charts.js",
        made=f"Made by qkeel from runs of version {h.listing(versions)}."
        if versions
        else "Made by qkeel.",
    )


def heading(study: StudyData) -> str:
    """Returns a short title for the page."""
    if study.name:
        return TITLES.get(study.name, f"{study.name[0].upper()}{study.name[1:]} study")
    if len(study.runs) == 1:
        run = study.runs[0]
        return f"{run.remedy} at LR {h.rate(run.lr)}"
    return f"{len(study.runs)} runs compared"


def _meta(study: StudyData) -> str:
    """Returns the size of the study in one line."""
    runs = [run for run in study.runs if run.role != DRIFT]
    sizes = [h.count(len(study.runs), "run")]
    for noun, values in (
        ("variant", {r.remedy for r in runs}),
        ("learning rate", {r.lr for r in runs}),
    ):
        sizes.append(h.count(len(values), noun))
    return " · ".join([*sizes, h.count(len({run.seed for run in runs}), "seed")])


# The lead: the one comparison, with its interval.


def _lead(study: StudyData) -> str:
    compared = primary_cell(study)
    unit = study.loss_unit()
    if compared is None:
        if len(study.runs) != 1 or study.runs[0].row is None:
            return ""
        row = study.runs[0].row
        return (
            f"Held-out loss {h.loss(row['val_loss'])} {unit}; it was {h.loss(row['init_loss'])} before training. "
            f"The largest attention logit was {h.number(row['max_logit'])}."
        )
    cell, baseline = compared
    assert cell.gain is not None
    side, interval = _less(cell.gain)
    several = len(study.parts()) > 1
    setting = (
        f"{cell.part}, LR {h.rate(cell.lr)}: the"
        if several
        else f"At LR {h.rate(cell.lr)}, the"
    )
    return (
        f"{setting} largest attention logit is {h.number(cell.max_logit)} with {cell.remedy} and "
        f"{h.number(baseline.max_logit)} with {baseline.remedy}; held-out loss is {h.loss(abs(cell.gain.mean))} {unit} "
        f"{side} with {cell.remedy} ({interval})."
    )


def _less(gain: Difference) -> tuple[str, str]:
    """Returns whether a loss is lower or higher, and the interval of how much."""
    side = "higher" if gain.mean < 0 else "lower"
    if gain.effect is None or math.isinf(gain.effect.high):
        return side, gain.interval()
    ends = sorted(
        [gain.effect.low, gain.effect.high]
        if side == "lower"
        else [-gain.effect.high, -gain.effect.low]
    )
    low, high = (h.loss(end) for end in ends)
    return side, f"95 % interval {low} to {high}, {h.count(gain.n, 'seed')}"


def _long_lead(study: StudyData) -> str:
    """Returns the share of accuracy that the second form keeps at the longest texts, compared with the first."""
    table = [cell for cell in long_cells(study) if cell.method == "none"]
    longest = max((cell.length for cell in table), default=0)
    # The first form in the study's order that is not the baseline, so that it does not depend on how the forms did.
    for cell in table:
        if cell.length == longest and cell.gain is not None:
            interval = cell.gain.interval()
            if cell.gain.effect is not None:
                interval = f"95 % interval {interval}"
            return (
                f"Tested on {longest:,} tokens, {cell.form} keeps {cell.kept:.2f} of its accuracy at the training "
                f"length, {h.signed(cell.gain.mean, 2)} against {study.baseline} ({interval})."
            )
    return ""


def _cautions(study: StudyData) -> list[str]:
    cautions = []
    differing = _unlike(study)
    if differing:
        cautions.append(
            f"These runs differ in {differing}: their losses are not comparable."
        )
    left = sum(run.row is None for run in study.runs)
    if left:
        cautions.append(
            f"{left} of {h.count(len(study.runs), 'run')} have no result and appear in no number."
        )
    return cautions


# The charts and their data; assets/charts.js draws them. Long runs are thinned by omitting records, never by averaging,
# so every point shown was recorded.

SERIES = ("max_logit", "entropy", "train_loss")
LENGTHS = Chart(
    "lengths",
    "Accuracy by position in a long text",
    "Share of next tokens predicted in each part of a text, one training length at a time, averaged over seeds, with "
    "one panel per post-hoc method. The curve of a form that extrapolates stays level or rises beyond the dashed line, "
    "the training length.",
    "Line charts: accuracy against position in the text, one line per attention form, one panel per post-hoc method.",
)
LONGER = Chart(
    "drift",
    "The longer runs: largest attention logit",
    "Largest attention logit over layers and heads, on a fixed held-out batch, at each logged step. Logarithmic axis; "
    "the red line is the alarm threshold.",
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
    "logits are those before it. Logarithmic axis, shared by the panels; the red line is the alarm threshold.",
    "Line charts: largest attention logit against step, one panel per learning rate.",
)
ENTROPY = Chart(
    "entropy",
    "Attention entropy during training",
    "Mean over query rows, heads and layers. Zero means that attention has collapsed: every row attends to a single "
    "key.",
    "Line charts: attention entropy against step, one panel per learning rate.",
)
TRAIN = Chart(
    "train",
    "Loss during training",
    "Loss of the training batch at each logged step (lines), and held-out loss when it was evaluated (dots). "
    "By default, lines are running means over the seeds of a remedy.",
    "Line charts: training loss against step, one panel per learning rate.",
)


def charts(study: StudyData) -> list[Chart]:
    """Returns the charts that have data, in reading order."""
    runs = [run for run in study.runs if run.metrics]
    grid = any(run.role != DRIFT for run in runs)
    long = any(run.long for run in runs)
    present = [
        (LENGTHS, any(line.get("segments") for run in runs for line in run.long)),
        (LOSS, len(study.finished) > 1 and not long),
        (LOGITS, grid),
        (LONGER, any(run.role == DRIFT for run in runs)),
        (ENTROPY, grid),
        (TRAIN, grid),
    ]
    return [chart for chart, has_data in present if has_data]


def _figures(study: StudyData, present: Sequence[Chart]) -> list[Markup]:
    note = ""
    if any(len(run.metrics) > h.MAX_RECORDS for run in study.runs):
        note += f" Long runs are drawn with {h.MAX_RECORDS} records, which include the peaks of the logit."
    if any(run.metrics and run.row is None for run in study.runs):
        note += " A line that stops early is a run that failed or is not finished."
    return [chart.figure("" if chart in (LENGTHS, LOSS) else note) for chart in present]


def chart_data(study: StudyData) -> dict[str, object]:
    """Returns everything that the charts need, as plain JSON values."""
    rows = [run.row for run in study.finished if run.row is not None]
    counted = [
        run.env["counted_bigrams"]
        for run in study.finished
        if run.env.get("counted_bigrams") is not None
    ]
    starts = [row["init_loss"] for row in rows if math.isfinite(row["init_loss"])]
    # Lists instead of objects: the names of fields would be most of the page.
    losses = [
        [
            study.remedies.index(row["remedy"]),
            row["lr"],
            row["seed"],
            h.rounded(row["val_loss"]),
            h.rounded(row["max_logit"]),
            bool(row["collapsed"]),
        ]
        for row in rows
    ]
    return {
        "remedies": list(study.remedies),
        "unit": study.loss_unit(),
        "alarm": ALARM_THRESHOLD,
        "losses": losses,
        "start": h.rounded(statistics.fmean(starts)) if starts else None,
        "counted": h.rounded(statistics.fmean(counted))
        if counted and len(counted) == len(rows)
        else None,
        "runs": [_curves(study, run) for run in study.runs if run.metrics],
        **_accuracy_curves(study),
    }


def _curves(study: StudyData, run: RunData) -> dict[str, object]:
    records = [
        run.metrics[i]
        for i in h.thin([record.get("max_logit") for record in run.metrics])
    ]
    held_out = [
        (record["step"], record["val_loss"])
        for record in run.metrics
        if record.get("val_loss") is not None
    ]
    return {
        "remedy": study.remedies.index(run.remedy),
        "lr": run.lr,
        "seed": run.seed,
        "role": run.role,
        "status": str(run.status),
        "step": [int(record["step"]) for record in records],
        "val_loss": [
            [int(step), h.rounded(value)]
            for step, value in held_out[:: max(1, len(held_out) // 60)]
        ],
        **{
            name: [h.rounded(record.get(name)) for record in records] for name in SERIES
        },
    }


def _accuracy_curves(study: StudyData) -> dict[str, object]:
    """Returns the accuracy by position in long texts, one curve per form, method and length, averaged over seeds; {} if
    it was not measured."""
    segments: dict[tuple[str, str, int], list[Sequence[float]]] = {}
    for run in study.runs:
        for line in run.long:
            if line.get("segments"):
                key = (run.remedy, line["posthoc"], line["test_length"])
                segments.setdefault(key, []).append(line["segments"])
    if not segments:
        return {}
    curves = [
        {
            "remedy": study.remedies.index(form),
            "method": method,
            "length": length,
            "share": [
                h.rounded(statistics.fmean(values), 4) for values in zip(*several)
            ],
        }
        for (form, method, length), several in segments.items()
    ]
    return {
        "long": curves,
        "context": next(
            run.config["data"]["context"] for run in study.runs if run.long
        ),
    }


# The one table.

Read = Callable[[RunData], float | None]


def _at_end(name: str) -> Read:
    return lambda run: run.metrics[-1].get(name) if run.metrics else None


def _ratio_at_end(above: str, below: str) -> Read:
    def read(run: RunData) -> float | None:
        last = run.metrics[-1] if run.metrics else {}
        top, bottom = last.get(above), last.get(below)
        return top / bottom if top is not None and bottom else None

    return read


# Columns that only some tasks have: accuracy of images, and numbers by modality.
_TASK_COLUMNS: Mapping[str, Read] = {
    "Held-out accuracy": lambda run: (run.row or {}).get("val_accuracy"),
    "BLEU": lambda run: (run.row or {}).get("val_bleu"),
    "Image loss": _at_end("val_loss/image"),
    "Caption loss": _at_end("val_loss/caption"),
    "Text loss": _at_end("val_loss/text"),
    "|q|, image / text": _ratio_at_end("query_norm/image", "query_norm/text"),
    "|k|, image / text": _ratio_at_end("key_norm/image", "key_norm/text"),
    "Text's weight on images, / even": _ratio_at_end(
        "attention_mass/text>image", "uniform_mass/text>image"
    ),
    "Images' weight on text, / even": _ratio_at_end(
        "attention_mass/image>text", "uniform_mass/image>text"
    ),
}


def _table(study: StudyData) -> Markup:
    """Returns one row per part, remedy and rate; empty if no run has finished."""
    table = cells(study)
    if not table:
        return Markup("")
    shown = {
        title: read
        for title, read in _TASK_COLUMNS.items()
        if any(read(run) is not None for cell in table for run in cell.runs)
    }
    in_parts = len({cell.part for cell in table}) > 1
    head = h.columns("Remedy", *["Part"] * in_parts, kind="text")
    head += h.columns(
        "LR",
        "Held-out loss",
        f"Better than {study.baseline} by",
        "Collapsed",
        "Largest logit",
        *shown,
    )
    body = [_row(study, cell, shown, in_parts=in_parts) for cell in table]
    text = (
        f"Held-out loss in {study.loss_unit()}: the mean over seeds, with their range below. Better by: held-out loss "
        f"of {study.baseline} minus that of the remedy, paired by seed (the same weights and batches), with a 95 % "
        "interval of the mean (Student's t) for each row alone; grey if it contains 0 or attention collapsed. "
        f"Collapsed: mean attention entropy under {COLLAPSE_ENTROPY:g} nats, or a loss that is NaN or no better than "
        "before training."
    )
    return h.join(
        [
            h.note(text),
            h.table(
                "Every remedy and rate",
                head,
                body,
                sortable=True,
            ),
        ]
    )


def _row(
    study: StudyData, cell: Cell, shown: Mapping[str, Read], *, in_parts: bool
) -> Markup:
    losses = list(cell.values("val_loss").values())
    spread = (
        f"{h.loss(min(losses))} to {h.loss(max(losses))}" if len(losses) > 1 else ""
    )
    parts = [
        *([h.words(cell.part)] if in_parts else []),
        h.cell(h.rate(cell.lr), cell.lr),
        h.cell(
            h.loss(statistics.fmean(losses)),
            statistics.fmean(losses),
            spread,
        ),
        _gain_cell(cell.gain, collapsed=bool(cell.collapsed)),
        h.cell(f"{cell.collapsed} of {len(cell.runs)}", cell.collapsed),
        h.cell(h.number(cell.max_logit), cell.max_logit),
    ]
    for read in shown.values():
        values = [value for run in cell.runs if (value := read(run)) is not None]
        parts.append(h.measured(statistics.fmean(values)) if values else h.NOTHING)
    return h.table_row(swatch(study, cell.remedy), *parts)


def _gain_cell(gain: Difference | None, *, collapsed: bool = False) -> Markup:
    if gain is None:
        return h.NOTHING
    return h.cell(
        h.signed(gain.mean),
        gain.mean,
        gain.interval(),
        "" if gain.clear and not collapsed else "faint",
    )


_LONG_COLUMNS = {
    "accuracy_train": "At the training length",
    "accuracy_nonrepeat": "At this length",
    "accuracy_repeat": "Repeated text",
}


def _long_table(study: StudyData) -> Markup:
    """Returns one row per form, post-hoc method and length; empty if the study has no long texts."""
    table = long_cells(study)
    if not table:
        return Markup("")
    shown = [
        name for name in _LONG_COLUMNS if any(name in cell.values for cell in table)
    ]
    in_parts = len({cell.part for cell in table}) > 1
    head = h.columns("Form", *["Part"] * in_parts, "Post hoc", kind="text")
    head += h.columns(
        "Length",
        *(_LONG_COLUMNS[name] for name in shown),
        "Kept",
        f"More than {study.baseline} by",
    )
    body = [_long_row(study, cell, shown, in_parts=in_parts) for cell in table]
    text = (
        "Share of next tokens predicted, in %, as means over seeds. Kept: accuracy at this length divided by that at "
        "the training length, as trained; with the difference from the first form, paired by seed, and its 95 % "
        "interval."
    )
    return h.join(
        [
            h.note(text),
            h.table(
                "Every form and length",
                head,
                body,
                sortable=True,
            ),
        ]
    )


def _long_row(
    study: StudyData, cell: LongCell, shown: Sequence[str], *, in_parts: bool
) -> Markup:
    parts = [
        *([h.words(cell.part)] if in_parts else []),
        h.words(cell.method),
        h.cell(f"{cell.length:,}", cell.length),
    ]
    for name in shown:
        values = cell.values.get(name)
        mean = math.nan if values is None else 100 * statistics.fmean(values.values())
        parts.append(h.NOTHING if values is None else h.cell(f"{mean:.1f}", mean))
    kept = h.cell(f"{cell.kept:.2f}", cell.kept)
    return h.table_row(
        swatch(study, cell.form),
        *parts,
        kept,
        _gain_cell(cell.gain),
    )


TABLE_SERIES = 8  # number of colours in assets/report.css


def swatch(study: StudyData, remedy: str) -> Markup:
    """Returns the remedy's name with its colour, which is the same everywhere on the page."""
    index = study.remedies.index(remedy)
    attributes = {
        "class": "swatch",
        "data-series": str(index % TABLE_SERIES),
        "data-round": str(index // TABLE_SERIES),
        "aria-hidden": "true",
    }
    return h.join([h.tag("span", attributes), remedy])


# Runs without a result.

_WAITING = {
    RunStatus.STARTED: (
        "unfinished",
        "They are still running or were stopped; the same command resumes them.",
    ),
    RunStatus.MISSING: (
        "missing",
        "They are planned, but have no directory yet; the same command runs them.",
    ),
}


def _without_result(study: StudyData) -> Markup:
    """Returns the failed, unfinished and missing runs with what is known about them; empty if there are none."""
    list_entries = []
    for run in study.runs:
        if run.status is RunStatus.FAILED:
            lines = [line for line in run.error.strip().splitlines() if line.strip()]
            title = h.join(
                [
                    _run_name(study, run),
                    ": ",
                    h.tag("strong", {}, f"failed{_reached(run)}"),
                ]
            )
            last = h.tag(
                "p",
                {"class": "error"},
                h.tag("code", {}, lines[-1] if lines else "no message was written"),
            )
            trace = (
                h.details("Traceback", h.tag("pre", {}, run.error.strip()))
                if len(lines) > 1
                else ""
            )
            list_entries.append(h.tag("li", {}, title, last, trace))
    for status, (word, hint) in _WAITING.items():
        runs = [run for run in study.runs if run.status is status]
        if runs:
            names = [
                h.tag("span", {"class": "run"}, _run_name(study, run), _reached(run))
                for run in runs
            ]
            head = h.tag(
                "strong",
                {},
                f"{h.count(len(runs), 'run')} {word}",
            )
            below = h.tag("p", {"class": "runs"}, *names)
            list_entries.append(
                h.tag(
                    "li",
                    {"class": "waiting"},
                    head,
                    h.tag("p", {}, hint),
                    below,
                )
            )
    return (
        h.tag("ul", {"class": "failures"}, *list_entries)
        if list_entries
        else Markup("")
    )


def _run_name(study: StudyData, run: RunData) -> Markup:
    role = "" if run.role == GRID else f" ({run.role})"
    return h.join(
        [swatch(study, run.remedy), f", LR {h.rate(run.lr)}, seed {run.seed}{role}"]
    )


def _reached(run: RunData) -> str:
    return f" after step {int(run.metrics[-1]['step']):,}" if run.metrics else ""


def _nothing(study: StudyData) -> Markup:
    text = (
        f"None of the {h.count(len(study.runs), 'run')} has written a record."
        if study.runs
        else "No run is listed."
    )
    advice = (
        " Run the command below again: finished runs are kept, and all others resume."
        if study.command
        else ""
    )
    return h.empty_note(f"{text}{advice} Then create this page again.")


# Provenance.

_MAX_VALUES = 8  # of one kind in the provenance; further values are counted


def _settings(value: object) -> str | None:
    if not isinstance(value, dict):
        return None
    texts = {
        k: json.dumps(v) if isinstance(v, (dict, list)) else str(v)
        for k, v in value.items()
        if v is not None
    }
    return ", ".join(f"{name} {text}" for name, text in texts.items() if name != "lr")


def _corpus(run: RunData, name: str) -> object:
    corpus = run.env.get("corpus")
    return corpus.get(name) if isinstance(corpus, dict) else None


_FACTS: Mapping[str, Callable[[RunData], object]] = {
    "qkeel": lambda run: run.env.get("qkeel"),
    "Commit": lambda run: run.env.get("commit"),
    "Python": lambda run: run.env.get("python"),
    "torch": lambda run: run.env.get("torch"),
    "System": lambda run: run.env.get("system"),
    "Processor": lambda run: run.env.get("cpu"),
    "Device": lambda run: run.env.get("device"),
    "Dtype": lambda run: run.env.get("dtype"),
    "Compiled kernels": lambda run: run.env.get("compiled_kernels"),
    "Corpus": lambda run: _corpus(run, "name"),
    "Corpus SHA-256": lambda run: _corpus(run, "sha256"),
    "Model": lambda run: _settings(run.config.get("model")),
    "Parameters": lambda run: run.env.get("n_parameters"),
    "Optimizer": lambda run: _settings(run.config.get("optim")),
    "Steps": lambda run: run.config.get("steps"),
}
# Runs whose losses are compared must agree in these facts.
_ALIKE = (
    "Corpus SHA-256",
    "Steps",
    "Model",
    "Dtype",
    "Device",
    "torch",
    "Processor",
    "Compiled kernels",
)


def _provenance(study: StudyData) -> Markup:
    """Returns the versions, machine, corpus, model, and the commands that reproduce the page's runs."""
    facts: dict[str, str | list[str]] = {}
    for name, read in _FACTS.items():
        values: list[str] = []
        for run in study.runs:
            value = read(run)
            is_count = isinstance(value, int) and not isinstance(value, bool)
            text = f"{value:,}" if is_count else str(value)
            if value is not None and text not in values:
                values.append(text)
        if len(values) > _MAX_VALUES:
            values = [
                *values[:_MAX_VALUES],
                f"and {h.count(len(values) - _MAX_VALUES, 'more value')}",
            ]
        if values:
            facts[name] = values
    if study.tuned:
        facts["Rates, chosen on other seeds"] = [
            _chosen(choice) for choice in study.tuned
        ]
    commands = dict.fromkeys(
        str(run.env["command"]) for run in study.runs if run.env.get("command")
    )
    return h.join([h.facts(facts), h.make_again(study.command or "\n".join(commands))])


def _chosen(choice: Row) -> str:
    """Returns the rate of a remedy, and whether it is at the border of the grid."""
    role = "" if choice.get("role") == GRID else f"{choice.get('role')}: "
    edge = f", the {choice['border']} of the grid" if choice.get("border") else ""
    return f"{role}{choice.get('remedy')} {choice.get('lr')}{edge}"


def _unlike(study: StudyData) -> str:
    """Returns the facts in which runs of one part differ, so that their losses are not comparable; "" if none."""
    names = [
        name
        for name in _ALIKE
        if not (name == "Model" and any(run.long for run in study.runs))
    ]
    differing = []
    for part_of_study in study.parts().values():
        differing += [
            name
            for name in names
            if len({str(_FACTS[name](run)) for run in part_of_study.finished}) > 1
        ]
    return h.listing(
        [name if name == "torch" else name.lower() for name in dict.fromkeys(differing)]
    )
