"""The page about watched models: alarms with their remedy, charts, layers, what was watched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qkeel.records import fold_heads, head_field
from qkeel.report.charts import Chart, figure
from qkeel.report.formats import count, listing, number
from qkeel.report.markup import Markup, join, tag
from qkeel.report.shell import document
from qkeel.report.tables import cell, column, table
from qkeel.report.watch_charts import RUNS, charts
from qkeel.report.watch_classes import class_tables
from qkeel.report.watch_data import chart_data
from qkeel.report.watch_findings import findings, movement, place
from qkeel.report.watched import Watched

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


def watch_page(runs: Sequence[Watched], *, live: str = "") -> str:
    """The text of the page; `live`: see shell.document."""
    title = heading(runs)
    present = charts(runs)
    body = join([_header(runs, title), tag("main", {}, *_main(runs, present)), _footer(runs)])
    data = chart_data(runs) if present else None
    return document(title, body, data, ("watch.js",), live=live)


def heading(runs: Sequence[Watched]) -> str:
    """What was watched, in a few words."""
    models = list(dict.fromkeys(str(run.about.get("model") or "model") for run in runs))
    several = f"{count(len(runs), 'watched run')} of " if len(runs) > 1 else ""
    return f"{several}{listing(models)}" + ("" if several else ", watched")


def _header(runs: Sequence[Watched], title: str) -> Markup:
    found = findings(runs)
    leads = [tag("p", {"class": "lead"}, f.text) for f in found if f.kind == "lead"]
    rest = [tag("li", {"class": f.kind}, f.text) for f in found if f.kind != "lead"]
    return tag(
        "header",
        {"data-live": "header"},
        tag("p", {"class": "brand"}, "qkeel"),
        tag("h1", {}, title),
        tag("p", {"class": "meta"}, _meta(runs)),
        tag(
            "div",
            {"class": "summary"},
            tag("div", {}, *leads) if leads else "",
            tag("ul", {"class": "findings"}, *rest) if rest else "",
        ),
    )


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


def _main(runs: Sequence[Watched], present: Sequence[Chart]) -> list[Markup]:
    parts = [
        ("alarms", "Alarms", _alarms(runs)),
        ("charts", "Charts", _charts(runs, present)),
        ("compared", "The runs", _compared(runs)),
        ("classes", "Token classes, last sample", class_tables(runs)),
        ("layers", "Layer by layer, last sample", _layers(runs)),
        ("watched", "What was watched", _facts(runs)),
        ("definitions", "Definitions", _definitions(runs)),
    ]
    if not present:
        text = "Nothing has been recorded yet: no forward pass in training mode was seen."
        parts.insert(0, ("nothing", "Nothing to draw yet", tag("p", {"class": "empty"}, text)))
    live = {name: {"data-live": name} for name, _, _ in parts if name != "charts"}
    return [
        tag("section", {"id": f"section-{name}", "class": "part", **live.get(name, {})}, tag("h2", {}, title), content)
        for name, title, content in parts
        if content
    ]


def _alarms(runs: Sequence[Watched]) -> Markup:
    items = [_alarm(alarm, run.name if len(runs) > 1 else "") for run in runs for alarm in run.alarms]
    return tag("ul", {"class": "alarms"}, *items) if items else Markup("")


def _alarm(alarm: Mapping[str, Any], run: str) -> Markup:
    severity = str(alarm.get("severity"))
    trend = f"; {alarm['trend']}" if alarm.get("trend") else ""
    where = f"step {alarm['step']:,}{place(alarm)}" + (f", {run}" if run else "")
    value = alarm.get("value")
    shown = f"value {number(value)}" if isinstance(value, (int, float)) else ""
    source = tag("p", {"class": "source"}, f"Rule: {alarm.get('rule')}, {shown}. Source: {alarm.get('source') or '–'}")
    copy = tag("button", {"type": "button", "class": "copy", "hidden": None}, "Copy")
    remedy = tag("pre", {"class": "command-text"}, str(alarm.get("remedy") or ""))
    return tag(
        "li",
        {"class": f"alarm-{severity}"},
        tag("p", {}, tag("strong", {"class": "severity"}, severity), f" {where}: {alarm.get('meaning')}{trend}."),
        tag("div", {"class": "remedy-line"}, remedy, copy),
        source,
    )


def _charts(runs: Sequence[Watched], present: Sequence[Chart]) -> Markup:
    several = sum(bool(run.records) for run in runs) > 1
    choice = tag("div", {"class": "controls", "data-controls": "run"}) if several else ""
    first = [figure(chart) for chart in present if chart is RUNS]  # of all runs; the others are of the chosen one
    return join([*first, choice, *(figure(chart) for chart in present if chart is not RUNS)])


def _compared(runs: Sequence[Watched]) -> Markup:
    if len(runs) < 2:
        return Markup("")
    head = [
        column("Run", "text"),
        column("Steps"),
        column("Alarms"),
        column("First alarm"),
        column("Largest logit, last"),
    ]
    head += [column("… of the run"), column("Moves", "text"), column("Entropy, last"), column("Training loss, last")]
    return table("The watched runs", head, [_compared_line(run) for run in runs], sortable=True)


def _compared_line(run: Watched) -> Markup:
    logits = run.overall("max_logit")
    peak = float(np.fmax.reduce(logits, initial=np.nan))
    first = run.alarms[0]["step"] if run.alarms else None
    return tag(
        "tr",
        {},
        tag("th", {"scope": "row"}, run.name),
        cell(f"{run.steps[-1]:,}" if run.records else "–", run.steps[-1] if run.records else -1),
        cell(str(len(run.alarms)), len(run.alarms)),
        cell("–" if first is None else f"{first:,}", math.inf if first is None else first),
        _last(logits),
        cell(number(peak), peak),
        tag("td", {"class": "text"}, movement(run) if run.records else ""),
        _last(run.overall("entropy")),
        _last(run.overall("train_loss")),
    )


def _last(values: np.ndarray) -> Markup:
    value = float(values[-1]) if len(values) else math.nan
    return cell("–" if math.isnan(value) else number(value), value)


def _layers(runs: Sequence[Watched]) -> Markup:
    """One line per layer of the last sample, of each run."""
    parts = []
    for run in runs:
        if not run.records or not run.layers:
            continue
        shown = [n for n in COLUMNS if n in run.heads.values and not np.isnan(run.heads.values[n][-1]).all()]
        folded = {name: fold_heads(name, run.heads.values[name][-1]) for name in shown}
        head = [column("Layer", "text"), *(column(COLUMNS[name]) for name in shown)]
        body = [_layer(run, i, folded) for i in range(len(run.layers))]
        inner = table(f"Layers of {run.name} at step {run.steps[-1]:,}", head, body, sortable=True)
        title = f"{run.name}, step {run.steps[-1]:,}" if len(runs) > 1 else f"Step {run.steps[-1]:,}"
        parts.append(tag("details", {}, tag("summary", {}, f"{title}: {count(len(run.layers), 'layer')}"), inner))
    return join(parts)


def _layer(run: Watched, i: int, folded: Mapping[str, np.ndarray]) -> Markup:
    cells = []
    for name, values in folded.items():
        value = float(values[i])
        heads = run.heads.values[name][-1][i]
        field = head_field(name)
        fold = "mean" if field is None else field.fold
        which = ""
        if fold != "mean" and not np.isnan(heads).all():
            which = f"head {int(np.nanargmax(heads) if fold == 'max' else np.nanargmin(heads))}"
        cells.append(cell("–" if math.isnan(value) else number(value), value, which))
    return tag("tr", {}, tag("th", {"scope": "row"}, run.layers[i]), *cells)


def _facts(runs: Sequence[Watched]) -> Markup:
    """Whatever the directory says of what was watched, in its own words."""
    facts: dict[str, dict[str, None]] = {}
    for run in runs:
        versions = run.env.get("versions")
        told = {k: v for k, v in run.about.items() if k not in ("kind", "sites", "fields")}
        told |= versions if isinstance(versions, dict) else {}
        for name, value in {**told, "command": run.env.get("command"), "directory": str(run.path)}.items():
            if value is not None and value != "":
                facts.setdefault(name, {})[_word(value)] = None
    lines = [
        join(
            [
                tag("dt", {}, name.replace("_", " ")),
                tag("dd", {}, *(tag("span", {"class": "value"}, v) for v in values)),
            ]
        )
        for name, values in facts.items()
    ]
    return join([tag("dl", {"class": "facts"}, *lines), *(_sites(run) for run in runs)])


def _word(value: Any) -> str:
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
    head = [column(name.replace("_", " "), "text") for name in names]
    body = [
        tag("tr", {}, *(tag("td", {"class": "text"}, _word(site.get(name, ""))) for name in names)) for site in sites
    ]
    inner = table(f"Attention layers of {run.name}", head, body)
    return tag("details", {}, tag("summary", {}, f"{run.name}: {count(len(sites), 'attention layer')}"), inner)


def _definitions(runs: Sequence[Watched]) -> Markup:
    recorded = dict.fromkeys(name.partition("/")[0] for run in runs for name in run.measured())
    fields = {name: field for name in recorded if (field := head_field(name)) is not None}
    if not fields:
        return Markup("")
    words = {"max": "the largest head", "min": "the smallest head", "mean": "the mean over heads"}
    lines = []
    for name, field in fields.items():
        text = f"{field.meaning} [{field.unit}]; of a layer: {words[field.fold]}"
        lines.append(join([tag("dt", {}, tag("code", {}, name)), tag("dd", {}, text)]))
    return tag("dl", {"class": "facts"}, *lines)


def _footer(runs: Sequence[Watched]) -> Markup:
    script = "The charts need JavaScript; the tables are complete without it."
    made = "Made by qkeel. This file loads nothing."
    return tag("footer", {}, tag("noscript", {}, tag("p", {}, script)), tag("p", {}, made))
