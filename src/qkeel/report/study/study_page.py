"""The page about a study, or about single runs of the lab: the list of its sections."""

from __future__ import annotations

import re
from collections.abc import Sequence

from qkeel.report.html.formats import count, listing, rate
from qkeel.report.html.markup import Markup, join, tag
from qkeel.report.html.page import Chart, Finding, Page, Section, choices, details, empty_note, finding_list, note
from qkeel.report.study import accuracy_findings, chaos_findings, length_findings, modality_findings, provenance, tables
from qkeel.report.study.charts import chart_data, charts, figures
from qkeel.report.study.collect import StudyData
from qkeel.report.study.findings import findings
from qkeel.report.study.modality_table import by_modality
from qkeel.report.study.pairs import pair_tables
from qkeel.report.study.verdict import verdict_table

TITLES = {
    "extrapolation": "Length extrapolation",
    "lr": "Learning-rate study",
    "demo": "Learning-rate demo",
    "mla": "Latent-attention study",
    "multimodal": "Text and images in one sequence",
    "chaos": "Chaos study",
    "edge": "Edge of chaos",
    "transfer": "Transfer between sizes",
}


def study_page(study: StudyData) -> Page:
    """Returns the page about a study or about runs of the lab."""
    drawn = {name: part for name, part in study.parts().items() if charts(part)}
    # Of a study in parts those charts that every part can fill; charts.js draws one part at a time.
    each = [charts(part) for part in drawn.values()] or [charts(study)]
    present = [chart for chart in each[0] if all(chart in others for others in each)]
    data = {"parts": {name: chart_data(part) for name, part in drawn.items()}} if drawn else chart_data(study)
    return Page(
        title=heading(study),
        meta=_meta(study),
        findings=_findings(study),
        mark=lambda text: _named(text, study.remedies),
        sections=_sections(study, present),
        data=data if present else None,
        drawing="charts.js",
        made=_made(study),
    )


def _sections(study: StudyData, present: Sequence[Chart]) -> list[Section]:
    parts = study.parts()
    choice = choices("part") if parts and present else ""
    return [
        Section("nothing", "Nothing to draw yet", Markup("") if present else _nothing(study)),
        Section("verdict", "Counts" if study.primary else "Verdict", Markup("") if parts else _verdict(study)),
        Section("charts", "Charts", join([choice, figures(study, present)])),
        Section(
            "modality", "By modality", by_modality(study) if modality_findings.is_multimodal(study) else Markup("")
        ),
        Section("chaos", "What rounding does", chaos_findings.floors_table(study)),
        Section("accuracy", "Accuracy", accuracy_findings.table_of(study)),
        Section("ranking", "Secondary comparisons" if study.primary else "Ranking", _ranking(study)),
        Section("pairs", "Every pair", pair_tables(study) if _pairs_wanted(study, bool(parts)) else Markup("")),
        *(Section(f"part-{i}", name, _part(part)) for i, (name, part) in enumerate(parts.items())),
        Section("without", "Runs without a result", tables.without_result(study)),
        Section(
            "remedies",
            "What each form computes" if length_findings.is_long(study) else "What each remedy does",
            provenance.remedies(study),
        ),
        Section("runs", "Every run", tables.every_run(study)),
        Section("provenance", "Provenance", provenance.provenance(study)),
        Section("definitions", "Definitions", provenance.definitions()),
    ]


def heading(study: StudyData) -> str:
    """Returns what the page is about, in a few words."""
    if study.name:
        return TITLES.get(study.name, f"{study.name[0].upper()}{study.name[1:]} study")
    if len(study.runs) == 1:
        run = study.runs[0]
        return f"{run.remedy} at LR {rate(run.lr)}"
    return f"{len(study.runs)} runs compared"


def _findings(study: StudyData) -> list[Finding]:
    """The first screen's; of a study in parts the lead of each part, the rest stands with the part."""
    if modality_findings.is_multimodal(study):
        return modality_findings.findings(study)
    if study.chaos:
        return chaos_findings.findings(study)
    parts = study.parts()
    if parts:
        leads = {name: [f for f in _read(part) if f.kind == "lead"] for name, part in parts.items()}
        return [Finding(f.kind, f"{name}: {f.text}") for name, found in leads.items() for f in found]
    differs = provenance.unlike(study)
    text = f"These runs differ in {differs}: their losses are not comparable."
    return [*([Finding("caution", text)] if differs else []), *_read(study)]


def _read(study: StudyData) -> list[Finding]:
    """The findings of a study: about long contexts, where they were measured, else about remedies."""
    if length_findings.is_long(study):
        return length_findings.findings(study)
    return [*findings(study), *accuracy_findings.findings(study)]


def _named(text: str, remedies: Sequence[str]) -> Markup:
    """The sentence with the names of remedies set apart: 'none' is one."""
    names = "|".join(re.escape(name) for name in sorted(remedies, key=len, reverse=True))
    parts = re.split(rf"(?<![\w:+])({names})(?![\w=+]|:\w)", text) if names else [text]
    return join(tag("span", {"class": "name"}, part) if i % 2 else part for i, part in enumerate(parts))


def _meta(study: StudyData) -> str:
    """The size of the study in one line."""
    if len(study.runs) == 1:
        run = study.runs[0]
        steps = run.row["steps"] if run.row else None
        return f"seed {run.seed} · {run.status if steps is None else count(steps, 'step')} · run {run.run_id}"
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
    """One part of a study: its findings besides the lead, and its ranking."""
    mine = [f for f in _read(part) if f.kind != "lead"]
    return join([_verdict(part), finding_list(mine, lambda text: _named(text, part.remedies)), _ranking(part)])


def _verdict(study: StudyData) -> Markup:
    """The answer before every chart; studies of other questions than remedies have answers of their own."""
    return verdict_table(study) if _compares(study) else Markup("")


def _pairs_wanted(study: StudyData, parts: bool) -> bool:
    """Returns whether every pair is judged: not where the study has one comparison of its own to decide."""
    return _compares(study) and not parts and study.primary is None


def _compares(study: StudyData) -> bool:
    """Returns whether the question of the study is which remedy is better."""
    return not (length_findings.is_long(study) or modality_findings.is_multimodal(study) or study.name == "chaos")


def _ranking(study: StudyData) -> Markup:
    if length_findings.is_long(study):
        return Markup("") if study.parts() else length_findings.comparison(study)
    table = tables.ranking(study)
    text = (
        "Sorted by the largest LR without collapse, then by LR sensitivity; press a heading to sort by it. "
        f"Losses and gains are in {study.loss_unit()}, means over seeds. Below gains and LR sensitivity stands the "
        "95 % interval; grey gains are equal, undecided, or of a remedy that collapsed."
    )
    if study.primary and table:
        few = min(len({row["seed"] for row in study.rows() if row["lr"] == lr}) for lr in study.lrs())
        told = (
            f"Of the gains only that of {study.primary['remedy']} at LR {rate(study.primary['lr'])} was named before "
            "the runs. The others, in grey, are secondary: each has a 95 % interval of its own, corrected for nothing, "
            f"and no verdict is drawn from it; some are over {count(few, 'seed')} only."
        )
        return join(
            [note(told), details("Gains, intervals and LR sensitivity of all remedies", join([note(text), table]))]
        )
    return join([note(text), table]) if table else table


def _nothing(study: StudyData) -> Markup:
    where = f"None of the {count(len(study.runs), 'run')} has written a record." if study.runs else "No run is listed."
    again = " Run the command below again: finished runs are kept, the others go on." if study.command else ""
    return empty_note(f"{where}{again} Then make this page again.")


def _made(study: StudyData) -> str:
    versions = sorted({str(run.env["qkeel"]) for run in study.runs if run.env.get("qkeel")})
    return f"Made by qkeel from runs of version {listing(versions)}." if versions else "Made by qkeel."
