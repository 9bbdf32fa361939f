"""The page of a chaos study: sentences and table on the differences that one float32 step in one weight makes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qkeel.metrics import Row, paired_effect
from qkeel.report.html.formats import count, listing, number, rate
from qkeel.report.html.markup import NOTHING, Markup, cell, columns, join, table, table_row
from qkeel.report.html.page import Finding, note
from qkeel.report.study.collect import StudyData
from qkeel.report.study.compare import MARGIN
from qkeel.report.study.tables import swatch

_LEVEL = 0.95


def _pairs(study: StudyData) -> dict[tuple[str, float, str], list[Row]]:
    """The pairs of each remedy, rate and part of the study."""
    found: dict[tuple[str, float, str], list[Row]] = {}
    known = [pair for pair in study.chaos if pair["remedy"] in study.remedies]
    for pair in sorted(known, key=lambda pair: (study.remedies.index(pair["remedy"]), pair["lr"])):
        found.setdefault((pair["remedy"], float(pair["lr"]), pair.get("part", "")), []).append(pair)
    return found


def _floor(pairs: Sequence[Row]) -> float:
    return math.sqrt(math.fsum(float(pair["loss_difference"]) ** 2 for pair in pairs) / len(pairs))


def findings(study: StudyData) -> list[Finding]:
    """Returns the largest floor, and for each remedy the rate from which it passes what counts as a difference."""
    floors = {key: _floor(pairs) for key, pairs in _pairs(study).items()}
    floors = {key: floor for key, floor in floors.items() if math.isfinite(floor)}
    if not floors:
        return [Finding("caution", "No pair of runs has finished yet.")]
    top = max(floors, key=floors.__getitem__)
    seeds = count(len({pair["seed"] for pair in study.chaos}), "seed")
    lead = (
        f"One float32 step in one weight changes the final held-out loss by up to {number(floors[top], 2)} nats "
        f"({top[0]} at LR {rate(top[1])}{', ' * bool(top[2])}{top[2]}, root mean square over {seeds})."
    )
    parts = []
    for remedy in dict.fromkeys(remedy for remedy, _, _ in floors):
        above = [lr for (name, lr, _), floor in floors.items() if name == remedy and floor > MARGIN]
        parts.append(f"{remedy} from LR {rate(min(above))} on" if above else f"{remedy} at no LR tried")
    text = f"Above {MARGIN:g} nats: {listing(parts)}."
    return [Finding("lead", lead), Finding("note", text)]


def floors_table(study: StudyData) -> Markup:
    """Returns a line per remedy and rate; empty where no pair is finished."""
    lines = [_line(study, *key, pairs) for key, pairs in _pairs(study).items()]
    if not lines:
        return Markup("")
    text = (
        "Each run against one that differs by one float32 step in one weight. Chaos floor: root mean square over seeds "
        "of the difference in final held-out loss. Exponent: slope of ln distance of the heads' largest and smallest "
        "logits against steps, until it passes a tenth of their size; mean and 95 % interval over seeds."
    )
    head = [*columns("Remedy", kind="text")]
    head += columns("LR", "Chaos floor", "Largest difference", "Logits apart at the end", "Exponent per step")
    return join([note(text), table("What one float32 step does", head, lines, sortable=True)])


def _line(study: StudyData, remedy: str, lr: float, part: str, pairs: Sequence[Row]) -> Markup:
    worst, apart = (max(float(pair[name]) for pair in pairs) for name in ("loss_difference", "logit_distance"))
    known = [float(pair["exponent"]) for pair in pairs if pair.get("exponent") is not None]
    exponent = NOTHING
    if known:
        mean = math.fsum(known) / len(known)
        one = paired_effect(known, level=_LEVEL) if len(known) > 1 else None
        small = f"{number(one.low, 2)} to {number(one.high, 2)}" if one else "one seed"
        exponent = cell(number(mean, 2), mean, small)
    cells = [cell(number(value, 2), value) for value in (_floor(pairs), worst, apart)]
    return table_row(swatch(study, remedy), cell(rate(lr), lr, part), *cells, exponent)
