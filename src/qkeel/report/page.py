"""The page about a study, or about single runs of the lab."""

from __future__ import annotations

import re
from collections.abc import Sequence

from qkeel.report import sections, tables
from qkeel.report.charts import Chart, charts, figures
from qkeel.report.collect import StudyData
from qkeel.report.embed import chart_data
from qkeel.report.formats import count, listing, rate
from qkeel.report.markup import Markup, join, tag
from qkeel.report.shell import document
from qkeel.report.summary import Finding, findings

TITLES = {"lr": "Learning-rate study", "demo": "Learning-rate demo"}


def study_page(study: StudyData, *, live: str = "") -> str:
    """The text of the page about a study or runs of the lab; `live`: see shell.document."""
    title = heading(study)
    present = charts(study)
    body = join([_header(study, title), tag("main", {}, *_main(study, present)), _footer(study)])
    return document(title, body, chart_data(study) if present else None, ("charts.js",), live=live)


def heading(study: StudyData) -> str:
    """What the page is about, in a few words."""
    if study.name:
        return TITLES.get(study.name, f"{study.name[0].upper()}{study.name[1:]} study")
    if len(study.runs) == 1:
        run = study.runs[0]
        return f"{run.remedy} at LR {rate(run.lr)}"
    return f"{len(study.runs)} runs compared"


def _header(study: StudyData, title: str) -> Markup:
    lead = [f for f in findings(study) if f.kind == "lead"]
    rest = [f for f in findings(study) if f.kind != "lead"]
    differs = sections.unlike(study)
    if differs:
        text = f"These runs differ in {differs}: their losses are not comparable."
        rest.insert(0, Finding("caution", text))
    return tag(
        "header",
        {},
        tag("p", {"class": "brand"}, "qkeel"),
        tag("h1", {}, title),
        tag("p", {"class": "meta"}, _meta(study)),
        tag(
            "div",
            {"class": "summary"},
            tag("div", {}, *(tag("p", {"class": "lead"}, _named(f.text, study.remedies)) for f in lead)),
            tag("ul", {"class": "findings"}, *(_item(finding, study.remedies) for finding in rest)) if rest else "",
        ),
    )


def _item(finding: Finding, remedies: Sequence[str]) -> Markup:
    return tag("li", {"class": finding.kind}, _named(finding.text, remedies))


def _named(text: str, remedies: Sequence[str]) -> Markup:
    """The sentence with the names of remedies set apart: 'none' is one."""
    names = "|".join(re.escape(name) for name in sorted(remedies, key=len, reverse=True))
    parts = re.split(rf"(?<![\w:])({names})(?![\w:=])", text) if names else [text]
    return join(tag("span", {"class": "name"}, part) if i % 2 else part for i, part in enumerate(parts))


def _meta(study: StudyData) -> str:
    """The size of the study in one line."""
    if len(study.runs) == 1:
        run = study.runs[0]
        steps = run.row["steps"] if run.row else None
        parts = [f"seed {run.seed}", str(run.status) if steps is None else count(steps, "step"), f"run {run.run_id}"]
        return " · ".join(parts)
    grid = [run for run in study.runs if run.role != "drift"]
    longer = len(study.runs) - len(grid)
    sizes = [
        count(len(study.runs), "run"),
        count(len({run.remedy for run in grid}), "variant") if grid else "",
        count(len({run.lr for run in grid}), "learning rate") if grid else "",
        count(len({run.seed for run in grid}), "seed") if grid else "",
        f"{count(longer, 'longer run')} for drift" if longer else "",
    ]
    return " · ".join(size for size in sizes if size)


def _main(study: StudyData, present: Sequence[Chart]) -> list[Markup]:
    parts = [
        ("charts", "Charts", figures(study, present)),
        ("ranking", "Ranking", _ranking(study)),
        ("without", "Runs without a result", tables.without_result(study)),
        ("remedies", "What each remedy does", sections.remedies(study)),
        ("runs", "Every run", tables.every_run(study)),
        ("provenance", "Provenance", sections.provenance(study)),
        ("definitions", "Definitions", sections.definitions()),
    ]
    if not present:
        parts.insert(0, ("nothing", "Nothing to draw yet", _nothing(study)))
    return [
        tag("section", {"id": f"section-{name}", "class": "part"}, tag("h2", {}, title), content)
        for name, title, content in parts
        if content
    ]


def _ranking(study: StudyData) -> Markup:
    table = tables.ranking(study)
    if not table:
        return table
    note = (
        "Sorted by LR sensitivity, clipped; press a heading to sort by it. "
        f"Losses and gains in {study.loss_unit()}, mean over seeds with the range below. "
        "Grey gains are within seed spread or rest on one seed."
    )
    return join([tag("p", {"class": "note"}, note), table])


def _nothing(study: StudyData) -> Markup:
    where = f"None of the {count(len(study.runs), 'run')} has written a record." if study.runs else "It lists no runs."
    again = " Run the command below again: finished runs are kept, the others go on." if study.command else ""
    return tag("p", {"class": "empty"}, f"{where}{again} Then make this page again.")


def _footer(study: StudyData) -> Markup:
    versions = sorted({str(run.env["qkeel"]) for run in study.runs if run.env.get("qkeel")})
    made = f"Made by qkeel from runs of version {listing(versions)}." if versions else "Made by qkeel."
    script = "The charts need JavaScript; the tables are complete without it."
    return tag(
        "footer", {}, tag("noscript", {}, tag("p", {}, script)), tag("p", {}, f"{made} This file loads nothing.")
    )
