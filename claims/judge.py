"""The verdict of each claim on the results of its study, and the page that tells them."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims.claim import MARGIN, OF_ALL_RATES, Cell, Claim
from claims.studies import CORPORA, SEEDS, STUDIES
from claims.table import CLAIMS, PUBLISHED, SECTIONS
from qkeel.metrics import PairedEffect, largest_stable_lr, lr_sensitivity, paired_effects

Results = Mapping[str, Mapping[str, Any]]  # by study: command, identity, rows
HERE = Path(__file__).parent
PAGE = HERE.parent / "research" / "claims.md"


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """A claim with its effect over the seeds; None where too few seeds have a result."""

    claim: Claim
    effect: PairedEffect | None

    @property
    def verdict(self) -> str:
        """Reproduced, contradicted or undecided."""
        if self.effect is None:
            return "not run yet"
        if self.effect.verdict == "undecided":
            more = self.effect.seeds
            return "undecided" + (f", about {more:,} seeds would decide" if more else "")
        held = self.effect.verdict == ("equal" if self.claim.equal else "better")
        return "**reproduced**" if held else "**contradicted**"

    @property
    def figures(self) -> str:
        """Mean, interval and seeds."""
        if self.effect is None:
            return ""
        write = _times if self.claim.ratio else _signed
        low, mean, high = (write(x) for x in (self.effect.low, self.effect.mean, self.effect.high))
        return f"{mean} ({low} to {high}), {self.effect.n} seeds"


def by_seed(results: Results, claim: Claim, side: Cell | float) -> dict[int, float]:
    """One side of a claim by seed; some columns are made of all rates that the study has."""
    rows = _rows(results, claim.study)
    if not isinstance(side, Cell):
        return dict.fromkeys({row["seed"] for row in rows}, side)
    rows = _rows(results, side.study or claim.study)
    mine = [row for row in rows if all(row.get(name) == value for name, value in side.where.items())]
    if side.column in OF_ALL_RATES:
        found = _of_all_rates(side.column, mine, {row["lr"] for row in rows})
    else:
        found = {row["seed"]: row[side.column] for row in mine if row.get(side.column) is not None}
    return {seed: side.times * value for seed, value in found.items()}


def _rows(results: Results, study: str) -> Sequence[Mapping[str, Any]]:
    return results[study]["rows"] if study in results else []


def _of_all_rates(column: str, rows: Sequence[Mapping[str, Any]], lrs: set[float]) -> dict[int, float]:
    """A number of each seed that has a run at every rate."""
    found = {}
    for seed in {row["seed"] for row in rows}:
        own = [row for row in rows if row["seed"] == seed]
        if {row["lr"] for row in own} != lrs:
            continue
        if column == "lr_sensitivity":
            start = math.fsum(row["init_loss"] for row in own) / len(own)
            found[seed] = lr_sensitivity([row["val_loss"] for row in own], start)
        elif (largest := largest_stable_lr(own)) is not None:
            found[seed] = largest
    return found


def differences(claim: Claim, results: Results) -> list[float]:
    """Left minus right by seed, of logarithms where the claim is about a ratio; what is not finite is left out."""
    left, right = (by_seed(results, claim, side) for side in (claim.left, claim.right))
    of = math.log if claim.ratio else float
    pairs = [(left[seed], right[seed]) for seed in sorted(left.keys() & right.keys())]
    return [of(a) - of(b) for a, b in pairs if all(math.isfinite(x) and (x > 0 or not claim.ratio) for x in (a, b))]


def judge(results: Results, claims: Sequence[Claim] = CLAIMS) -> list[Judged]:
    """The verdict of every claim; those of one study are tested together, by Holm."""
    effects: dict[int, PairedEffect] = {}
    for study in dict.fromkeys(claim.study for claim in claims):
        mine = {i: differences(claim, results) for i, claim in enumerate(claims) if claim.study == study}
        known = {i: found for i, found in mine.items() if len(found) > 1}
        effects |= zip(known, paired_effects(list(known.values()), MARGIN))
    return [Judged(claim, effects.get(i)) for i, claim in enumerate(claims)]


def tally(judged: Sequence[Judged]) -> str:
    """How many claims have which verdict."""
    counts = collections.Counter(one.verdict.strip("*").partition(",")[0] for one in judged)
    names = ("reproduced", "contradicted", "undecided", "not run yet")
    return ", ".join(f"{counts[name]} {name}" for name in names if counts[name])


def page(results: Results) -> str:
    """The text of research/claims.md: the claims and what was found, where it comes from, and earlier findings."""
    judged = judge(results)
    lines = [f"Of {len(judged)} claims: {tally(judged)}.", ""]
    place = {id(one.claim): one for one in judged}
    for heading, claims in SECTIONS.items():
        lines += [
            f"## {heading}",
            "",
            "| claim | source | verdict | effect (95 % interval) | study |",
            "|---|---|---|---|---|",
        ]
        for one in (place[id(claim)] for claim in claims):
            lines.append(
                f"| {one.claim.text} | {one.claim.source} | {one.verdict} | {one.figures} | {one.claim.study} |"
            )
        lines.append("")
    found = "\n".join(_about(study, results.get(study)) for study in STUDIES)
    spent = sum(results[study].get("cpu_seconds", 0) for study in STUDIES if study in results)
    fewer = ", ".join(f"{about.seeds} in `{name}`" for name, about in STUDIES.items() if about.seeds != SEEDS)
    read = {"seeds": SEEDS, "fewer": fewer, "minutes": round(spent / 60), "margin": MARGIN, "studies": len(STUDIES)}
    head = (HERE / "head.md").read_text(encoding="utf-8").format(**read, **CORPORA)
    earlier = (HERE / "earlier.md").read_text(encoding="utf-8")
    published = _published(results)
    return "\n".join([head, *lines, *published, "## Where the results come from", "", found, "", earlier])


def _published(results: Results) -> list[str]:
    """The table of 32 rows, cell by cell against its published direction."""
    columns = [judge(results, claims) for claims in PUBLISHED.values()]
    lines = [
        "## The published table of forms and methods",
        "",
        "Su 2023 tests eight forms as trained and under three methods, on text that does not repeat and that does. As",
        "trained a form is compared with `baseline`, under a method with itself as trained: the published change in",
        "points of accuracy at 8 times the training length, and whether the change here (share of accuracy, 95 %",
        "interval) has its direction. ReRoPE has a window of a quarter of the training length, as published.",
        f"Text that does not repeat: {tally(columns[0])}; repeated text: {tally(columns[1])}.",
        "",
        "| form: published, not repeated | here | verdict | published, repeated | here | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for plain, repeated in zip(*columns, strict=True):
        other = repeated.claim.text.rpartition(": ")[2]
        cells = (plain.claim.text, _measured(plain), plain.verdict, other, _measured(repeated), repeated.verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _measured(one: Judged) -> str:
    """The change in its own direction, whichever was published."""
    if one.effect is None:
        return ""
    falls = "−" in one.claim.text
    ends = (-one.effect.high, -one.effect.low) if falls else (one.effect.low, one.effect.high)
    mean = -one.effect.mean if falls else one.effect.mean
    return f"{_signed(mean)} ({_signed(ends[0])} to {_signed(ends[1])}), {one.effect.n} seeds"


def _about(study: str, about: Mapping[str, Any] | None) -> str:
    if about is None:
        return f"- {study}: not run yet."
    identity = ", ".join(f"{name} {value}" for name, value in about["identity"].items())
    spent = f"; {about['cpu_seconds']:,.0f} CPU seconds of training" if "cpu_seconds" in about else ""
    kept = f" Seeds under {about['kept_seeds']} are of earlier runs." if about.get("kept_seeds") else ""
    return f"- {study}: {len(about['rows'])} rows{spent}; {identity}.{kept}"


def _signed(value: float) -> str:
    """With three decimals, or two digits where that is more."""
    text = f"{value:+.3f}" if abs(value) >= 0.0095 or not value else f"{value:+.2g}"
    return text.replace("-", "−")


def _times(value: float) -> str:
    return f"{math.exp(value):.3g}×" if value < 700 else "∞"
