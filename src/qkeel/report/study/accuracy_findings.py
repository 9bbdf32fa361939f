"""The share of held-out images that are classified right, where runs classify."""

from __future__ import annotations

from qkeel.metrics import paired_effects
from qkeel.report.html.formats import listing, rate
from qkeel.report.html.markup import Markup, cell, columns, join, table, table_row
from qkeel.report.html.page import Finding, note
from qkeel.report.study.collect import BASELINE, StudyData
from qkeel.report.study.compare import Spread, collapses, less, spread
from qkeel.report.study.tables import spread_cell, swatch


def cells(study: StudyData) -> dict[tuple[str, float], dict[int, float]]:
    """Returns the accuracy by seed of each remedy and rate, in the study's order."""
    found: dict[tuple[str, float], dict[int, float]] = {}
    for remedy in study.remedies:
        for line in (line for line in study.rows() if line["remedy"] == remedy):
            if isinstance(line.get("val_accuracy"), float):
                found.setdefault((remedy, line["lr"]), {})[line["seed"]] = line["val_accuracy"]
    return found


def findings(study: StudyData) -> list[Finding]:
    """Returns the best accuracy without collapse, what cannot be distinguished from it, and the best of none."""
    found = {key: each for key, each in cells(study).items() if not collapses(study.rows(), *key)}
    if not found:
        return []
    totals = {key: spread(list(each.values())) for key, each in found.items()}
    best = max(found, key=lambda key: totals[key].mean)
    text = f"Highest held-out accuracy: {_percent(totals[best])}, {best[0]} at LR {rate(best[1])}"
    against = {key: less(each, found[best]) for key, each in found.items() if key != best}
    known = {key: one for key, one in against.items() if one is not None and len(one.values) > 1}
    judged = zip(known, paired_effects([one.numbers for one in known.values()]))
    close = [f"{remedy} at LR {rate(lr)}" for (remedy, lr), one in judged if one.verdict == "undecided"]
    text += f" ({listing(close)} cannot be distinguished from it)" if close else ""
    plain = [key for key in found if key[0] == BASELINE]
    if plain and best[0] != BASELINE:
        top = max(plain, key=lambda key: totals[key].mean)
        text += f"; the highest of {BASELINE} is {_percent(totals[top])}, at LR {rate(top[1])}"
    return [Finding("note", text + ".")]


def _percent(one: Spread) -> str:
    return f"{100 * one.mean:.1f} %"


def table_of(study: StudyData) -> Markup:
    """Returns the table of remedies by rates; empty where nothing is classified."""
    found = {key: spread(list(each.values())) for key, each in cells(study).items()}
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
