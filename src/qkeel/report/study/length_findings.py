"""Length extrapolation: its sentences, and the table of measured and published numbers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from qkeel.metrics import Row
from qkeel.report.html.formats import count, listing
from qkeel.report.html.markup import NOTHING, Markup, cell, columns, join, table, table_row, words
from qkeel.report.html.page import Finding, note
from qkeel.report.study.collect import StudyData
from qkeel.report.study.compare import Spread, spread
from qkeel.report.study.tables import spread_cell, swatch

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
        """The share of the accuracy that is kept, mean over seeds."""
        return self.values["kept_nonrepeat"].mean


def is_long(study: StudyData) -> bool:
    """True if runs of the study were measured at other lengths than their own."""
    return any(run.long for run in study.runs)


def measured(study: StudyData) -> list[Measured]:
    """Returns every form, method and length that has a number, in the study's order."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for form in study.remedies:
        for run in (run for run in study.runs if run.remedy == form):
            for line in run.long:
                if line.get("kept_nonrepeat") is not None:
                    found.setdefault((form, str(line["posthoc"]), int(line["test_length"])), []).append(line)
    return [Measured(*key, _spreads(lines)) for key, lines in found.items()]


def _spreads(lines: Sequence[Row]) -> dict[str, Spread]:
    """The numbers that every line has."""
    known = [name for name in _VALUES if all(line.get(name) is not None for line in lines)]
    return {name: spread([line[name] for line in lines]) for name in known}


def train_length(study: StudyData) -> int | None:
    """Returns the context in training, where all runs have the same."""
    lengths = {run.config["data"]["context"] for run in study.runs if run.config}
    return lengths.pop() if len(lengths) == 1 else None


def findings(study: StudyData) -> list[Finding]:
    """Returns the share kept by each form as trained, its order against the published one, and what limits both."""
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
        gained = [100 * (row.values["accuracy_last"].mean - row.values["accuracy_last_short"].mean) for row in reading]
        said = listing([f"{row.form} {points:+.1f}" for row, points in zip(reading, gained)])
        found.append(Finding("note", f"What the last {short} tokens gain from all before them, in points: {said}."))
    found += _needles_found(rows, longest)
    agree, pairs = agreement([row for row in rows if row.length == longest])
    if pairs:
        text = f"{agree} of {pairs} pairs of form and method have the published order of the share kept"
        found.append(Finding("note", f"{text} ({SOURCE}, 512 → 4096, 100M parameters); nothing is fitted."))
    if seeds == 1:
        found.append(Finding("caution", "One seed: differences of a few points may be chance."))
    return found


def _needles_found(rows: Sequence[Measured], longest: int) -> list[Finding]:
    """Findings on retrieval from short and from long texts."""
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


def agreement(rows: Sequence[Measured]) -> tuple[int, int]:
    """Returns how many pairs have the published order, and how many are in both tables and unequal when published."""
    known = [(row.kept, theirs) for row in rows if (theirs := published_share(row.form, row.method)) is not None]
    pairs = [(a, b) for a, b in itertools.combinations(known, 2) if a[1] != b[1]]
    return sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs), len(pairs)


def comparison(study: StudyData) -> Markup:
    """Returns a table of forms, methods and lengths: accuracies in %, share kept, and the published share."""
    rows = measured(study)
    if not rows:
        return Markup("")
    shown = [name for name in _VALUES if any(name in row.values for row in rows)]
    titles = {**_ACCURACIES, "kept_nonrepeat": "Kept", **_MECHANISM}
    head = columns("Form", "Post hoc", kind="text")
    head += columns("Length", *(title for name, title in titles.items() if name in shown), "Published: kept")
    text = (
        "Next tokens predicted, in %, means over seeds, range below. Kept: long over training length as trained. "
        "Last stretch: the last training length of a text, with all before it and alone: what is gained by reading on. "
        "Angles outside: visible pairs, in %, whose cos(q, k) lies outside the range that their head met in training. "
        "Largest weight: what one key among so many can get in the least able head, at best. "
        f"Published: {SOURCE}, GAU, {TRAIN_LENGTH} → {TEST_LENGTH}; "
        "orders can be compared, sizes cannot."
    )
    body = [_line(study, one, [name for name in titles if name in shown]) for one in rows]
    inner = table("Accuracy at other lengths, measured and published", head, body, sortable=True)
    return join([note(text), inner, _needles(study, rows)])


def _needles(study: StudyData, rows: Sequence[Measured]) -> Markup:
    """One line per form and method: needles found by length of the text, and the attention they get in the longest."""
    known = {(row.form, row.method, row.length): row.values for row in rows if "needle" in row.values}
    if not known:
        return Markup("")
    spans = sorted({length for _, _, length in known})
    head = columns("Form", "Post hoc", kind="text")
    head += columns(*(f"At {length:,}" for length in spans), "Weight on it", "At most")
    text = (
        "Values predicted when their key is asked for at the end of a text, in %, means over seeds, range below; "
        "a guess finds one in eight. Weight on it: of the question, in the longest text, in the head that gives most. "
        "At most: what the norms of that head's queries and keys allow one key among so many."
    )
    body = []
    for form, method in dict.fromkeys(key[:2] for key in known):
        cells = [_cell(known.get((form, method, length), {}).get("needle"), "needle") for length in spans]
        last = known.get((form, method, spans[-1]), {})
        cells += [_cell(last.get(name), name) for name in _NEEDLE]
        body.append(table_row(swatch(study, form), words(method), *cells))
    return join([note(text), table("Needles found", head, body, sortable=True)])


def _line(study: StudyData, one: Measured, names: Sequence[str]) -> Markup:
    theirs = published_share(one.form, one.method)
    return table_row(
        swatch(study, one.form),
        words(one.method),
        cell(f"{one.length:,}", one.length),
        *(_cell(one.values.get(name), name) for name in names),
        NOTHING if theirs is None else cell(f"{theirs:.2f}", theirs),
    )


def _cell(value: Spread | None, name: str) -> Markup:
    if value is None:
        return NOTHING
    times, places = (100, 3 if name == "cos_outside" else 1) if name not in ("kept_nonrepeat", "dilution") else (1, 2)
    return spread_cell(value, lambda x: f"{times * x:.{places}f}")


# Form -> next-token accuracy in %: at 512 (training), and for each post-hoc method at 4096 repeated and not repeated.
# About 100M parameters, 24 GAU layers of one head, trained on 512 tokens. ReRoPE: window 128.
# cosa_logn as it is: 48.95 in the source's first table, 48.39 in its second.
SOURCE = "Su 2023, kexue.fm 9859"
TRAIN_LENGTH, TEST_LENGTH = 512, 4096
_POSTHOC = ("none", "ntk", "yarn", "rerope")
_PUBLISHED: dict[str, tuple[float, Sequence[tuple[float, float]]]] = {
    "baseline": (49.41, ((24.17, 23.16), (60.57, 42.20), (80.10, 47.45), (76.11, 47.82))),
    "baseline_logn": (49.40, ((24.60, 24.02), (75.86, 47.06), (82.57, 46.52), (85.47, 48.87))),
    "qna": (49.55, ((22.45, 22.18), (52.28, 39.88), (82.53, 47.50), (78.22, 47.72))),
    "qna_logn": (49.42, ((19.55, 18.74), (57.44, 41.56), (80.08, 45.16), (84.71, 48.31))),
    "kna": (49.60, ((61.08, 47.69), (64.44, 43.02), (84.19, 47.44), (77.76, 47.73))),
    "kna_logn": (49.58, ((63.17, 46.40), (79.05, 47.43), (83.95, 47.16), (85.48, 48.78))),
    "cosa": (49.73, ((58.90, 46.98), (62.50, 42.77), (83.40, 47.80), (77.82, 47.80))),
    "cosa_logn": (49.67, ((64.74, 48.95), (78.97, 47.46), (82.28, 45.72), (85.67, 48.39))),
}
ACCURACY: dict[tuple[str, str], tuple[float, float, float]] = {
    (form, method): (trained, repeated, whole)
    for form, (trained, each) in _PUBLISHED.items()
    for method, (repeated, whole) in zip(_POSTHOC, each)
}
"""By form and post-hoc method: at the training length, at 4096 repeated, at 4096 not repeated."""


def published_share(form: str, method: str) -> float | None:
    """Returns the published share of accuracy that is kept at 8 × the training length; None where none was
    published.

    >>> round(published_share("kna", "none"), 2), published_share("qwen3", "none")
    (0.96, None)
    """
    row = ACCURACY.get((form, method))
    return None if row is None else row[2] / row[0]
