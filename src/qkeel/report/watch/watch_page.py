"""The page about watched models, as a list of sections: alarms with their remedy, charts, layers, what was watched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from qkeel.metrics import Row
from qkeel.records import fold_heads, head_field
from qkeel.report.html.formats import count, listing, number
from qkeel.report.html.markup import NOTHING, Markup, cell, columns, join, measured, table, table_row, tag, words
from qkeel.report.html.page import Chart, Page, Section, choices, command_block, details, empty_note, facts
from qkeel.report.run_times import written_times
from qkeel.report.study.collect import StudyData
from qkeel.report.study.verdict import advice
from qkeel.report.watch.watch_charts import RUNS, chart_data, charts
from qkeel.report.watch.watch_classes import class_tables
from qkeel.report.watch.watch_findings import CAUSE, findings, fix, movement, place, verdict
from qkeel.report.watch.watched_run import Watched

COLUMNS = {
    "max_logit": "Largest logit",
    "min_logit": "Smallest logit",
    "entropy": "Entropy",
    "entropy_min": "Lowest row entropy",
    "query_norm": "|q|",
    "key_norm": "|k|",
    "cos_max": "Largest cosine",
    "logit_change_rms": "Logit change",
    "gain_bound": "Bound by gains",
}
_FOLDS = {"max": "the largest head", "min": "the smallest head", "mean": "the mean over heads"}


def watch_page(runs: Sequence[Watched], study: StudyData | None = None) -> Page:
    """Returns the page about watched runs, with what a study says of the remedies if one is given."""
    present = charts(runs)
    empty = Markup("") if present else empty_note("Nothing is recorded yet: no forward pass in training mode was seen.")
    return Page(
        title=heading(runs),
        meta=_meta(runs),
        verdict=_verdict(runs),
        findings=findings(runs),
        sections=[
            Section("nothing", "Nothing to draw yet", empty),
            Section("alarms", "Alarms", _alarms(runs)),
            Section("advice", "What a study says of the remedies", Markup("") if study is None else advice(study)),
            Section("interventions", "What the autopilot did", _interventions(runs)),
            Section("charts", "Charts", _charts(runs, present)),
            Section("compared", "The runs", _compared(runs)),
            Section("classes", "Token classes, last sample", class_tables(runs)),
            Section("layers", "Layer by layer, last sample", _layers(runs)),
            Section("watched", "What was watched", _facts(runs)),
            Section("definitions", "Definitions", _definitions(runs)),
        ],
        data=chart_data(runs) if present else None,
        drawing="watch.js",
        in_place=True,
    )


def heading(runs: Sequence[Watched]) -> str:
    """Returns what was watched, in a few words."""
    models = list(dict.fromkeys(str(run.about.get("model") or "model") for run in runs))
    several = f"{count(len(runs), 'watched run')} of " if len(runs) > 1 else ""
    return f"{several}{listing(models)}" + ("" if several else ", watched")


def _meta(runs: Sequence[Watched]) -> str:
    if len(runs) > 1:
        return " · ".join(f"{run.name}: {count(len(run.records), 'sample')}" for run in runs)
    run = runs[0]
    about = run.about
    size = about.get("parameters")
    parts = [
        count(size, "parameter") if isinstance(size, int) else "",
        count(len(run.layers or about.get("sites") or ()), "attention layer"),
        str(about["optimizer"]) if isinstance(about.get("optimizer"), str) else "",
        count(run.steps[-1], "step") if run.records else "",
        count(len(run.records), "sample"),
        f"run {run.name}",
    ]
    return " · ".join(part for part in parts if part)


def _verdict(runs: Sequence[Watched]) -> Markup | None:
    """The light, its sentence, and what to do with a button that copies it."""
    if len(runs) > 1:
        return None
    found, lines = verdict(runs[0]), fix(runs[0])
    light = tag("span", {"class": "light", "aria-hidden": "true"})
    said = tag("p", {"class": f"lead signal signal-{found.light}"}, light, tag("span", {}, found.text))
    if not lines:
        return said
    parts = [tag("div", {"class": "remedy-line"}, command_block(lines[0], "Copy fix"))]
    if len(lines) > 1:
        other = tag("code", {}, lines[1])
        parts.append(tag("p", {"class": "source"}, "Or in the script, after the optimizer is made: ", other))
    return join([said, tag("div", {"class": "fix"}, *parts)])


def _alarms(runs: Sequence[Watched]) -> Markup:
    """One card for each cause: since when, what was seen when, and what to do about it, once."""
    items = []
    for run in runs:
        causes: dict[str, list[Row]] = {}
        for alarm in run.alarms:
            causes.setdefault(str(alarm.get("cause") or CAUSE), []).append(alarm)
        items += [_story(run, cause, alarms, run.name if len(runs) > 1 else "") for cause, alarms in causes.items()]
    return tag("ul", {"class": "alarms"}, *items) if items else Markup("")


_GRAVITY = ("notice", "alarm", "critical")


def _story(run: Watched, cause: str, alarms: Sequence[Row], name: str) -> Markup:
    gravest = max((str(alarm.get("severity")) for alarm in alarms), key=lambda s: (*_GRAVITY, s).index(s))
    since = f"since step {alarms[0]['step']:,}" + (f", {name}" if name else "")
    title = tag("strong", {"class": "severity"}, gravest), f" {cause[0].upper()}{cause[1:]} {since}"
    seen = tag("ol", {"class": "course"}, *map(_seen, alarms))
    grave = [alarm for alarm in alarms if alarm.get("severity") != "notice"]
    advised = dict.fromkeys(str(alarm["remedy"]) for alarm in grave or alarms if alarm.get("remedy"))
    fixes = [tag("div", {"class": "remedy-line"}, command_block(line)) for line in list(advised)[:1]]
    if run.acted and cause == CAUSE:
        fixes = [tag("p", {"class": "source"}, "The autopilot acts on this; what it did is below.")]
    sources = dict.fromkeys(str(alarm.get("source")) for alarm in alarms if alarm.get("source"))
    about = tag("ul", {}, *(tag("li", {"class": "source"}, source) for source in sources))
    more = details("Where the thresholds come from", about) if sources else ""
    return tag("li", {"class": f"alarm-{gravest}"}, tag("p", {}, *title), seen, *fixes, more)


def _seen(alarm: Row) -> Markup:
    trend = f"; {alarm['trend']}" if alarm.get("trend") else ""
    return tag("li", {}, f"Step {alarm['step']:,}{place(alarm)}: {alarm.get('meaning')}{trend}.")


def _interventions(runs: Sequence[Watched]) -> Markup:
    """Each decision with its reason, and the effect that was seen; what is alike at several sites stands once."""
    items = []
    for run in runs:
        seen = {(e.get("of_step"), e.get("action"), e.get("site")): e for e in run.interventions if "of_step" in e}
        alike: dict[object, list[Row]] = {}
        for event in [e for e in run.interventions if e.get("event") != "effect"]:
            key = tuple(event.get(name) for name in ("event", "step", "action", "release", "reason"))
            alike.setdefault(key, []).append(event)
        for own in alike.values():
            effects = [seen.get((e["step"], e.get("action"), e.get("site"))) for e in own if not e.get("release")]
            items.append(_intervention(own, [effect for effect in effects if effect is not None]))
    return tag("ul", {"class": "alarms"}, *items) if items else Markup("")


def _intervention(events: Sequence[Row], effects: Sequence[Row]) -> Markup:
    first, text = events[0], str(events[0].get("text"))
    kind = "release" if first.get("release") else str(first.get("action") or first.get("event"))
    below = [str(effect.get("text")) for effect in effects]
    if len(events) > 1:
        start, _, rest = text.partition(": ")
        when, places = (
            start.split(", ")[0],
            [", ".join(str(e.get("text")).partition(": ")[0].split(", ")[1:]) for e in events],
        )
        text = f"{when}, {count(len(events), 'site')}: {rest}"
        went = [f"{e['site']} from {e['before']:.4g} to {e['after']:.4g}" for e in effects]
        below = [
            "; ".join(places),
            *([f"By step {effects[0]['step']:,} the max logit went at {'; '.join(went)}"] if went else []),
        ]
    parts = [tag("p", {}, tag("strong", {"class": "severity"}, kind.replace("_", " ")), f" {text}")]
    return tag("li", {"class": "alarm-notice"}, *parts, *(tag("p", {"class": "source"}, line) for line in below))


def _charts(runs: Sequence[Watched], present: Sequence[Chart]) -> Markup:
    first = [chart.figure() for chart in present if chart is RUNS]  # of all runs; the others are of the chosen one
    choice = choices("run") if sum(bool(run.records) for run in runs) > 1 else ""
    return join([*first, choice, *(chart.figure() for chart in present if chart is not RUNS)])


def _compared(runs: Sequence[Watched]) -> Markup:
    if len(runs) < 2:
        return Markup("")
    head = columns("Run", kind="text")
    head += columns("Steps", "Alarms", "First alarm", "Largest logit, last", "… of the run")
    head += [*columns("Moves", kind="text"), *columns("Entropy, last", "Training loss, last")]
    return table("The watched runs", head, [_compared_line(run) for run in runs], sortable=True)


def _compared_line(run: Watched) -> Markup:
    logits = run.overall("max_logit")
    peak = float(np.fmax.reduce(logits, initial=np.nan))
    return table_row(
        run.name,
        cell(f"{run.steps[-1]:,}", run.steps[-1]) if run.records else cell("–", -1),
        cell(str(len(run.alarms)), len(run.alarms)),
        cell(f"{run.alarms[0]['step']:,}", run.alarms[0]["step"]) if run.alarms else NOTHING,
        _last(logits),
        cell(number(peak), peak),
        words(movement(run) if run.records else ""),
        _last(run.overall("entropy")),
        _last(run.overall("train_loss")),
    )


def _last(values: np.ndarray) -> Markup:
    return measured(float(values[-1]) if len(values) else math.nan)


def _layers(runs: Sequence[Watched]) -> Markup:
    """One line per layer of the last sample, of each run."""
    parts = []
    for run in runs:
        if not run.records or not run.layers:
            continue
        shown = [n for n in COLUMNS if n in run.heads.values and not np.isnan(run.heads.values[n][-1]).all()]
        folded = {name: fold_heads(name, run.heads.values[name][-1]) for name in shown}
        head = [*columns("Layer", kind="text"), *columns(*(COLUMNS[name] for name in shown))]
        body = [_layer(run, i, folded) for i in range(len(run.layers))]
        inner = table(f"Layers of {run.name} at step {run.steps[-1]:,}", head, body, sortable=True)
        title = f"{run.name}, step {run.steps[-1]:,}" if len(runs) > 1 else f"Step {run.steps[-1]:,}"
        parts.append(details(f"{title}: {count(len(run.layers), 'layer')}", inner))
    return join(parts)


def _layer(run: Watched, i: int, folded: Mapping[str, np.ndarray]) -> Markup:
    cells = []
    for name, values in folded.items():
        heads = run.heads.values[name][-1][i]
        field = head_field(name)
        fold = "mean" if field is None else field.fold
        which = ""
        if fold != "mean" and not np.isnan(heads).all():
            which = f"head {int(np.nanargmax(heads) if fold == 'max' else np.nanargmin(heads))}"
        cells.append(measured(float(values[i]), which))
    return table_row(run.layers[i], *cells)


def _facts(runs: Sequence[Watched]) -> Markup:
    """The facts that each directory records of its run, name by name."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        versions = run.env.get("versions")
        times = written_times(run.path)
        recorded = {k: v for k, v in run.about.items() if k not in ("kind", "sites", "missed", "fields")}
        recorded |= versions if isinstance(versions, dict) else {}
        for name, value in {
            **recorded,
            **times,
            **{name: run.env.get(name) for name in ("system", "commit", "command")},
            "directory": str(run.path),
        }.items():
            if value is not None and value != "":
                found.setdefault(name.replace("_", " "), {})[_word(value)] = None
    return join([facts({name: list(values) for name, values in found.items()}), *(_sites(run) for run in runs)])


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_word(inner)}" for key, inner in value.items())
    return ", ".join(map(_word, value)) if isinstance(value, (list, tuple)) else str(value)


def _sites(run: Watched) -> Markup:
    sites = [site for site in run.about.get("sites") or () if isinstance(site, dict)]
    if not sites:
        return Markup("")
    names = list(dict.fromkeys(key for site in sites for key in site))
    head = columns(*(name.replace("_", " ") for name in names), kind="text")
    body = [tag("tr", {}, *(words(_word(site.get(name, ""))) for name in names)) for site in sites]
    inner = table(f"Attention layers of {run.name}", head, body)
    return details(f"{run.name}: {count(len(sites), 'attention layer')}", inner)


def _definitions(runs: Sequence[Watched]) -> Markup:
    recorded = dict.fromkeys(name.partition("/")[0] for run in runs for name in run.measured())
    fields = {name: field for name in recorded if (field := head_field(name)) is not None}
    found = {n: f"{field.meaning} [{field.unit}]; of a layer: {_FOLDS[field.fold]}" for n, field in fields.items()}
    return facts(found, code=True)
