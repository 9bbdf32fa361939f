"""Length extrapolation: the table of what was measured beside what was published, and what it says."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from qkeel.report import published
from qkeel.report.collect import StudyData
from qkeel.report.compare import Spread, spread
from qkeel.report.formats import count, listing
from qkeel.report.markup import Markup, join, tag
from qkeel.report.summary import Finding
from qkeel.report.tables import cell, column, swatch, table

_COLUMNS = {
    "accuracy_train": "At the training length",
    "accuracy_nonrepeat": "Long",
    "accuracy_last": "Last stretch",
    "accuracy_repeat": "Repeated",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One form under one method at one length, over its seeds."""

    form: str
    method: str
    length: int
    values: dict[str, Spread]

    @property
    def kept(self) -> float:
        """Share of the accuracy that is kept, mean over seeds."""
        return self.values["kept_nonrepeat"].mean


def is_long(study: StudyData) -> bool:
    """Whether runs of the study were measured at other lengths than their own."""
    return any(run.long for run in study.runs)


def measured(study: StudyData) -> list[Measured]:
    """Every form, method and length that has a number, in the study's order."""
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for form in study.remedies:
        for run in (run for run in study.runs if run.remedy == form):
            for line in run.long:
                if line.get("kept_nonrepeat") is not None:
                    found.setdefault((form, str(line["posthoc"]), int(line["test_length"])), []).append(line)
    return [
        Measured(*key, {name: spread([line[name] for line in lines]) for name in (*_COLUMNS, "kept_nonrepeat")})
        for key, lines in found.items()
    ]


def train_length(study: StudyData) -> int | None:
    """The context in training, where all runs have the same."""
    lengths = {run.config["data"]["context"] for run in study.runs if run.config}
    return lengths.pop() if len(lengths) == 1 else None


def findings(study: StudyData) -> list[Finding]:
    """What is kept by each form as trained, the order beside the published one, and what limits it."""
    rows = measured(study)
    if not rows:
        return []
    longest = max(row.length for row in rows)
    plain = sorted((row for row in rows if row.length == longest and row.method == "none"), key=lambda r: -r.kept)
    held = listing([f"{row.form} {row.kept:.2f}" for row in plain])
    short = train_length(study)
    seeds = max(row.values["kept_nonrepeat"].n for row in rows)
    found = []
    if plain:
        text = f"Trained on {short} tokens and tested on {longest}, as trained: the share of accuracy kept is {held}; "
        found.append(Finding("lead", text + f"{count(seeds, 'seed')}."))
    agree, pairs = agreement([row for row in rows if row.length == longest])
    if pairs:
        text = f"{agree} of {pairs} pairs of form and method stand in the published order of the share kept"
        found.append(Finding("note", f"{text} ({published.SOURCE}, 512 → 4096, 100M parameters); nothing is fitted."))
    if seeds == 1:
        found.append(Finding("caution", "One seed: differences of a few points may be chance."))
    return found


def agreement(rows: Sequence[Measured]) -> tuple[int, int]:
    """Of the pairs that both tables have and the published one tells apart, how many stand in the same order."""
    known = [(row.kept, theirs) for row in rows if (theirs := published.kept(row.form, row.method)) is not None]
    pairs = [(a, b) for a, b in itertools.combinations(known, 2) if a[1] != b[1]]
    return sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs), len(pairs)


def comparison(study: StudyData) -> Markup:
    """One line per form, method and length: accuracies in %, share kept, and the published share."""
    rows = measured(study)
    if not rows:
        return Markup("")
    head = [column("Form", "text"), column("Post hoc", "text"), column("Length"), *map(column, _COLUMNS.values())]
    head += [column("Kept"), column("Published: kept")]
    note = (
        "Next tokens foretold, in %, mean over seeds with the range below. Kept: long over training length as trained. "
        f"Published: {published.SOURCE}, GAU, {published.TRAIN_LENGTH} → {published.TEST_LENGTH}; "
        "orders can be compared, sizes cannot."
    )
    body = [tag("tr", {}, *_line(study, row)) for row in rows]
    inner = table("Accuracy at other lengths, measured and published", head, body, sortable=True)
    return join([tag("p", {"class": "note"}, note), inner])


def _line(study: StudyData, row: Measured) -> list[Markup]:
    theirs = published.kept(row.form, row.method)
    return [
        tag("th", {"scope": "row"}, swatch(study, row.form)),
        tag("td", {"class": "text"}, row.method),
        cell(f"{row.length:,}", row.length),
        *(_cell(row.values[name], 100, 1) for name in _COLUMNS),
        _cell(row.values["kept_nonrepeat"], 1, 2),
        cell("–" if theirs is None else f"{theirs:.2f}", math.inf if theirs is None else theirs),
    ]


def _cell(value: Spread, times: float, places: int) -> Markup:
    low, high = (f"{times * x:.{places}f}" for x in (value.low, value.high))
    return cell(f"{times * value.mean:.{places}f}", value.mean, f"{low} to {high}" if value.n > 1 else "")
