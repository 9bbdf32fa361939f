"""The share of held-out images that are classified right, where runs classify."""

from __future__ import annotations

from collections.abc import Sequence

from qkeel.report.collect import BASELINE, StudyData
from qkeel.report.compare import Spread, spread
from qkeel.report.formats import listing, rate
from qkeel.report.markup import Markup, join, tag
from qkeel.report.summary import Finding
from qkeel.report.tables import cell, column, swatch, table


def cells(study: StudyData) -> dict[tuple[str, float], Spread]:
    """Accuracy over the seeds of each remedy and rate, in the study's order."""
    found: dict[tuple[str, float], list[float]] = {}
    for remedy in study.remedies:
        for row in (row for row in study.rows() if row["remedy"] == remedy):
            if isinstance(row.get("val_accuracy"), float):
                found.setdefault((remedy, row["lr"]), []).append(row["val_accuracy"])
    return {key: spread(values) for key, values in found.items()}


def findings(study: StudyData) -> list[Finding]:
    """The best accuracy, those whose range over seeds meets its own, and the best of no remedy."""
    found = cells(study)
    if not found:
        return []
    best = max(found, key=lambda key: found[key].mean)
    text = f"Highest held-out accuracy: {_percent(found[best])}, {best[0]} at LR {rate(best[1])}"
    close = [f"{r} at LR {rate(lr)}" for (r, lr), one in found.items() if (r, lr) != best and _meet(one, found[best])]
    text += f" ({listing(close)} within its range)" if close and found[best].n > 1 else ""
    plain = [key for key in found if key[0] == BASELINE]
    if plain and best[0] != BASELINE:
        top = max(plain, key=lambda key: found[key].mean)
        text += f"; the highest of {BASELINE} is {_percent(found[top])}, at LR {rate(top[1])}"
    return [Finding("note", text + ".")]


def _meet(one: Spread, other: Spread) -> bool:
    return one.high >= other.low and one.low <= other.high


def _percent(one: Spread) -> str:
    return f"{100 * one.mean:.1f} %"


def table_of(study: StudyData) -> Markup:
    """Remedies by rates; empty where nothing is classified."""
    found = cells(study)
    if not found:
        return Markup("")
    lrs = study.lrs()
    head = [column("Remedy", "text"), *(column(f"LR\u00a0{rate(lr)}") for lr in lrs)]
    note = "Share of held-out images classified right, mean over seeds in %, the range below."
    body = [tag("tr", {}, *_line(study, remedy, lrs, found)) for remedy in dict.fromkeys(r for r, _ in found)]
    return join([tag("p", {"class": "note"}, note), table("Accuracy on held-out images", head, body, sortable=True)])


def _line(study: StudyData, remedy: str, lrs: Sequence[float], found: dict[tuple[str, float], Spread]) -> list[Markup]:
    line = [tag("th", {"scope": "row"}, swatch(study, remedy))]
    for lr in lrs:
        one = found.get((remedy, lr))
        if one is None:
            line.append(cell("–", -1.0))
        else:
            small = f"{100 * one.low:.1f} to {100 * one.high:.1f}" if one.n > 1 else ""
            line.append(cell(f"{100 * one.mean:.1f}", one.mean, small))
    return line
