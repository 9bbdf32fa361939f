"""The verdict of each claim on the results of its study, and the page that tells them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims.table import CLAIMS, CORPUS, MARGIN, SEEDS, STUDIES, Cell, Claim
from qkeel.metrics import PairedEffect, lr_sensitivity, paired_effects

Results = Mapping[str, Mapping[str, Any]]  # by study: command, identity, rows
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "claims.md"


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


def by_seed(rows: Sequence[Mapping[str, Any]], side: Cell | float, seeds: Sequence[int]) -> dict[int, float]:
    """One side of a claim by seed; LR sensitivity is made of all rates that the study has."""
    if not isinstance(side, Cell):
        return dict.fromkeys(seeds, side)
    mine = [row for row in rows if all(row.get(name) == value for name, value in side.where.items())]
    if side.column != "lr_sensitivity":
        return {row["seed"]: row[side.column] for row in mine if row.get(side.column) is not None}
    lrs = {row["lr"] for row in rows}
    found = {}
    for seed in seeds:
        own = [row for row in mine if row["seed"] == seed]
        if {row["lr"] for row in own} == lrs:
            start = math.fsum(row["init_loss"] for row in own) / len(own)
            found[seed] = lr_sensitivity([row["val_loss"] for row in own], start)
    return found


def differences(claim: Claim, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Left minus right by seed, of logarithms where the claim is about a ratio; what is not finite is left out."""
    seeds = sorted({row["seed"] for row in rows})
    left, right = (by_seed(rows, side, seeds) for side in (claim.left, claim.right))
    of = math.log if claim.ratio else float
    pairs = [(left[s], right[s]) for s in seeds if s in left and s in right]
    return [of(a) - of(b) for a, b in pairs if all(math.isfinite(x) and (x > 0 or not claim.ratio) for x in (a, b))]


def judge(results: Results, claims: Sequence[Claim] = CLAIMS) -> list[Judged]:
    """The verdict of every claim; those of one study are tested together, by Holm."""
    effects: dict[int, PairedEffect] = {}
    for study, about in results.items():
        mine = {i: differences(c, about["rows"]) for i, c in enumerate(claims) if c.study == study}
        known = {i: found for i, found in mine.items() if len(found) > 1}
        effects |= zip(known, paired_effects(list(known.values()), MARGIN))
    return [Judged(claim, effects.get(i)) for i, claim in enumerate(claims)]


def page(results: Results) -> str:
    """The text of docs/claims.md: the claims and what was found, where it comes from, and earlier findings."""
    judged = judge(results)
    waiting = sum(one.effect is None for one in judged)
    lines = ["| claim | source | verdict | effect (95 % interval) | study |", "|---|---|---|---|---|"]
    for one in judged:
        claim = one.claim
        lines.append(f"| {claim.text} | {claim.source} | {one.verdict} | {one.figures} | {claim.study} |")
    found = "\n".join(_about(study, results.get(study)) for study in STUDIES)
    head = (HERE / "head.md").read_text(encoding="utf-8").format(seeds=SEEDS, margin=MARGIN, corpus=CORPUS)
    state = f"{len(judged) - waiting} of {len(judged)} claims have results; {waiting} have not been run yet."
    earlier = (HERE / "earlier.md").read_text(encoding="utf-8")
    return "\n".join([head, state, "", *lines, "", "## Where the results come from", "", found, "", earlier])


def _about(study: str, about: Mapping[str, Any] | None) -> str:
    if about is None:
        return f"- {study}: not run yet."
    identity = ", ".join(f"{name} {value}" for name, value in about["identity"].items() if name != "corpus")
    return f"- {study}: {len(about['rows'])} rows; {identity}."


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _times(value: float) -> str:
    return f"{math.exp(min(value, 700)):.3g}×"
