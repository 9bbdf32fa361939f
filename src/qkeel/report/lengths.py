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

_ACCURACIES = {
    "accuracy_train": "At the training length",
    "accuracy_train_posthoc": "There, post hoc",
    "accuracy_nonrepeat": "Long",
    "accuracy_last": "Last stretch",
    "accuracy_last_short": "That stretch alone",
    "accuracy_repeat": "Repeated",
    "needle": "Needle",
}
_MECHANISM = {"cos_outside": "Angles outside", "dilution": "Largest weight"}
_NEEDLE = ("needle_weight", "needle_bound")
_VALUES = (*_ACCURACIES, *_MECHANISM, "kept_nonrepeat", *_NEEDLE)


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
        Measured(
            *key,
            {
                name: spread([line[name] for line in lines])
                for name in _VALUES
                if all(line.get(name) is not None for line in lines)
            },
        )
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
    reading = [row for row in plain if "accuracy_last_short" in row.values]
    if reading:
        said = listing([f"{row.form} {_gained(row):+.1f}" for row in reading])
        found.append(Finding("note", f"What the last {short} tokens gain from all before them, in points: {said}."))
    found += _needles_found(rows, longest)
    agree, pairs = agreement([row for row in rows if row.length == longest])
    if pairs:
        text = f"{agree} of {pairs} pairs of form and method stand in the published order of the share kept"
        found.append(Finding("note", f"{text} ({published.SOURCE}, 512 → 4096, 100M parameters); nothing is fitted."))
    if seeds == 1:
        found.append(Finding("caution", "One seed: differences of a few points may be chance."))
    return found


def _needles_found(rows: Sequence[Measured], longest: int) -> list[Finding]:
    """What is retrieved from short and from long texts."""
    share = {(row.form, row.method, row.length): row.values["needle"].mean for row in rows if "needle" in row.values}
    short = min((length for _, _, length in share), default=longest)
    said = [
        f"{form}{_under(method)} {100 * share[form, method, short]:.0f} and {100 * at:.0f}"
        for (form, method, length), at in share.items()
        if length == longest and (form, method, short) in share
    ]
    if not said or short == longest:
        return []
    return [Finding("note", f"Needles found among {short} and among {longest} tokens, in %: {listing(said)}.")]


def _under(method: str) -> str:
    return "" if method == "none" else f" under {method}"


def _gained(row: Measured) -> float:
    """Points of accuracy on the last stretch of a text that the text before it is worth."""
    return 100 * (row.values["accuracy_last"].mean - row.values["accuracy_last_short"].mean)


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
    shown = [name for name in _VALUES if any(name in row.values for row in rows)]
    titles = {**_ACCURACIES, "kept_nonrepeat": "Kept", **_MECHANISM}
    head = [column("Form", "text"), column("Post hoc", "text"), column("Length")]
    head += [column(title) for name, title in titles.items() if name in shown]
    head.append(column("Published: kept"))
    note = (
        "Next tokens foretold, in %, mean over seeds with the range below. Kept: long over training length as trained. "
        "Last stretch: the last training length of a text, with all before it and alone: what is gained by reading on. "
        "Angles outside: visible pairs, in %, whose cos(q, k) lies outside the range that their head met in training. "
        "Largest weight: what one key among so many can get in the least able head, at best. "
        f"Published: {published.SOURCE}, GAU, {published.TRAIN_LENGTH} → {published.TEST_LENGTH}; "
        "orders can be compared, sizes cannot."
    )
    body = [tag("tr", {}, *_line(study, row, [name for name in titles if name in shown])) for row in rows]
    inner = table("Accuracy at other lengths, measured and published", head, body, sortable=True)
    return join([tag("p", {"class": "note"}, note), inner, _needles(study, rows)])


def _needles(study: StudyData, rows: Sequence[Measured]) -> Markup:
    """One line per form and method: needles found by length of the text, and the attention they get in the longest."""
    known = {(row.form, row.method, row.length): row.values for row in rows if "needle" in row.values}
    if not known:
        return Markup("")
    spans = sorted({length for _, _, length in known})
    head = [column("Form", "text"), column("Post hoc", "text"), *(column(f"At {length:,}") for length in spans)]
    head += [column("Weight on it"), column("At most")]
    note = (
        "Values foretold when their key is asked for at the end of a text, in %, mean over seeds with the range below; "
        "a guess finds one in eight. Weight on it: of the question, in the longest text, in the head that gives most. "
        "At most: what the norms of that head's queries and keys allow one key among so many."
    )
    body = []
    for form, method in dict.fromkeys(key[:2] for key in known):
        cells = [_cell(known.get((form, method, length), {}).get("needle"), "needle") for length in spans]
        last = known.get((form, method, spans[-1]), {})
        cells += [_cell(last.get(name), name) for name in _NEEDLE]
        name = tag("th", {"scope": "row"}, swatch(study, form))
        body.append(tag("tr", {}, name, tag("td", {"class": "text"}, method), *cells))
    return join([tag("p", {"class": "note"}, note), table("Needles found", head, body, sortable=True)])


def _line(study: StudyData, row: Measured, names: Sequence[str]) -> list[Markup]:
    theirs = published.kept(row.form, row.method)
    return [
        tag("th", {"scope": "row"}, swatch(study, row.form)),
        tag("td", {"class": "text"}, row.method),
        cell(f"{row.length:,}", row.length),
        *(_cell(row.values.get(name), name) for name in names),
        cell("–" if theirs is None else f"{theirs:.2f}", math.inf if theirs is None else theirs),
    ]


def _cell(value: Spread | None, name: str) -> Markup:
    if value is None:
        return cell("–", math.inf)
    times, places = (100, 3 if name == "cos_outside" else 1) if name not in ("kept_nonrepeat", "dilution") else (1, 2)
    low, high = (f"{times * x:.{places}f}" for x in (value.low, value.high))
    return cell(f"{times * value.mean:.{places}f}", value.mean, f"{low} to {high}" if value.n > 1 else "")
