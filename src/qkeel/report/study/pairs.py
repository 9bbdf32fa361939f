"""Every remedy against every other: a matrix of paired differences with their intervals, for each learning rate."""

from __future__ import annotations

import dataclasses
import itertools

from qkeel.report.html.formats import rate
from qkeel.report.html.markup import NOTHING, Markup, cell, columns, join, table, table_row
from qkeel.report.html.page import details, note
from qkeel.report.study.collect import StudyData
from qkeel.report.study.compare import Gain, collapses, judge
from qkeel.report.study.tables import gain_cell, swatch


def pairs(study: StudyData) -> list[Gain]:
    """Returns the gain of each remedy over each that comes after it, at each rate, judged together: Holm over all."""
    rows = study.rows()
    present = [remedy for remedy in study.remedies if any(row["remedy"] == remedy for row in rows)]
    return judge(rows, [(a, b, lr) for lr in study.lrs() for a, b in itertools.combinations(present, 2)])


def pair_tables(study: StudyData) -> Markup:
    """Returns a matrix for each learning rate; empty of two remedies, whose one comparison stands above."""
    found = pairs(study)
    present = list(dict.fromkeys(name for gain in found for name in (gain.remedy, gain.baseline)))
    if len(present) < 3:
        return Markup("")
    judged = sum(gain.effect is not None for gain in found)
    text = (
        "Held-out loss of the remedy above minus that of the remedy at the left: a positive number says that the one "
        "at the left is better; means of pairs by seed. Below stands the 95 % interval (Student's t), by Holm for "
        f"all {judged} comparisons of this section at once; grey is equal, undecided, or of a remedy that collapsed."
    )
    parts: list[Markup] = [note(text)]
    for i, lr in enumerate(reversed(study.lrs())):
        here = {(gain.remedy, gain.baseline): gain for gain in found if gain.lr == lr}
        head = [*columns("Better by", kind="text"), *columns(*present)]
        body = [
            table_row(swatch(study, a), *(_cell(here, a, b, collapses(study.rows(), a, lr)) for b in present))
            for a in present
        ]
        matrix = table(f"Every pair at LR {rate(lr)}", head, body)
        parts.append(details(f"LR {rate(lr)}", matrix, shown=i == 0))
    return join(parts)


def _cell(here: dict[tuple[str, str], Gain], a: str, b: str, collapsed: bool) -> Markup:
    """The gain of a over b: as judged, or the mirror image of that of b over a; collapsed: whether a did."""
    if a == b:
        return cell("", 0.0)
    other = here.get((b, a))
    gain = here.get((a, b)) or (other and other.reversed())
    if gain is None:
        return NOTHING
    return gain_cell(dataclasses.replace(gain, collapsed=collapsed), gain.over())
