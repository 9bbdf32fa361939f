"""The page about a study, or about single runs of the lab."""

from __future__ import annotations

import re
from collections.abc import Sequence

from qkeel.report import accuracy, lengths, modalities, sections, tables
from qkeel.report.charts import Chart, charts, figures
from qkeel.report.collect import StudyData
from qkeel.report.embed import chart_data
from qkeel.report.formats import count, listing, rate
from qkeel.report.markup import Markup, join, tag
from qkeel.report.modality_table import by_modality
from qkeel.report.shell import document
from qkeel.report.summary import Finding, findings

TITLES = {
    "extrapolation": "Length extrapolation",
    "lr": "Learning-rate study",
    "demo": "Learning-rate demo",
    "mla": "Latent-attention study",
    "multimodal": "Text and images in one sequence",
}


def study_page(study: StudyData, *, live: str = "") -> str:
    """The text of the page about a study or runs of the lab; `live`: see shell.document."""
    title = heading(study)
    drawn = {name: part for name, part in study.parts().items() if charts(part)}
    # Of a study in parts those charts that every part can fill; charts.js draws one part at a time.
    each = [charts(part) for part in drawn.values()] or [charts(study)]
    present = [chart for chart in each[0] if all(chart in others for others in each)]
    data = {"parts": {name: chart_data(part) for name, part in drawn.items()}} if drawn else chart_data(study)
    body = join([_header(study, title), tag("main", {}, *_main(study, present)), _footer(study)])
    return document(title, body, data if present else None, ("charts.js",), live=live)


def heading(study: StudyData) -> str:
    """What the page is about, in a few words."""
    if study.name:
        return TITLES.get(study.name, f"{study.name[0].upper()}{study.name[1:]} study")
    if len(study.runs) == 1:
        run = study.runs[0]
        return f"{run.remedy} at LR {rate(run.lr)}"
    return f"{len(study.runs)} runs compared"


def _header(study: StudyData, title: str) -> Markup:
    found = _findings(study)
    lead, rest = [f for f in found if f.kind == "lead"], [f for f in found if f.kind != "lead"]
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


def _findings(study: StudyData) -> list[Finding]:
    """The first screen's; of a study in parts what each part has to say first, the rest stands with the part."""
    if modalities.is_multimodal(study):
        return modalities.findings(study)
    parts = study.parts()
    if parts:
        return [
            Finding(f.kind, f"{name}: {f.text}")
            for name, part in parts.items()
            for f in _said(part)
            if f.kind == "lead"
        ]
    differs = sections.unlike(study)
    text = f"These runs differ in {differs}: their losses are not comparable."
    return [*([Finding("caution", text)] if differs else []), *_said(study)]


def _said(study: StudyData) -> list[Finding]:
    """What the numbers say: about long contexts, where they were measured, else about remedies."""
    return lengths.findings(study) if lengths.is_long(study) else [*findings(study), *accuracy.findings(study)]


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


def _part(part: StudyData) -> Markup:
    """One part of a study: what it has to say beside its lead, and its ranking."""
    notes = [_item(f, part.remedies) for f in _said(part) if f.kind != "lead"]
    return join([tag("ul", {"class": "findings"}, *notes) if notes else "", _ranking(part)])


def _main(study: StudyData, present: Sequence[Chart]) -> list[Markup]:
    own = study.parts()
    choice = tag("div", {"class": "controls", "data-controls": "part"}) if own and present else ""
    own_words = "What each form computes" if lengths.is_long(study) else "What each remedy does"
    parts = [
        ("charts", "Charts", join([choice, figures(study, present)])),
        ("modality", "By modality", by_modality(study) if modalities.is_multimodal(study) else Markup("")),
        ("accuracy", "Accuracy", accuracy.table_of(study)),
        ("ranking", "Ranking", _ranking(study)),
        *((f"part-{i}", name, _part(part)) for i, (name, part) in enumerate(own.items())),
        ("without", "Runs without a result", tables.without_result(study)),
        ("remedies", own_words, sections.remedies(study)),
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
    if lengths.is_long(study):
        return Markup("") if study.parts() else lengths.comparison(study)
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
