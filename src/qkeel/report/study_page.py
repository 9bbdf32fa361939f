"""The page about a study, or about single runs of the lab: one lead sentence, the charts, and one table.

`render` writes it, `cli.run` again and again while a study runs.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from qkeel.metrics import ALARM_THRESHOLD, COLLAPSE_ENTROPY
from qkeel.report import html as h
from qkeel.report.compare import (
    Cell,
    Difference,
    LongCell,
    cells,
    long_cells,
    primary_cell,
)
from qkeel.report.study_runs import RunData, StudyData, as_number

TITLES = {
    "extrapolation": "Length extrapolation",
    "lr": "Learning-rate study",
    "demo": "Learning-rate demo",
    "mla": "Latent-attention study",
    "multimodal": "Text and images in one sequence",
}


def study_page(study: StudyData) -> dict[str, object]:
    """Returns what the page about a study or about runs of the lab shows."""
    # charts.js draws one part at a time, so a study in parts shows only charts for which every part has data.
    drawn = {name: part for name, part in study.parts().items() if charts(part)}
    drawn = drawn or {"": study}
    of_parts = [charts(part) for part in drawn.values()]
    present = [name for name in charts(study) if all(name in x for x in of_parts)]
    in_parts = len(drawn) > 1
    long_table = long_cells(study)
    table = _long_table(study, long_table) if long_table else _table(study)
    commands = dict[str, None]()
    for run in study.runs:
        if run.env.get("command"):
            commands[str(run.env["command"])] = None
    data = chart_data(study)
    if in_parts:
        data = {"parts": {name: chart_data(part) for name, part in drawn.items()}}
    return {
        "template": "study.html",
        "title": heading(study),
        "meta": _meta(study),
        "lead": _long_lead(study, long_table) or _lead(study),
        "cautions": _cautions(study),
        "charts": present,
        "in_parts": in_parts,
        "table": table if table.rows else None,
        "note": _LONG_NOTE if long_table else _note(study),
        "facts": _provenance(study),
        "again": study.command or "\n".join(commands),
        "data": data,
        "drawing": "charts.js",
        "made": "Made by qkeel.",
    }


def heading(study: StudyData) -> str:
    """Returns a short title for the page."""
    if study.name:
        return TITLES.get(study.name, f"{study.name[0].upper()}{study.name[1:]} study")
    if len(study.runs) == 1:
        return f"{study.runs[0].remedy} at LR {h.rate(study.runs[0].lr)}"
    return f"{len(study.runs)} runs compared"


def _meta(study: StudyData) -> str:
    """Returns the size of the study in one line."""
    runs = study.runs
    sizes = {
        "run": len(study.runs),
        "variant": len({run.remedy for run in runs}),
        "learning rate": len({run.lr for run in runs}),
        "seed": len({run.seed for run in runs}),
    }
    return " · ".join(h.count(size, noun) for noun, size in sizes.items())


# The lead: the one comparison, with its interval.


def _lead(study: StudyData) -> str:
    compared, unit = primary_cell(study), study.loss_unit()
    if compared is None:
        if len(study.runs) != 1:
            return ""
        row = study.runs[0].row
        if row is None:
            return ""
        return (
            f"Held-out loss {h.loss(row['val_loss'])} {unit}; it was {h.loss(row['init_loss'])} before training. "
            f"The largest attention logit was {h.number(row['max_logit'])}."
        )
    cell, baseline = compared
    gain = cell.gain
    assert gain is not None
    side, sign = ("higher", -1) if gain.mean < 0 else ("lower", 1)
    interval = gain.interval()
    if gain.effect is not None and math.isfinite(gain.effect.high):
        ends = sorted((sign * gain.effect.low, sign * gain.effect.high))
        low, high = map(h.loss, ends)
        interval = f"95 % interval {low} to {high}, {h.count(gain.n, 'seed')}"
    setting = f"At LR {h.rate(cell.lr)},"
    if len(study.parts()) > 1:
        setting = f"{cell.part}, LR {h.rate(cell.lr)}:"
    return (
        f"{setting} the largest attention logit is {h.number(cell.max_logit)} with {cell.remedy} and "
        f"{h.number(baseline.max_logit)} with {baseline.remedy}; held-out loss is {h.loss(abs(gain.mean))} {unit} "
        f"{side} with {cell.remedy} ({interval})."
    )


def _long_lead(study: StudyData, table: Sequence[LongCell]) -> str:
    """Returns the share of accuracy that the second form keeps at the longest texts, compared with the first."""
    trained = [cell for cell in table if cell.method == "none"]
    longest = max((cell.length for cell in trained), default=0)
    # The first form in the study's order that is not the baseline, so that it does not depend on how the forms did.
    for cell in trained:
        if cell.length == longest and cell.gain is not None:
            level = "95 % interval " if cell.gain.effect is not None else ""
            return (
                f"Tested on {longest:,} tokens, {cell.form} keeps {cell.kept:.2f} of its accuracy at the training "
                f"length, {h.signed(cell.gain.mean, 2)} against {study.baseline} ({level}{cell.gain.interval()})."
            )
    return ""


def _cautions(study: StudyData) -> list[str]:
    cautions = []
    differing = _unlike(study)
    if differing:
        cautions.append(
            f"These runs differ in {differing}: their losses are not comparable."
        )
    left = Counter(run.status for run in study.runs if run.row is None)
    if left:
        states = h.listing([f"{n} {status}" for status, n in left.items()])
        runs = h.count(len(study.runs), "run")
        cautions.append(
            f"{left.total()} of {runs} have no result and appear in no number: {states}. "
            "The same command runs and resumes them; the file FAILED in the directory of a failed run says why it failed."
        )
    return cautions


# The charts and their data; assets/charts.js draws them. Long runs are thinned by omitting records, never by averaging,
# so every point shown was recorded.

SERIES = ("max_logit", "entropy", "train_loss")


def charts(study: StudyData) -> list[str]:
    """Returns the names of the charts that have data."""
    runs = [run for run in study.runs if run.metrics]
    present = {
        "lengths": any(line.get("segments") for run in runs for line in run.long),
        "loss": len(study.finished) > 1 and not any(run.long for run in runs),
        **dict.fromkeys(("logits", "entropy", "train"), bool(runs)),
    }
    return [name for name, has_data in present.items() if has_data]


def chart_data(study: StudyData) -> dict[str, object]:
    """Returns everything that the charts need, as plain JSON values."""
    finished = [run.row for run in study.finished if run.row is not None]
    starts = [row["init_loss"] for row in finished if math.isfinite(row["init_loss"])]
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
        for row in finished
    ]
    return {
        "remedies": list(study.remedies),
        "unit": study.loss_unit(),
        "alarm": ALARM_THRESHOLD,
        "losses": losses,
        "start": h.rounded(statistics.fmean(starts)) if starts else None,
        "runs": [_curves(study, run) for run in study.runs if run.metrics],
        **_accuracy_curves(study),
    }


def _curves(study: StudyData, run: RunData) -> dict[str, object]:
    rows = h.thin([record.get("max_logit") for record in run.metrics])
    held_out = [
        [int(record["step"]), h.rounded(record["val_loss"])]
        for record in run.metrics
        if record.get("val_loss") is not None
    ]
    curves: dict[str, object] = {
        "remedy": study.remedies.index(run.remedy),
        "lr": run.lr,
        "seed": run.seed,
        "status": str(run.status),
        "step": [int(run.metrics[i]["step"]) for i in rows],
        "val_loss": held_out[:: max(1, len(held_out) // 60)],
    }
    for name in SERIES:
        curves[name] = [h.rounded(run.metrics[i].get(name)) for i in rows]
    return curves


def _accuracy_curves(study: StudyData) -> dict[str, object]:
    """Returns the accuracy by position in long texts, one curve per form, method and length, averaged over seeds; {} if
    it was not measured."""
    segments: dict[tuple[str, str, int], list[Sequence[float]]] = {}
    context = 0
    for run in study.runs:
        for line in run.long:
            context = run.config["data"]["context"]
            if line.get("segments"):
                key = (run.remedy, line["posthoc"], line["test_length"])
                segments.setdefault(key, []).append(line["segments"])
    curves = []
    for (form, method, length), of_seeds in segments.items():
        share = [h.rounded(statistics.fmean(values), 4) for values in zip(*of_seeds)]
        index = study.remedies.index(form)
        curves.append(
            {"remedy": index, "method": method, "length": length, "share": share}
        )
    return {"long": curves, "context": context} if curves else {}


# The one table.

# Columns that only some tasks have, with the number that they show or the two numbers whose ratio they show.
_TASK_COLUMNS: Mapping[str, Sequence[str]] = {
    "Held-out accuracy": ["val_accuracy"],
    "BLEU": ["val_bleu"],
    "Image loss": ["val_loss/image"],
    "Caption loss": ["val_loss/caption"],
    "Text loss": ["val_loss/text"],
    "|q|, image / text": ["query_norm/image", "query_norm/text"],
    "|k|, image / text": ["key_norm/image", "key_norm/text"],
    "Text's weight on images, / even": [
        "attention_mass/text>image",
        "uniform_mass/text>image",
    ],
    "Images' weight on text, / even": [
        "attention_mass/image>text",
        "uniform_mass/image>text",
    ],
}


def _task_value(cell: Cell, names: Sequence[str]) -> float | None:
    """Returns a number at the end of training, or the ratio of two, averaged over the runs that measured it."""
    values = []
    for run in cell.runs:
        # The row of the table has the values after training; some measures are only in the records.
        last = {**(run.metrics[-1] if run.metrics else {}), **(run.row or {})}
        numbers = [as_number(last.get(name)) for name in names]
        if 0 not in numbers[1:] and not any(map(math.isnan, numbers)):
            values.append(numbers[0] / math.prod(numbers[1:]))
    return statistics.fmean(values) if values else None


def _table(study: StudyData) -> h.Table:
    """Returns one row per part, remedy and rate."""
    table = cells(study)
    tasks = {
        title: names
        for title, names in _TASK_COLUMNS.items()
        if any(_task_value(cell, names) is not None for cell in table)
    }
    in_parts = len({cell.part for cell in table}) > 1
    rows = []
    for cell in table:
        losses = list(cell.values("val_loss").values())
        mean = statistics.fmean(losses)
        spread = ""
        if len(losses) > 1:
            spread = f"{h.loss(min(losses))} to {h.loss(max(losses))}"
        row = [
            *[h.Cell(cell.part)] * in_parts,
            h.cell(h.rate(cell.lr), cell.lr),
            h.cell(h.loss(mean), mean, spread),
            _gain_cell(cell.gain, collapsed=bool(cell.collapsed)),
            h.cell(f"{cell.collapsed} of {len(cell.runs)}", cell.collapsed),
            h.cell(h.number(cell.max_logit), cell.max_logit),
        ]
        for names in tasks.values():
            value = _task_value(cell, names)
            row.append(h.measured(math.nan if value is None else value))
        rows.append((swatch(study, cell.remedy), row))
    numbers = ["LR", "Held-out loss", f"Better than {study.baseline} by", "Collapsed"]
    return h.Table(
        title="Every remedy and rate",
        texts=["Remedy", *["Part"] * in_parts],
        numbers=[*numbers, "Largest logit", *tasks],
        rows=rows,
    )


def _note(study: StudyData) -> str:
    return (
        f"Held-out loss in {study.loss_unit()}: the mean over seeds, with their range below. Better by: held-out loss "
        f"of {study.baseline} minus that of the remedy, paired by seed (the same weights and batches), with a 95 % "
        "interval of the mean (Student's t) for each row alone; grey if it contains 0 or attention collapsed. "
        f"Collapsed: mean attention entropy under {COLLAPSE_ENTROPY:g} nats, or a loss that is NaN or no better than "
        "before training."
    )


def _gain_cell(gain: Difference | None, *, collapsed: bool = False) -> h.Cell:
    if gain is None:
        return h.NOTHING
    kind = "" if gain.clear and not collapsed else "faint"
    return h.cell(h.signed(gain.mean), gain.mean, gain.interval(), kind)


_LONG_COLUMNS = {
    "accuracy_train": "At the training length",
    "accuracy_nonrepeat": "At this length",
    "accuracy_repeat": "Repeated text",
}


_LONG_NOTE = (
    "Share of next tokens predicted, in %, as means over seeds. Kept: accuracy at this length divided by that at "
    "the training length, as trained; with the difference from the first form, paired by seed, and its 95 % interval."
)


def _long_table(study: StudyData, table: Sequence[LongCell]) -> h.Table:
    """Returns one row per form, post-hoc method and length."""
    shown = [
        name for name in _LONG_COLUMNS if any(name in cell.values for cell in table)
    ]
    in_parts = len({cell.part for cell in table}) > 1
    rows = []
    for cell in table:
        row = [
            *[h.Cell(cell.part)] * in_parts,
            h.Cell(cell.method),
            h.cell(f"{cell.length:,}", cell.length),
        ]
        for name in shown:
            values = cell.values.get(name)
            mean = 100 * statistics.fmean(values.values()) if values else math.nan
            row.append(h.cell(f"{mean:.1f}", mean) if values else h.NOTHING)
        row += [h.cell(f"{cell.kept:.2f}", cell.kept), _gain_cell(cell.gain)]
        rows.append((swatch(study, cell.form), row))
    accuracies = [_LONG_COLUMNS[name] for name in shown]
    return h.Table(
        title="Every form and length",
        texts=["Form", *["Part"] * in_parts, "Post hoc"],
        numbers=["Length", *accuracies, "Kept", f"More than {study.baseline} by"],
        rows=rows,
    )


# Number of colours in assets/report.css.
TABLE_SERIES = 8


def swatch(study: StudyData, remedy: str) -> h.Swatch:
    """Returns the remedy's name with its colour."""
    turn, series = divmod(study.remedies.index(remedy), TABLE_SERIES)
    return h.Swatch(remedy, series, turn)


# Provenance.

# Where each fact is found: in the environment or the configuration of a run.
_FACTS: Mapping[str, Sequence[str]] = {
    "qkeel": ("env", "qkeel"),
    "Commit": ("env", "commit"),
    "Python": ("env", "python"),
    "torch": ("env", "torch"),
    "System": ("env", "system"),
    "Processor": ("env", "cpu"),
    "Device": ("env", "device"),
    "Dtype": ("env", "dtype"),
    "Compiled kernels": ("env", "compiled_kernels"),
    "Corpus": ("env", "corpus", "name"),
    "Corpus SHA-256": ("env", "corpus", "sha256"),
    "Model": ("config", "model"),
    "Parameters": ("env", "n_parameters"),
    "Optimizer": ("config", "optim"),
    "Steps": ("config", "steps"),
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


def _fact(run: RunData, name: str) -> str:
    """Returns a fact about a run as text; "" if it is unknown."""
    value: object = {"env": run.env, "config": run.config}
    for key in _FACTS[name]:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        settings = []
        for key, setting in value.items():
            # A rate is what a study varies, so it is no fact about all of its runs.
            if setting is not None and key != "lr":
                is_nested = isinstance(setting, (dict, list))
                settings.append(
                    f"{key} {json.dumps(setting) if is_nested else setting}"
                )
        return ", ".join(settings)
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return "" if value is None else f"{value:,}" if is_count else str(value)


def _provenance(study: StudyData) -> dict[str, list[str]]:
    """Returns the versions, machine, corpus and model of the page's runs."""
    facts: dict[str, list[str]] = {}
    for name in _FACTS:
        values = list(dict.fromkeys(_fact(run, name) for run in study.runs))
        values = [value for value in values if value]
        if values:
            facts[name] = values
    return facts


def _unlike(study: StudyData) -> str:
    """Returns the facts in which runs of one part differ, so that their losses are not comparable; "" if none."""
    differing = dict[str, None]()
    for part in study.parts().values():
        for name in _ALIKE:
            # A study of lengths compares forms of attention, which differ as models.
            may_differ = name == "Model" and any(run.long for run in study.runs)
            if not may_differ and len({_fact(run, name) for run in part.finished}) > 1:
                differing[name if name == "torch" else name.lower()] = None
    return h.listing(list(differing))
