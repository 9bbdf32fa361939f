"""The verdict of each claim on the results of its study, and the page that reports them."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from experiments.claims.claim import MARGINS, OF_ALL_RATES, Cell, Claim, Margin
from experiments.claims.studies import CORPORA, SEEDS, STUDIES
from experiments.claims.table import CLAIMS, EVERY, PUBLISHED, SECTIONS
from experiments.intervals import common_level, exact_interval, largest_stable_lr
from qkeel.metrics import lr_sensitivity

Results = Mapping[str, Mapping[str, Any]]  # by study: command, identity, rows
HERE = Path(__file__).parent
PAGE = HERE.parent / "notes" / "claims.md"
ERROR = 0.05  # share of the page's verdicts that may be wrong on average
# Four looks at growing numbers of seeds is the most that a row of this page had before this rule; the fifth, at twice
# the seeds, is the last. Rows that had fewer are treated alike.
LOOKS = 5
VERDICTS = ("reproduced", "contradicted", "undecided")
Effect = Literal[
    "larger", "against", "inside", "not larger", "undecided", "not run yet"
]


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """A claim with its differences by seed and the interval of their centre; infinite where too few seeds are there."""

    claim: Claim
    differences: Sequence[float]
    low: float
    high: float
    level: float

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return math.fsum(self.differences) / len(self.differences)

    @property
    def effect(self) -> Effect:
        """Where the interval lies: beyond the margin, beyond it against the claim, inside, or across; "not larger"
        where it is across the margin against the claim alone."""
        margin = self.claim.margin.size
        if len(self.differences) < 2:
            return "not run yet"
        if self.low > margin or self.high < -margin:
            return "larger" if self.low > margin else "against"
        if self.high < margin:
            return "inside" if -margin < self.low else "not larger"
        return "undecided"

    @property
    def verdict(self) -> str:
        """Reproduced, contradicted or undecided."""
        if self.effect in ("undecided", "not run yet"):
            return self.effect
        if self.effect == "not larger" and self.claim.equal:
            return "undecided"
        return (
            "**reproduced**"
            if self.effect == ("inside" if self.claim.equal else "larger")
            else "**contradicted**"
        )

    @property
    def figures(self) -> str:
        """Mean, interval and seeds."""
        if self.effect == "not run yet":
            return ""
        write = _times if self.claim.ratio else _signed
        if math.isinf(self.low):
            return f"{write(self.mean)} ({len(self.differences)} seeds are too few for this level)"
        return f"{write(self.mean)} ({write(self.low)} to {write(self.high)}), {len(self.differences)} seeds"


def by_seed(results: Results, claim: Claim, side: Cell | float) -> dict[int, float]:
    """One side of a claim by seed; some columns are made of all rates that the study has."""
    rows = _rows(results, claim.study)
    if not isinstance(side, Cell):
        return dict.fromkeys({row["seed"] for row in rows}, side)
    rows = _rows(results, side.study or claim.study)
    mine = [
        row
        for row in rows
        if all(row.get(name) == value for name, value in side.where.items())
    ]
    if side.column in OF_ALL_RATES:
        found = _of_all_rates(side.column, mine, {row["lr"] for row in rows})
    else:
        found = {
            row["seed"]: row[side.column]
            for row in mine
            if row.get(side.column) is not None
        }
    return {seed: side.times * value for seed, value in found.items()}


def _rows(results: Results, study: str) -> Sequence[Mapping[str, Any]]:
    return results[study]["rows"] if study in results else []


def _of_all_rates(
    column: str, rows: Sequence[Mapping[str, Any]], lrs: set[float]
) -> dict[int, float]:
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
    return [
        of(a) - of(b)
        for a, b in pairs
        if all(math.isfinite(x) and (x > 0 or not claim.ratio) for x in (a, b))
    ]


def judge(results: Results, claims: Sequence[Claim] = EVERY) -> list[Judged]:
    """The verdicts of claims that stand on one page, by intervals of one level."""
    found = [tuple(differences(claim, results)) for claim in claims]

    def decided(level: float) -> int:
        return sum(
            one.verdict.startswith("**") for one in _judged(claims, found, level)
        )

    return _judged(claims, found, common_level(decided, len(claims), ERROR, LOOKS))


def _judged(
    claims: Sequence[Claim], found: Sequence[tuple[float, ...]], level: float
) -> list[Judged]:
    ends = (
        exact_interval(own, level) if len(own) > 1 else (-math.inf, math.inf)
        for own in found
    )
    return [
        Judged(claim, own, *pair, level)
        for claim, own, pair in zip(claims, found, ends, strict=True)
    ]


def tally(judged: Sequence[Judged]) -> str:
    """How many claims have which verdict."""
    counts = collections.Counter(one.verdict.strip("*") for one in judged)
    names = ("reproduced", "contradicted", "undecided", "not run yet")
    return ", ".join(f"{counts[name]} {name}" for name in names if counts[name])


def counted(judged: Sequence[Judged]) -> str:
    """The verdicts on published claims, and those on the claims that we added."""
    theirs, ours = (
        [one for one in judged if one.claim.ours == mine] for mine in (False, True)
    )
    added = f"Of the {len(ours)} claims that we added: {tally(ours)}."
    return f"Of {len(theirs)} published claims: {tally(theirs)}. {added}"


def fewer_seeds() -> str:
    """The studies that have fewer seeds than most, in words."""
    by_seeds: dict[int, list[str]] = {}
    for name, about in STUDIES.items():
        if about.seeds != SEEDS:
            by_seeds.setdefault(about.seeds, []).append(f"`{name}`")
    lists = [(n, ", ".join(names[:-1]), names[-1]) for n, names in by_seeds.items()]
    return "; ".join(
        f"{n} in {before} and {last}" if before else f"{n} in {last}"
        for n, before, last in lists
    )


def page(results: Results) -> str:
    """The text of experiments/notes/claims.md: chart, claims, what no row judges; procedure, sources and hashes."""
    judged = judge(results)
    place = {id(one.claim): one for one in judged}
    spent = sum(
        results[study].get("cpu_seconds", 0) for study in STUDIES if study in results
    )
    read = {
        "seeds": SEEDS,
        "fewer": fewer_seeds(),
        "minutes": round(spent / 60),
        "studies": len(STUDIES),
        "looks": LOOKS,
    }
    parts = [
        _text("head.md").format(
            counted=counted([place[id(claim)] for claim in CLAIMS]), chart=_chart(place)
        ),
        *(
            _claims(heading, [place[id(claim)] for claim in claims])
            for heading, claims in SECTIONS.items()
        ),
        _published(place),
        _text("no_row.md"),
        _text("earlier.md"),
        _text("method.md").format(
            **read, margins="\n".join(_margins()), levels=_levels(judged)
        ),
        _text("changes.md"),
        _sources(),
        _origin(results),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def verdicts(claims: Sequence[Claim], place: Mapping[int, Judged]) -> dict[str, int]:
    """How many of these claims have each verdict."""
    found = collections.Counter(place[id(claim)].verdict.strip("*") for claim in claims)
    return {name: found[name] for name in VERDICTS}


def short(source: str) -> str:
    """A citation without its title: `Wortsman et al. 2023`."""
    own, _, other = source.partition("; ")
    year = re.search(r"\d{4}$", own)
    if not year:
        return (
            own if not other else f"{own}; {short(other.partition(': ')[2] or other)}"
        )
    who = own.partition(",")[0]
    return f"{who} {year[0]}"


def _chart(place: Mapping[int, Judged]) -> str:
    """A bar for each verdict of each section, one block for each claim: GitHub draws no styles."""
    lines = [f"| | {' | '.join(VERDICTS)} |", "|---|---|---|---|"]
    for heading, claims in SECTIONS.items():
        bars = (f"{'█' * n} {n}" for n in verdicts(claims, place).values())
        lines.append(f"| {heading} | {' | '.join(bars)} |")
    return "\n".join(lines)


def _claims(heading: str, judged: Sequence[Judged]) -> str:
    lines = [
        f"## {heading}",
        "",
        "| claim | source | verdict | effect (interval) | margin | study |",
    ]
    lines.append("|---|---|---|---|---|---|")
    for one in judged:
        cells = (
            one.claim.text,
            short(one.claim.source),
            one.verdict,
            one.figures,
            _margin(one.claim),
            one.claim.study,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _sources() -> str:
    """The full citations, by their short forms."""
    cited = {claim.source.rpartition("; the norm: ")[2] for claim in EVERY} - {
        "our own question"
    }
    return "\n".join(
        ["## Sources", "", *(f"- {source}." for source in sorted(cited, key=str.lower))]
    )


def _origin(results: Results) -> str:
    """The machine and versions of each study, and the texts by their hashes."""
    texts = f"The texts are pinned by SHA-256, and the runner refuses others: `{CORPORA['stdlib']}`"
    texts += f" and, for translation, `{CORPORA['topics']}`."
    found = [_about(study, results.get(study)) for study in STUDIES]
    return "\n".join(["## Where the results come from", "", *found, "", texts])


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _margin(claim: Claim) -> str:
    return (
        f"{math.exp(claim.margin.size):.2g}×"
        if claim.ratio
        else f"{claim.margin.size:g} {claim.margin.unit}"
    )


def _margins() -> list[str]:
    """A line for each margin."""
    by_margin: dict[Margin, list[str]] = {}
    for claim in EVERY:
        by_margin.setdefault(claim.margin, []).append(_margin(claim))
    assert set(MARGINS.values()) <= by_margin.keys(), "a margin that no row has"
    return [f"| {names[0]} | {margin.reason} |" for margin, names in by_margin.items()]


def _levels(judged: Sequence[Judged]) -> str:
    """The level of the page's intervals, and by number of seeds the one that they have."""
    level = judged[0].level
    counts = sorted(
        {len(one.differences) for one in judged if len(one.differences) > 1},
        reverse=True,
    )
    parts = []
    for n in counts:
        k = math.floor((1 - level) * 2**n / 2 + 1e-9)
        parts.append(
            f"{100 * (1 - 2 * k / 2**n):.3g} % at {n} seeds"
            if k
            else f"none at {n} seeds"
        )
    return f"{100 * level:.3g} %, and the subset means of a row reach it at {', '.join(parts)}"


def _published(place: Mapping[int, Judged]) -> str:
    """The table of 32 rows, cell by cell against its published direction."""
    columns = [[place[id(claim)] for claim in claims] for claims in PUBLISHED.values()]
    lines = [
        "## The published table of forms and methods",
        "",
        "Su 2023 tests eight forms as trained and under three methods, on text that does not repeat and that does. As",
        "trained a form is compared with `baseline`, under a method with itself as trained: the published change in",
        "points of accuracy at 8 times the training length, and whether the change here (share of accuracy, with its",
        "interval) has its direction. ReRoPE has a window of a quarter of the training length, as published.",
        f"Text that does not repeat: {tally(columns[0])}; repeated text: {tally(columns[1])}.",
        "",
        "| form: published, not repeated | here | verdict | published, repeated | here | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for plain, repeated in zip(*columns, strict=True):
        other = repeated.claim.text.rpartition(": ")[2]
        cells = (
            plain.claim.text,
            _measured(plain),
            plain.verdict,
            other,
            _measured(repeated),
            repeated.verdict,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _measured(one: Judged) -> str:
    """The change in its own direction, whichever was published."""
    if one.claim.text.count("−") and one.differences:
        one = dataclasses.replace(
            one, differences=[-d for d in one.differences], low=-one.high, high=-one.low
        )
    return one.figures


def _about(study: str, about: Mapping[str, Any] | None) -> str:
    if about is None:
        return f"- {study}: not run yet."
    identity = ", ".join(f"{name} {value}" for name, value in about["identity"].items())
    spent = (
        f"; {about['cpu_seconds']:,.0f} CPU seconds of training"
        if "cpu_seconds" in about
        else ""
    )
    kept = (
        f" Seeds under {about['kept_seeds']} are of earlier runs."
        if about.get("kept_seeds")
        else ""
    )
    return f"- {study}: {len(about['rows'])} rows{spent}; {identity}.{kept}"


def _signed(value: float) -> str:
    """With three decimals, or two digits where that is more."""
    text = f"{value:+.3f}" if abs(value) >= 0.0095 or not value else f"{value:+.2g}"
    return text.replace("-", "−")


def _times(value: float) -> str:
    mantissa, _, power = f"{math.exp(min(value, 700)):.2e}".partition("e")
    if int(power) < -3:
        return f"{mantissa} · 10⁻{str(-int(power)).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}×"
    return f"{math.exp(value):.3g}×" if value < 700 else "∞"
