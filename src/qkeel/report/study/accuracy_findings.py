"""The share of held-out images that are classified right, where runs classify."""

from __future__ import annotations

from qkeel.report.html.formats import listing, rate
from qkeel.report.html.markup import Markup, cell, columns, join, table, table_row
from qkeel.report.html.page import Finding, note
from qkeel.report.study.collect import BASELINE, StudyData
from qkeel.report.study.compare import Spread, spread
from qkeel.report.study.tables import spread_cell, swatch


def cells(study: StudyData) -> dict[tuple[str, float], Spread]:
    """Returns the accuracy over the seeds of each remedy and rate, in the study's order."""
    found: dict[tuple[str, float], list[float]] = {}
    for remedy in study.remedies:
        for line in (line for line in study.rows() if line["remedy"] == remedy):
            if isinstance(line.get("val_accuracy"), float):
                found.setdefault((remedy, line["lr"]), []).append(line["val_accuracy"])
    return {key: spread(values) for key, values in found.items()}


def findings(study: StudyData) -> list[Finding]:
    """Returns the best accuracy, those whose range over seeds meets its own, and the best without a remedy."""
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
    """Returns the table of remedies by rates; empty where nothing is classified."""
    found = cells(study)
    if not found:
        return Markup("")
    lrs = study.lrs()
    head = [*columns("Remedy", kind="text"), *columns(*(f"LR\u00a0{rate(lr)}" for lr in lrs))]
    text = "Share of held-out images that are classified right, mean over seeds in %, with the range below."
    body = [
        table_row(swatch(study, remedy), *(_cell(found.get((remedy, lr))) for lr in lrs))
        for remedy in dict.fromkeys(remedy for remedy, _ in found)
    ]
    return join([note(text), table("Accuracy on held-out images", head, body, sortable=True)])


def _cell(one: Spread | None) -> Markup:
    return cell("–", -1.0) if one is None else spread_cell(one, lambda share: f"{100 * share:.1f}")
