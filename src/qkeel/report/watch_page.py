"""The page about watched runs: a verdict with the fix, the alarms, charts and tables.

Shapes: n samples, layers, heads.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from qkeel.frames.run_verdict import judge_run
from qkeel.metrics import ALARM_THRESHOLD, HARMFUL_LOGIT, Row, Status, judged
from qkeel.records import (
    BLOCK_FIELDS,
    CLASS_FIELDS,
    HEAD_FIELDS,
    RunStatus,
    head_field,
)
from qkeel.report import html as h
from qkeel.report.watched_runs import Watched, overall


def watch_page(runs: Sequence[Watched]) -> dict[str, object]:
    """Returns what the page about watched runs shows."""
    present = charts(runs)
    several = len(runs) > 1
    first = runs[0]
    light, lead = verdict(first)
    if several:
        models = dict.fromkeys(str(run.about.get("model") or "model") for run in runs)
        title = f"{h.count(len(runs), 'watched run')} of {h.listing(list(models))}"
        lead = ""
        limits = [f"{run.name}: {verdict(run)[1]}" for run in runs]
    else:
        title = f"{first.about.get('model') or 'model'}, watched"
        limits = cautions(first)
    alarms, actions = [], []
    for run in runs:
        alarms += _alarm_cards(run, several)
        actions += _actions(run)
    return {
        "template": "watch.html",
        "title": title,
        "meta": _meta(runs),
        "lead": lead,
        "light": light,
        "harmful": h.number(HARMFUL_LOGIT),
        "fixes": fix(first),
        "cautions": limits,
        "charts": present,
        "alarms": alarms,
        "actions": actions,
        "compared": _compared(runs) if several else None,
        "layers": None if several else _layers(first),
        "facts": _facts(runs),
        "data": chart_data(runs) if present else None,
        "drawing": "watch.js",
        "made": "Made by qkeel.",
    }


def _meta(runs: Sequence[Watched]) -> str:
    if len(runs) > 1:
        return " · ".join(
            f"{run.name}: {h.count(len(run.records), 'sample')}" for run in runs
        )
    run = runs[0]
    size = run.about.get("parameters")
    optimizer = run.about.get("optimizer")
    remedies = [str(x) for x in run.about.get("remedies") or ()]
    phrases = [
        h.count(size, "parameter") if isinstance(size, int) else "",
        h.count(len(run.layers or run.about.get("sites") or ()), "attention layer"),
        optimizer if isinstance(optimizer, str) else "",
        f"{'+'.join(remedies)} active" if remedies else "",
        h.count(run.steps[-1], "step") if run.records else "",
        h.count(len(run.records), "sample"),
        f"run {run.name}",
    ]
    return " · ".join(filter(None, phrases))


# The verdict, and the fix of the most severe alarm.

# The default for alarms recorded without a cause.
CAUSE = "attention logits have grown too large"
# Runs of 0.1.0 have the remedy before the model.
_APPLY = re.compile(r'qkeel\.apply\((?:model, )?"([^"]+)"')


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
    light = {Status.NOT_HEALTHY: "bad", Status.NOT_KNOWN: "none"}.get(status, "good")
    if status is Status.HEALTHY and largest > ALARM_THRESHOLD:
        light = "large"
    return light, f"{_capital(sentence)}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _grave(alarms: Sequence[Row]) -> list[Row]:
    return [alarm for alarm in alarms if alarm.get("severity") != "notice"]


def fix(run: Watched) -> list[str]:
    """Returns the fix for the most severe alarms: a shell command if one started the run, and the line of code.

    The list is empty if there is nothing to do or if an autopilot is already active.
    """
    if run.acted:
        return []
    for alarm in _grave(run.alarms):
        line = str(alarm.get("remedy") or "")
        if not line:
            continue
        applied = _APPLY.search(line)
        typed = str(run.env.get("watcher") or "")
        watcher, dashes, command = typed.partition(" -- ")
        if applied is None or not dashes:
            return [line]
        return [f"{watcher} --apply {applied[1]} -- {command}", line]
    return []


def cautions(run: Watched) -> list[str]:
    """Returns what limits the verdict: layers that are not watched, an unfinished run, notes of the monitor."""
    texts = []
    missed = [site for site in run.about.get("missed") or () if isinstance(site, dict)]
    if missed:
        n = len(run.about.get("sites") or ())
        reasons = "; ".join(
            f"{site.get('module') or 'the model itself'}: {site.get('reason')}"
            for site in missed
        )
        texts.append(
            f"{n} of {n + len(missed)} attention layers were watched. Not understood: {reasons}."
        )
    if run.status is not RunStatus.DONE and run.records:
        texts.append(
            f"The run has not finished; the page shows it up to step {run.steps[-1]:,}."
        )
    notes = list(dict.fromkeys(str(note.get("event")) for note in run.notes))
    return texts + ([f"Noted while watching: {h.listing(notes)}."] if notes else [])


# Alarms, and what an autopilot did about them.

_GRAVITY = ("notice", "alarm", "critical")


def _alarm_cards(run: Watched, is_named: bool) -> list[dict[str, object]]:
    """Returns one card per cause: since when it has existed, what was observed at which step, and the fix."""
    causes: dict[str, list[Row]] = {}
    for alarm in run.alarms:
        causes.setdefault(str(alarm.get("cause") or CAUSE), []).append(alarm)
    cards = []
    for cause, alarms in causes.items():
        severities, course = [], []
        sources = dict[str, None]()
        for alarm in alarms:
            severities.append(str(alarm.get("severity")))
            layer = alarm.get("layer")
            head = alarm.get("head")
            place = "" if layer is None else f", {layer}"
            if layer is not None and head is not None:
                place += f" head {head}"
            words = [alarm.get(name) for name in ("meaning", "trend", "effect")]
            observed = "; ".join(filter(None, words))
            course.append(f"Step {alarm['step']:,}{place}: {observed}.")
            if alarm.get("source"):
                sources[str(alarm["source"])] = None
        remedy = ""
        for alarm in _grave(alarms) or alarms:
            remedy = remedy or str(alarm.get("remedy") or "")
        first = alarms[0]["step"]
        when = f"since step {first:,}"
        rules = {str(alarm.get("rule")) for alarm in alarms}
        # It is over only when none of the rules that saw it holds any longer.
        if rules <= run.over.keys():
            last = max(run.over[rule] for rule in rules)
            when = f"from step {first:,}, and no longer at step {last:,}"
        of_run = f", {run.name}" if is_named else ""
        cards.append(
            {
                # One that this version does not know counts as the gravest.
                "gravest": max(severities, key=lambda x: (*_GRAVITY, x).index(x)),
                "title": f"{_capital(cause)} {when}{of_run}",
                "course": course,
                "remedy": remedy,
                "by_autopilot": run.acted and cause == CAUSE,
                "sources": list(sources),
            }
        )
    return cards


def _actions(run: Watched) -> list[dict[str, object]]:
    """Returns each decision, refusal and effect of an autopilot; equal decisions at several sites share one entry."""
    by_action: dict[object, list[Row]] = {}
    for event in run.interventions:
        names = ("event", "step", "action", "release", "reason")
        key = tuple(event.get(name) for name in names)
        by_action.setdefault(key, []).append(event)
    entries = []
    for events in by_action.values():
        first = events[0]
        kind = str(first.get("action") or first.get("event"))
        if first.get("release"):
            kind = "release"
        entry = {
            "kind": kind.replace("_", " "),
            "texts": [str(event.get("text")) for event in events],
            "more": h.count(len(events) - 1, "more site"),
        }
        entries.append(entry)
    return entries


# The charts and their data; assets/watch.js draws them. Long runs are thinned by omitting records, not by averaging.

# Fields with a chart of their own.
LINES = (
    "max_logit",
    "entropy",
    "query_norm",
    "key_norm",
)
VALUES = (
    "max_logit",
    "entropy",
    "train_loss",
    "val_loss",
    "grad_norm",
    "lr",
)
# Values in all lines of a page, about 600 KB.
MAX_LINES = 120_000
# Values in all head maps of a page.
MAX_CELLS = 60_000
MIN_RECORDS = 30


def charts(runs: Sequence[Watched]) -> list[str]:
    """Returns the names of the charts that have data."""
    shown = [run for run in runs if run.records]
    measured = {name for run in shown for name in run.measured()}

    def has(name: str) -> bool:
        return any(np.isfinite(run.overall(name)).any() for run in shown)

    present = {
        "runs": len(shown) > 1,
        "growth": has("max_logit"),
        "map": bool(measured),
        "entropy": has("entropy"),
        "norms": bool({"query_norm", "key_norm"} & measured),
        "loss": has("train_loss"),
    }
    return [name for name, has_data in present.items() if has_data]


def _class_fields(run: Watched) -> list[str]:
    return [name for name in run.measured() if name.partition("/")[0] in CLASS_FIELDS]


def chart_data(runs: Sequence[Watched]) -> dict[str, object]:
    """Returns everything that the charts need, as plain JSON values."""
    shown = [run for run in runs if run.records]
    n_lines = len(LINES) * sum(max(1, len(run.layers)) for run in shown)
    # Large models show fewer records, so that the size of the page stays bounded.
    most = min(h.MAX_RECORDS, max(MIN_RECORDS, MAX_LINES // max(1, n_lines)))
    fields = {}
    for run in shown:
        for name in run.heads.values:
            field = head_field(name)
            if field is None:
                continue
            meaning = field.meaning
            classes = name.partition("/")[2]
            if classes:
                meaning += f": {classes}"
            fields[name] = {"meaning": meaning, "unit": field.unit}
    data = [_run_data(run, most, MAX_CELLS // len(shown)) for run in shown]
    return {"alarm": ALARM_THRESHOLD, "fields": fields, "runs": data}


def _run_data(run: Watched, most: int, cells: int) -> dict[str, object]:
    rows = np.array(h.thin(run.overall("max_logit").tolist(), most))
    run_series, layer_series = {}, {}
    for name in VALUES:
        course = run.overall(name)
        if np.isfinite(course).any():
            run_series[name] = h.series(course[rows])
    for name in LINES:
        by_layer = run.by_layer(name)
        if by_layer is not None:
            layer_series[name] = [h.series(line) for line in by_layer[rows].T]
    alarms = []
    for alarm in run.alarms:
        layer = alarm.get("layer")
        mark = {
            "step": int(alarm["step"]),
            "severity": str(alarm.get("severity")),
            "rule": str(alarm.get("rule")),
            "layer": run.layers.index(layer) if layer in run.layers else None,
            "head": alarm.get("head"),
        }
        alarms.append(mark)
    return {
        "name": run.name,
        "status": str(run.status),
        "step": [run.steps[i] for i in rows],
        "values": run_series,
        "layers": short_names(run.layers),
        "lines": layer_series,
        "leader": run.leader(),
        "last": _last_sample(run, cells),
        "alarms": alarms,
        "interventions": _intervention_marks(run),
        "eval": _evaluations(run),
    }


def short_names(layers: Sequence[str]) -> list[str]:
    """Removes the leading and trailing parts that all layer names share.

    >>> short_names(["model.layers.0.self_attn", "model.layers.1.self_attn"])
    ['0', '1']
    """
    parts = [name.split(".") for name in layers]
    for end, inner in ((0, slice(1, None)), (-1, slice(-1))):
        while parts and min(map(len, parts)) > 1:
            if len({words[end] for words in parts}) > 1:
                break
            parts = [words[inner] for words in parts]
    short = [".".join(words) for words in parts]
    # A single layer keeps its name, and so do layers that would become alike.
    return short if len(set(short)) == len(short) > 1 else list(layers)


def _last_sample(run: Watched, cells: int) -> dict[str, object] | None:
    """Returns [layer][head] of each field in the last sample, fields of LINES first, as many as fit into `cells`."""
    last = {}
    for name in run.measured():
        values = run.heads.values[name][-1]
        if not np.isnan(values).all():
            last[name] = values
    if not last:
        return None
    # The map starts with the fields that have a chart; a large model has room for few others.
    names = sorted(
        last,
        key=lambda name: LINES.index(name) if name in LINES else len(LINES),
    )
    fields = {}
    for name in names[: max(2, cells // last[names[0]].size)]:
        fields[name] = [h.series(line, 3) for line in last[name]]
    return {"step": run.steps[-1], "fields": fields}


def _intervention_marks(run: Watched) -> list[dict[str, object]]:
    """Returns, for each step, the decisions that changed something, with their sentences."""
    decisions = [
        event
        for event in run.interventions
        if event.get("event") == "decision" and event.get("action") != "watch_closer"
    ]
    marks = []
    for step, events in itertools.groupby(decisions, lambda event: int(event["step"])):
        labels = dict[str, None]()
        texts = []
        for event in events:
            sign = h.MINUS if event.get("release") else ""
            labels[f"{sign}{event.get('action')}"] = None
            texts.append(str(event.get("text")))
        mark = {"step": step, "label": ", ".join(labels), "text": "\n".join(texts)}
        marks.append(mark)
    return marks


def _evaluations(run: Watched) -> dict[str, object]:
    every = max(1, len(run.eval_records) // h.MAX_RECORDS)
    steps = [int(record["step"]) for record in run.eval_records]
    series: dict[str, object] = {"step": steps[::every]}
    for name in ("max_logit", "entropy", "val_loss"):
        values = overall(run.eval_records, run.eval_heads, name)
        if np.isfinite(values).any():
            series[name] = h.series(values[::every])
    return series


# The tables.

_FIELDS = {**HEAD_FIELDS, **BLOCK_FIELDS, **CLASS_FIELDS}
# The values of a layer in the table; each is a column if it was measured.
_SHOWN = [
    name
    for name, field in _FIELDS.items()
    if field.column or name in ("min_logit", "entropy_min")
]


def _compared(runs: Sequence[Watched]) -> h.Table:
    """Returns one row per run."""
    rows = []
    for run in runs:
        last_step, first_alarm = h.cell("–", -1), h.NOTHING
        last = dict.fromkeys(("max_logit", "entropy", "train_loss"), h.NOTHING)
        if run.records:
            last_step = h.cell(f"{run.steps[-1]:,}", run.steps[-1])
            for name in last:
                last[name] = h.measured(float(run.overall(name)[-1]))
        if run.alarms:
            step = run.alarms[0]["step"]
            first_alarm = h.cell(f"{step:,}", step)
        peak = float(np.fmax.reduce(run.overall("max_logit"), initial=math.nan))
        cells = [
            last_step,
            h.cell(str(len(run.alarms)), len(run.alarms)),
            first_alarm,
            last["max_logit"],
            h.measured(peak),
            last["entropy"],
            last["train_loss"],
        ]
        rows.append((run.name, cells))
    ends = ["Largest logit, last", "… of the run", "Entropy, last"]
    return h.Table(
        title="The watched runs",
        texts=["Run"],
        numbers=["Steps", "Alarms", "First alarm", *ends, "Training loss, last"],
        rows=rows,
    )


def _layers(run: Watched) -> h.Table | None:
    """Returns the table with one row per layer, for the last sample."""
    if not run.records or not run.layers:
        return None
    last = {}
    for name in dict.fromkeys((*_SHOWN, *_class_fields(run))):
        values = run.by_layer(name)
        if values is not None and not np.isnan(values[-1]).all():
            last[name] = values[-1]
    is_typed = any(kind != "full" for kind in run.types.values())
    rows = []
    for i, layer in enumerate(run.layers):
        cells = []
        if is_typed:
            cells.append(h.Cell(run.types.get(layer, "")))
        for values in last.values():
            cells.append(h.measured(float(values[i])))
        rows.append((layer, cells))
    return h.Table(
        title=f"Step {run.steps[-1]:,}: {h.count(len(run.layers), 'layer')}",
        texts=["Layer", *["Type"] * is_typed],
        numbers=list(map(_heading, last)),
        rows=rows,
    )


def _heading(name: str) -> str:
    field = _FIELDS.get(name)
    if field is not None and field.column:
        return field.column
    return name.replace("_", " ").replace("/", ", ").replace("->", " → ")


def _facts(runs: Sequence[Watched]) -> dict[str, list[str]]:
    """Returns the settings and versions that the runs recorded, by name."""
    facts: dict[str, dict[str, None]] = {}
    for run in runs:
        recorded = {**run.about, **(run.env.get("versions") or {})}
        for name in ("system", "commit", "command"):
            recorded[name] = run.env.get(name)
        recorded["directory"] = str(run.path)
        for name, value in recorded.items():
            is_shown = name not in ("kind", "sites", "missed", "fields")
            if is_shown and value is not None and value != "":
                values = facts.setdefault(name.replace("_", " "), {})
                values[_text(value)] = None
    return {name: list(values) for name, values in facts.items()}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        parts = [f"{key} {_text(inner)}" for key, inner in value.items()]
        return ", ".join(parts)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
