"""The verdict of a study as a table: each remedy's gain with its interval, largest logit, where it collapsed, cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

from qkeel.errors import RunDirectoryError
from qkeel.metrics import Row, Verdict
from qkeel.report.html.formats import count, listing, number, rate, signed
from qkeel.report.html.markup import NOTHING, Markup, cell, columns, join, table, table_row, tag
from qkeel.report.html.page import command_block, note
from qkeel.report.study.collect import StudyData
from qkeel.report.study.compare import Gain, Standing, standings
from qkeel.report.study.tables import cost_cell, gain_cell, swatch


def verdict_table(study: StudyData) -> Markup:
    """Returns one line per remedy, those that never collapsed first, the largest gain first among them; "" of one.
    Of a study that names a primary comparison: what needs no test, the collapses and largest logits at each rate.

    >>> verdict_table(StudyData(name="", command="", remedies=(), runs=()))
    ''
    """
    lines, rows = standings(study), study.rows()
    if len(lines) < 2:
        return Markup("")
    if study.primary:
        return _certain(study, rows)
    fallen = {line.remedy: collapsed_at(rows, line.remedy) for line in lines}
    lines.sort(key=lambda line: (line.remedy == study.baseline, len(fallen[line.remedy]), -_shown(line)[1]))
    head = [
        *columns("Remedy", f"Against {study.baseline}", kind="text"),
        *columns("Gain", "Largest logit", "Collapsed at"),
    ]
    head += columns(f"Cost: CPU, ×\u00a0{study.baseline}")
    return table("Verdict", head, [_line(study, line, fallen[line.remedy]) for line in lines], sortable=True)


def advice(study: StudyData) -> Markup:
    """Returns the verdict of a study for the page of a watched model: its table, and the line of what gained most.

    Raises: RunDirectoryError if the study compares no remedies.
    """
    verdict = verdict_table(study)
    if not verdict:
        raise RunDirectoryError(
            f"{study.name or study.runs[0].path} compares no remedies: expected a study with runs of several, such as "
            "`qkeel study lr` writes. Leave it out, or make a page of its own."
        )
    rows = study.rows()
    judged = [gain for line in standings(study) for gain in line.gains.values()]
    shown = [gain for gain in judged if gain.praised]
    best = max(shown, key=lambda gain: (not collapsed_at(rows, gain.remedy), gain.mean), default=None)
    text = f"From {study.name or 'runs of the lab'}, {count(len(study.rows()), 'run')} of a small model: "
    if best is None:
        return join([note(f"{text}no remedy is shown to be better than {study.baseline}."), verdict])
    text += f"{best.remedy} gains most, {signed(best.mean)} {study.loss_unit()} at LR {rate(best.lr)} ({best.over()})."
    line = command_block(f'qkeel.apply("{best.remedy}", model, optimizer)')
    return join([note(text), tag("div", {"class": "remedy-line"}, line), verdict])


def _certain(study: StudyData, rows: Sequence[Row]) -> Markup:
    """Per remedy and rate, in how many of the runs attention collapsed, and the largest logit of them."""
    lrs = study.lrs()
    head = columns("Remedy", kind="text")
    for lr in lrs:
        head += columns(f"Collapsed at LR\u00a0{rate(lr)}", f"Largest logit at LR\u00a0{rate(lr)}")
    body = []
    for remedy in study.remedies:
        cells = []
        for lr in lrs:
            here = [row for row in rows if row["remedy"] == remedy and row["lr"] == lr]
            fallen, top = sum(row["collapsed"] for row in here), max((row["max_logit"] for row in here), default=0.0)
            cells += [cell(f"{fallen} of {len(here)}", fallen), cell(number(top), top)] if here else [NOTHING, NOTHING]
        body.append(table_row(swatch(study, remedy), *cells))
    return table("Counts", head, body, sortable=True)


def collapsed_at(rows: Sequence[Row], remedy: str) -> list[str]:
    """Returns the learning rates at which attention collapsed with a remedy; in brackets, with how many of the seeds
    unless with all."""
    found = []
    for lr in sorted({row["lr"] for row in rows}):
        here = [row["collapsed"] for row in rows if row["remedy"] == remedy and row["lr"] == lr]
        if any(here):
            found.append(rate(lr) + ("" if all(here) else f" ({sum(here)} of {len(here)} seeds)"))
    return found


def _line(study: StudyData, line: Standing, fallen: Sequence[str]) -> Markup:
    gain, _ = _shown(line)
    shown = NOTHING if gain is None else gain_cell(gain, f"at LR {rate(gain.lr)}: {gain.over()}")
    return table_row(
        swatch(study, line.remedy),
        tag("td", {"class": "text wide"}, _words(line, study.baseline)),
        cell("", -math.inf) if line.remedy == study.baseline else shown,
        cell(number(line.max_logit), line.max_logit),
        cell(f"LR {listing(fallen)}" if fallen else "never", len(fallen)),
        cost_cell(line),
    )


def _shown(line: Standing) -> tuple[Gain | None, float]:
    """The gain that stands for a remedy: of the highest rate at which its attention works, and its mean."""
    works = [gain for gain in line.gains.values() if not gain.collapsed and math.isfinite(gain.mean)]
    best = max(works, key=lambda gain: gain.lr, default=None)
    return best, -math.inf if best is None else best.mean


def _words(line: Standing, baseline: str) -> str:
    """The verdicts by rate; where attention collapsed nothing is said of the loss."""
    if line.remedy == baseline:
        return "the baseline"
    at = {
        verdict: [rate(lr) for lr, gain in sorted(line.gains.items()) if not gain.collapsed and gain.verdict == verdict]
        for verdict in get_args(Verdict)
    }
    parts = [f"{verdict} at LR {listing(lrs)}" for verdict, lrs in at.items() if lrs]
    fallen = [rate(lr) for lr, gain in sorted(line.gains.items()) if gain.collapsed]
    parts += [f"attention collapsed at LR {listing(fallen)}"] if parts and fallen else []
    return "; ".join(parts) or ("collapsed wherever it was tried" if line.gains else "not compared: no seed has both")
