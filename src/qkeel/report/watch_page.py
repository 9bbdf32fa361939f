"""The page about watched runs: a verdict with the fix, the alarms, charts and tables.

Shapes: n samples, layers, heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from qkeel.frames.run_verdict import judge_run
from qkeel.metrics import ALARM_THRESHOLD, HARMFUL_LOGIT, Row, Status, judged
from qkeel.records import (
    BLOCK_FIELDS,
    CLASS_FIELDS,
    HEAD_FIELDS,
    LAYER_FIELDS,
    LINEAR,
    MONITOR_EXTREMES,
    MONITOR_FIELDS,
    VALUE_FIELDS,
    RunStatus,
    head_field,
    measured_field,
)
from qkeel.report import html as h
from qkeel.report.html import Chart, Markup, Page, Section
from qkeel.report.watched_runs import Watched, overall


def watch_page(runs: Sequence[Watched]) -> Page:
    """Returns the page about watched runs."""
    present = charts(runs)
    empty = h.empty_note(
        "Nothing is recorded yet: no forward pass in training mode was seen."
    )
    models = list(dict.fromkeys(str(run.about.get("model") or "model") for run in runs))
    several = len(runs) > 1
    return Page(
        title=f"{h.count(len(runs), 'watched run')} of {h.listing(models)}"
        if several
        else f"{models[0]}, watched",
        meta=_meta(runs),
        lead="" if several else _lead(runs[0]),
        cautions=[f"{run.name}: {verdict(run)[1]}" for run in runs]
        if several
        else cautions(runs[0]),
        sections=[
            Section("nothing", "Nothing to draw yet", Markup("") if present else empty),
            Section("alarms", "Alarms", _alarms(runs)),
            Section("interventions", "What the autopilot did", _interventions(runs)),
            Section("charts", "Charts", _figures(runs, present)),
            Section("compared", "The runs", _compared(runs) if several else Markup("")),
            Section("layers", "Layer by layer, last sample", _layers(runs)),
            Section("watched", "What was watched", _facts(runs)),
            Section("definitions", "Definitions", _definitions(runs)),
        ],
        data=chart_data(runs) if present else None,
        drawing="watch.js",
    )


def _meta(runs: Sequence[Watched]) -> str:
    if len(runs) > 1:
        return " · ".join(
            f"{run.name}: {h.count(len(run.records), 'sample')}" for run in runs
        )
    run = runs[0]
    size, optimizer = run.about.get("parameters"), run.about.get("optimizer")
    parts = [
        h.count(size, "parameter") if isinstance(size, int) else "",
        h.count(len(run.layers or run.about.get("sites") or ()), "attention layer"),
        optimizer if isinstance(optimizer, str) else "",
        h.count(run.steps[-1], "step") if run.records else "",
        h.count(len(run.records), "sample"),
        f"run {run.name}",
    ]
    return " · ".join(phrase for phrase in parts if phrase)


# The verdict, and the fix of the most severe alarm.

CAUSE = "attention logits have grown too large"  # the default for alarms recorded without a cause
_WHY = (
    "An attention logit is the score of a key for a query, before the softmax. "
    f"Above {h.number(HARMFUL_LOGIT)}, the softmax gives nearly all the weight to one key: "
    "the head hardly learns, and the final loss is higher or training diverges."
)
_APPLY = re.compile(
    r'qkeel\.apply\((?:model, )?"([^"]+)"'
)  # runs of 0.1.0 have the remedy before the model


def verdict(run: Watched) -> tuple[str, str]:
    """Returns the traffic light (good, large, bad, or none if nothing is known) and one sentence about the run.

    The sentence is that of `qkeel check`.
    """
    if not run.records:
        return "none", "Nothing is recorded yet."
    if "max_logit" not in run.heads.values or not len(run.heads.steps):
        largest = float(np.fmax.reduce(run.overall("max_logit"), initial=math.nan))
        status, sentence = judged(largest)
    else:
        health = judge_run(run.heads, [*run.alarms, *run.interventions])
        status, sentence, largest = health.status, health.sentence, health.largest
    light = {
        Status.HEALTHY: "good",
        Status.NOT_HEALTHY: "bad",
        Status.NOT_KNOWN: "none",
    }[status]
    if status is Status.HEALTHY and largest > ALARM_THRESHOLD:
        light = "large"
    return light, f"{sentence[0].upper()}{sentence[1:]}."


def _grave(run: Watched) -> list[Row]:
    return [alarm for alarm in run.alarms if alarm.get("severity") != "notice"]


def _place(alarm: Row) -> str:
    """Returns the location of an alarm, like `, h.3.attn head 5`, as far as it is known."""
    layer, head = alarm.get("layer"), alarm.get("head")
    return (
        ""
        if layer is None
        else f", {layer}" + ("" if head is None else f" head {head}")
    )


def fix(run: Watched) -> list[str]:
    """Returns the fix for the most severe alarms: a shell command if one started the run, and the line of code.

    The list is empty if there is nothing to do or if an autopilot is already active.
    """
    lines = [str(alarm["remedy"]) for alarm in _grave(run) if alarm.get("remedy")]
    if run.acted or not lines:
        return []
    applied = _APPLY.search(lines[0])
    watcher, dashes, command = str(run.env.get("watcher") or "").partition(" -- ")
    if applied is None or not dashes:
        return [lines[0]]
    return [f"{watcher} --apply {applied[1]} -- {command}", lines[0]]


def _lead(run: Watched) -> Markup:
    """Returns the traffic light, its sentence, and the fix with a button that copies it."""
    light, text = verdict(run)
    dot = h.tag("span", {"class": "light", "aria-hidden": "true"})
    parts = [
        h.tag(
            "p",
            {"class": f"lead signal signal-{light}"},
            dot,
            h.tag("span", {}, text),
        )
    ]
    if light in ("large", "bad"):
        parts.append(h.tag("p", {"class": "why"}, _WHY))
    lines = fix(run)
    if lines:
        todo = (
            "start the run again with this command:"
            if len(lines) > 1
            else "after the optimizer is created:"
        )
        fixes = [
            h.tag(
                "p",
                {"class": "todo"},
                h.tag("strong", {}, "What to do:"),
                f" {todo}",
            ),
            h.tag(
                "div", {"class": "remedy-line"}, h.command_block(lines[0], "Copy fix")
            ),
        ]
        if len(lines) > 1:
            code = h.tag("code", {}, lines[1])
            fixes.append(
                h.tag(
                    "p",
                    {"class": "source"},
                    "Or in the script, after the optimizer is created: ",
                    code,
                )
            )
        parts.append(h.tag("div", {"class": "fix"}, *fixes))
    return h.join(parts)


def cautions(run: Watched) -> list[str]:
    """Returns what limits the verdict: layers that are not watched, an unfinished run, notes of the monitor."""
    texts = []
    missed = [site for site in run.about.get("missed") or () if isinstance(site, dict)]
    if missed:
        watched = len(run.about.get("sites") or ())
        reasons = "; ".join(
            f"{site.get('module') or 'the model itself'}: {site.get('reason')}"
            for site in missed
        )
        text = f"{watched} of {watched + len(missed)} attention layers were watched. Not understood: {reasons}."
        texts.append(text)
    linear = [name for name, kind in run.types.items() if kind == LINEAR]
    if linear:
        texts.append(
            f"Layers without logits, for which nothing is measured: {h.listing(linear)}."
        )
    if run.status is not RunStatus.DONE and run.records:
        texts.append(
            f"The run has not finished; the page shows it up to step {run.steps[-1]:,}."
        )
    notes = list(dict.fromkeys(str(note.get("event")) for note in run.notes))
    return texts + ([f"Noted while watching: {h.listing(notes)}."] if notes else [])


# Alarms, and what an autopilot did about them.

_GRAVITY = ("notice", "alarm", "critical")


def _alarms(runs: Sequence[Watched]) -> Markup:
    """Returns one card per cause: since when it has existed, what was observed at which step, and the fix."""
    entries = []
    for run in runs:
        causes: dict[str, list[Row]] = {}
        for alarm in run.alarms:
            causes.setdefault(str(alarm.get("cause") or CAUSE), []).append(alarm)
        entries += [
            _card(run, cause, alarms, run.name if len(runs) > 1 else "")
            for cause, alarms in causes.items()
        ]
    return h.tag("ul", {"class": "alarms"}, *entries) if entries else Markup("")


def _card(run: Watched, cause: str, alarms: Sequence[Row], name: str) -> Markup:
    gravest = max(
        (str(alarm.get("severity")) for alarm in alarms),
        key=lambda s: (*_GRAVITY, s).index(s),
    )
    since = f"since step {alarms[0]['step']:,}" + (f", {name}" if name else "")
    title = (
        h.tag("strong", {"class": "severity"}, gravest),
        f" {cause[0].upper()}{cause[1:]} {since}",
    )
    course = []
    for alarm in alarms:
        trend = f"; {alarm['trend']}" if alarm.get("trend") else ""
        course.append(
            h.tag(
                "li",
                {},
                f"Step {alarm['step']:,}{_place(alarm)}: {alarm.get('meaning')}{trend}.",
            )
        )
    grave = [alarm for alarm in alarms if alarm.get("severity") != "notice"] or alarms
    advised = list(
        dict.fromkeys(str(alarm["remedy"]) for alarm in grave if alarm.get("remedy"))
    )
    fixes = [
        h.tag("div", {"class": "remedy-line"}, h.command_block(line))
        for line in advised[:1]
    ]
    if run.acted and cause == CAUSE:
        fixes = [
            h.tag(
                "p",
                {"class": "source"},
                "The autopilot responds to this alarm; its actions are listed below.",
            )
        ]
    sources = dict.fromkeys(
        str(alarm["source"]) for alarm in alarms if alarm.get("source")
    )
    about = h.tag(
        "ul",
        {},
        *(h.tag("li", {"class": "source"}, source) for source in sources),
    )
    thresholds = h.details("Where the thresholds come from", about) if sources else ""
    body = (
        h.tag("p", {}, *title),
        h.tag("ol", {"class": "course"}, *course),
        *fixes,
        thresholds,
    )
    return h.tag("li", {"class": f"alarm-{gravest}"}, *body)


def _interventions(runs: Sequence[Watched]) -> Markup:
    """Returns each decision, refusal and effect; equal decisions at several sites share one entry."""
    entries = []
    for run in runs:
        by_action: dict[object, list[Row]] = {}
        for event in run.interventions:
            key = tuple(
                event.get(name)
                for name in ("event", "step", "action", "release", "reason")
            )
            by_action.setdefault(key, []).append(event)
        for events in by_action.values():
            first = events[0]
            kind = (
                "release"
                if first.get("release")
                else str(first.get("action") or first.get("event"))
            )
            strong = h.tag("strong", {"class": "severity"}, kind.replace("_", " "))
            sentences = [
                h.tag("p", {"class": "source"}, str(event.get("text")))
                for event in events[1:]
            ]
            folded = (
                [
                    h.details(
                        f"at {h.count(len(sentences), 'more site')}", h.join(sentences)
                    )
                ]
                if sentences
                else []
            )
            text = h.tag(
                "p",
                {},
                strong,
                f" {first.get('text')}",
            )
            entries.append(h.tag("li", {"class": "alarm-notice"}, text, *folded))
    return h.tag("ul", {"class": "alarms"}, *entries) if entries else Markup("")


# The charts and their data; assets/watch.js draws them. Long runs are thinned by omitting records, not by averaging.

RUNS = Chart(
    "runs",
    "The runs side by side",
    "Largest attention logit, entropy or training loss of each run. The red line is the alarm threshold for logits.",
    "Line chart: the chosen metric against step, one line per run.",
)
GROWTH = Chart(
    "growth",
    "Largest attention logit",
    "Thin lines: the largest logit of each layer, coloured by depth. Pale band: the model's largest logit, labelled "
    "with the head that currently has it. Logarithmic axis; logits under 0.1 are drawn at its lower end. Dots are "
    "alarms, and hollow dots are untrained passes. Vertical lines are actions of an autopilot; hover over a "
    "line for the reason.",
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
    "Norms of queries and keys",
    "Mean L2 norm of queries and keys as they enter the dot product, by layer. Logarithmic axis.",
    "Two line charts: query norm and key norm against step, one line per layer.",
)
LOSS = Chart(
    "loss",
    "Training loss",
    "The loss of the training batch, as the training loop reported it.",
    "Line chart: training loss against step.",
)
MORE = Chart(
    "more",
    "Any other metric, by layer",
    "One line per layer, coloured by depth; a layer's heads are aggregated as defined below.",
    "Line chart: the chosen metric against step, one line per layer.",
)
LINES = (
    "max_logit",
    "entropy",
    "query_norm",
    "key_norm",
)  # fields with a chart of their own
VALUES = (
    "max_logit",
    "entropy",
    "train_loss",
    "val_loss",
    "grad_norm",
    "lr",
    "final_hidden_norm",
)
MAX_LINES = 120_000  # values in all lines of a page, about 600 KB
MAX_CELLS = 60_000  # values in all head maps of a page
MIN_RECORDS = 30


def charts(runs: Sequence[Watched]) -> list[Chart]:
    """Returns the charts that have data, in reading order."""
    shown = [run for run in runs if run.records]
    measured = {name for run in shown for name in run.measured()}

    def has(name: str) -> bool:
        return any(np.isfinite(run.overall(name)).any() for run in shown)

    present = [
        (RUNS, len(shown) > 1),
        (GROWTH, has("max_logit")),
        (MAP, bool(measured)),
        (ENTROPY, has("entropy")),
        (NORMS, bool({"query_norm", "key_norm"} & measured)),
        (MORE, any(more_fields(run) for run in shown)),
        (LOSS, has("train_loss")),
    ]
    return [chart for chart, has_data in present if has_data]


def more_fields(run: Watched) -> list[str]:
    """Returns the further values by layer that were measured: those of the monitor's table, of token classes, layers
    and blocks."""
    heads = [
        n
        for n, field in HEAD_FIELDS.items()
        if n not in LINES and (field.column or n in _MORE_OF_HEADS)
    ]
    classes = [
        name for name in run.measured() if name.partition("/")[0] in CLASS_FIELDS
    ]
    names = []
    for name in (*heads, *LAYER_FIELDS, *BLOCK_FIELDS, *classes):
        values = run.by_layer(name)
        if values is not None and not np.isnan(values).all():
            names.append(name)
    return names


_MORE_OF_HEADS = ("cos_max", "logit_change_rms", "gain_bound")


def _figures(runs: Sequence[Watched], present: Sequence[Chart]) -> Markup:
    # The first chart shows all runs; the others show the run that the reader chooses.
    choice = h.choices("run") if sum(bool(run.records) for run in runs) > 1 else ""
    first = [chart.figure() for chart in present if chart is RUNS]
    return h.join(
        [
            *first,
            choice,
            *(chart.figure() for chart in present if chart is not RUNS),
        ]
    )


def chart_data(runs: Sequence[Watched]) -> dict[str, object]:
    """Returns everything that the charts need, as plain JSON values."""
    shown = [run for run in runs if run.records]
    width = sum(
        max(1, len(run.layers)) * len((*LINES, *more_fields(run))) for run in shown
    )
    # Large models show fewer records, so that the size of the page stays bounded.
    most = int(min(h.MAX_RECORDS, max(MIN_RECORDS, MAX_LINES // max(1, width))))
    fields = {}
    for name in dict.fromkeys(
        name for run in shown for name in (*LINES, *run.heads.values, *more_fields(run))
    ):
        field = head_field(name) or {**LAYER_FIELDS, **BLOCK_FIELDS}.get(name)
        if field is not None:
            meaning = ": ".join(filter(None, (field.meaning, name.partition("/")[2])))
            fields[name] = {"meaning": meaning, "unit": field.unit}
    data = [_run_data(run, most, MAX_CELLS // len(shown)) for run in shown]
    return {"alarm": ALARM_THRESHOLD, "fields": fields, "runs": data}


def _run_data(run: Watched, most: int, cells: int) -> dict[str, object]:
    rows = np.array(h.thin(run.overall("max_logit").tolist(), most))
    leader = run.leader()
    lines = {name: run.by_layer(name) for name in (*more_fields(run), *LINES)}
    return {
        "name": run.name,
        "status": str(run.status),
        "step": [run.steps[i] for i in rows],
        "values": {
            name: h.series(values[rows])
            for name in VALUES
            if np.isfinite(values := run.overall(name)).any()
        },
        "layers": short_names(run.layers),
        "lines": {
            name: [h.series(line) for line in values[rows].T]
            for name, values in lines.items()
            if values is not None and not np.isnan(values).all()
        },
        "leader": None
        if leader is None
        else {"layer": leader.layer, "head": leader.head},
        "last": _last_sample(run, cells),
        "alarms": [_alarm_mark(run, alarm) for alarm in run.alarms],
        "interventions": _intervention_marks(run),
        "eval": _evaluations(run),
    }


def short_names(layers: Sequence[str]) -> list[str]:
    """Removes the leading and trailing parts that all layer names share.

    >>> short_names(["model.layers.0.self_attn", "model.layers.1.self_attn"])
    ['0', '1']
    """
    parts = [name.split(".") for name in layers]
    if len(parts) < 2:
        return list(layers)
    shortest = min(map(len, parts))
    front = 0
    while front < shortest and len({words[front] for words in parts}) == 1:
        front += 1
    back = 0
    while back < shortest - front and len({words[-1 - back] for words in parts}) == 1:
        back += 1
    short = [".".join(words[front : len(words) - back]) for words in parts]
    # Fall back to the full names if shortening makes them empty or ambiguous.
    return short if all(short) and len(set(short)) == len(short) else list(layers)


def _last_sample(run: Watched, cells: int) -> dict[str, object] | None:
    """Returns [layer][head] of each field in the last sample, fields of LINES first, as many as fit into `cells`."""
    measured = [
        name
        for name in run.measured()
        if not np.isnan(run.heads.values[name][-1]).all()
    ]
    if not measured:
        return None
    # The map starts with the fields that have a chart; a large model has room for few others.
    ordered = sorted(
        measured, key=lambda name: LINES.index(name) if name in LINES else len(LINES)
    )
    shown = ordered[: max(2, cells // run.heads.values[ordered[0]][-1].size)]
    fields = {
        name: [h.series(line, 3) for line in run.heads.values[name][-1]]
        for name in shown
    }
    return {"step": run.steps[-1], "fields": fields}


def _alarm_mark(run: Watched, alarm: Row) -> dict[str, object]:
    layer = alarm.get("layer")
    return {
        "step": int(alarm["step"]),
        "severity": str(alarm.get("severity")),
        "rule": str(alarm.get("rule")),
        "layer": run.layers.index(layer) if layer in run.layers else None,
        "head": alarm.get("head"),
    }


def _intervention_marks(run: Watched) -> list[dict[str, object]]:
    """Returns, for each step, the decisions that changed something, with their sentences."""
    steps: dict[int, list[Row]] = {}
    for event in run.interventions:
        if event.get("event") == "decision" and event.get("action") != "watch_closer":
            steps.setdefault(int(event["step"]), []).append(event)
    marks = []
    for step, events in steps.items():
        labels = [
            f"{h.MINUS if event.get('release') else ''}{event.get('action')}"
            for event in events
        ]
        text = "\n".join(str(event.get("text")) for event in events)
        marks.append(
            {
                "step": step,
                "label": ", ".join(dict.fromkeys(labels)),
                "text": text,
            }
        )
    return marks


def _evaluations(run: Watched) -> dict[str, object]:
    every = max(1, len(run.eval_records) // h.MAX_RECORDS)
    series: dict[str, object] = {
        "step": [int(record["step"]) for record in run.eval_records][::every]
    }
    for name in ("max_logit", "entropy", "val_loss"):
        values = overall(run.eval_records, run.eval_heads, name)
        if np.isfinite(values).any():
            series[name] = h.series(values[::every])
    return series


# The tables.

COLUMNS = {
    "max_logit": "Largest logit",
    "min_logit": "Smallest logit",
    "entropy": "Entropy",
    "entropy_min": "Lowest row entropy",
    "query_norm": "|q|",
    "key_norm": "|k|",
    "cos_max": "Largest cosine",
    "sink_head_ratio": "Share of sink heads",
    "logit_change_rms": "Logit change",
    "gain_bound": "Bound by gains",
}
# They are followed by the values in the monitor's table, with the headings of that table.
COLUMNS |= {
    name: field.column
    for name, field in {**HEAD_FIELDS, **LAYER_FIELDS, **BLOCK_FIELDS}.items()
    if field.column and name not in COLUMNS
}
_CLASS_COLUMNS = {"query_competition": "|q| ratio", "key_competition": "|k| ratio"}
_FOLDS = {
    "max": "the largest head",
    "min": "the smallest head",
    "mean": "the mean over heads",
}


def _compared(runs: Sequence[Watched]) -> Markup:
    """Returns one row per run."""
    head = h.columns("Run", kind="text")
    head += h.columns(
        "Steps",
        "Alarms",
        "First alarm",
        "Largest logit, last",
        "… of the run",
        "Entropy, last",
    )
    body = []
    for run in runs:
        peak = float(np.fmax.reduce(run.overall("max_logit"), initial=np.nan))
        body.append(
            h.table_row(
                run.name,
                h.cell(f"{run.steps[-1]:,}", run.steps[-1])
                if run.records
                else h.cell("–", -1),
                h.cell(str(len(run.alarms)), len(run.alarms)),
                h.cell(f"{run.alarms[0]['step']:,}", run.alarms[0]["step"])
                if run.alarms
                else h.NOTHING,
                _last(run, "max_logit"),
                h.measured(peak),
                _last(run, "entropy"),
                _last(run, "train_loss"),
            )
        )
    return h.table(
        "The watched runs",
        [*head, *h.columns("Training loss, last")],
        body,
        sortable=True,
    )


def _last(run: Watched, name: str) -> Markup:
    return h.measured(float(run.overall(name)[-1]) if run.records else math.nan)


def _layers(runs: Sequence[Watched]) -> Markup:
    """Returns a table per run with one row per layer, for its last sample."""
    parts = []
    for run in runs:
        if not run.records or not run.layers:
            continue
        last = {}
        for name in (
            *COLUMNS,
            *(
                name
                for name in run.measured()
                if name.partition("/")[0] in CLASS_FIELDS
            ),
        ):
            values = run.by_layer(name)
            if values is not None and not np.isnan(values[-1]).all():
                last[name] = values[-1]
        typed = any(kind != "full" for kind in run.types.values())
        head = h.columns("Layer", *["Type"] * typed, kind="text")
        head += h.columns(*(COLUMNS.get(name) or _class_column(name) for name in last))
        body = [_layer(run, i, last, typed=typed) for i in range(len(run.layers))]
        for name, kind in run.types.items():
            if kind == LINEAR:
                body.append(
                    h.table_row(
                        name,
                        h.words(LINEAR),
                        *[h.NOTHING] * len(last),
                    )
                )
        inner = h.table(
            f"Layers of {run.name} at step {run.steps[-1]:,}",
            head,
            body,
            sortable=True,
        )
        title = (
            f"{run.name}, step {run.steps[-1]:,}"
            if len(runs) > 1
            else f"Step {run.steps[-1]:,}"
        )
        parts.append(h.details(f"{title}: {h.count(len(run.layers), 'layer')}", inner))
    return h.join(parts)


def _class_column(name: str) -> str:
    field, _, classes = name.partition("/")
    return (
        _CLASS_COLUMNS.get(name)
        or f"{field.replace('_', ' ')}, {classes.replace('->', ' → ')}"
    )


def _layer(
    run: Watched, i: int, last: Mapping[str, np.ndarray], *, typed: bool
) -> Markup:
    cells = [h.words(run.types.get(run.layers[i], ""))] if typed else []
    for name, values in last.items():
        heads = run.heads.values.get(measured_field(name))
        field = head_field(name)
        which = ""
        if (
            heads is not None
            and field is not None
            and field.fold != "mean"
            and not np.isnan(heads[-1][i]).all()
        ):
            head = (
                np.nanargmax(heads[-1][i])
                if field.fold == "max"
                else np.nanargmin(heads[-1][i])
            )
            which = f"head {int(head)}"
        cells.append(h.measured(float(values[i]), which))
    return h.table_row(run.layers[i], *cells)


def _facts(runs: Sequence[Watched]) -> Markup:
    """Returns the settings and versions that the runs recorded, by name."""
    facts: dict[str, dict[str, None]] = {}
    for run in runs:
        versions = run.env.get("versions")
        recorded = {
            k: v
            for k, v in run.about.items()
            if k not in ("kind", "sites", "missed", "fields")
        }
        recorded |= versions if isinstance(versions, dict) else {}
        recorded |= {
            name: run.env.get(name) for name in ("system", "commit", "command")
        }
        for name, value in {**recorded, "directory": str(run.path)}.items():
            if value is not None and value != "":
                facts.setdefault(name.replace("_", " "), {})[_word(value)] = None
    return h.facts({name: list(values) for name, values in facts.items()})


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_word(inner)}" for key, inner in value.items())
    return (
        ", ".join(map(_word, value)) if isinstance(value, (list, tuple)) else str(value)
    )


def _definitions(runs: Sequence[Watched]) -> Markup:
    definitions = {}
    measured = dict.fromkeys(
        name.partition("/")[0] for run in runs for name in run.measured()
    )
    for name in measured:
        field = head_field(name)
        if field is not None:
            definitions[name] = (
                f"{field.meaning} [{field.unit}]; of a layer: {_FOLDS[field.fold]}"
            )
    recorded = dict.fromkeys(
        name.partition("/")[0]
        for run in runs
        for record in run.records[-1:]
        for name in record
    )
    monitor = {
        f"monitor_{name}": field
        for name, field in {**MONITOR_FIELDS, **MONITOR_EXTREMES}.items()
    }
    for name, field in {
        **LAYER_FIELDS,
        **VALUE_FIELDS,
        **BLOCK_FIELDS,
        **monitor,
    }.items():
        if name in recorded or (
            name in LAYER_FIELDS and LAYER_FIELDS[name].of in measured
        ):
            definitions[name] = f"{field.meaning} [{field.unit}]"
    return h.facts(definitions, code=True)
