"""Comparison of remedies over seeds and learning rates, and its tables."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from qkeel.metrics import (
    PairedEffect,
    Row,
    Verdict,
    bootstrap_interval,
    largest_stable_lr,
    lr_sensitivity,
    paired_effect,
    paired_effects,
    paired_gain,
)
from qkeel.records import RunStatus
from qkeel.report import html as h
from qkeel.report.html import Markup
from qkeel.report.study.collect import BASELINE, RunData, StudyData

# Spreads over seeds, paired gains, and the ranking of remedies. The scalars come from `metrics`; the code here only
# groups them by remedy and learning rate.

MARGIN = 0.01  # nats, a tenth of typical gains at high rates; smaller differences of held-out loss count as none
Comparison = tuple[str, str, float]  # a remedy, the remedy it is compared with, and the learning rate of both


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A mean with the smallest and largest value over seeds or, where documented, with an interval."""

    mean: float
    low: float
    high: float
    n: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairedGain:
    """The paired gain of one remedy over another at one LR; positive means that the remedy's loss is lower.

    effect: the interval and test, or None if there is only one seed or a loss is not finite. collapsed: whether
    attention collapsed in a run of the remedy, which is then never called better. floor: the difference that rounding
    alone causes between two such runs, if a chaos study has measured both remedies. secondary: whether the study has
    another primary comparison, so that this comparison has an interval but no verdict.
    """

    remedy: str
    baseline: str
    lr: float
    mean: float
    effect: PairedEffect | None
    collapsed: bool
    floor: float | None = None
    secondary: bool = False

    @property
    def verdict(self) -> Verdict:
        """The verdict, which is "undecided" without an effect and for secondary comparisons."""
        return self.effect.verdict if self.effect and not self.secondary else "undecided"

    @property
    def praised(self) -> bool:
        """True if the remedy is better and its attention did not collapse."""
        return self.verdict == "better" and not self.collapsed

    def reversed(self) -> PairedGain:
        """Returns the gain of the other remedy over this one; `collapsed` is left unchanged."""
        effect = self.effect
        turned = effect and dataclasses.replace(effect, mean=-effect.mean, low=-effect.high, high=-effect.low)
        names = {"remedy": self.baseline, "baseline": self.remedy}
        return dataclasses.replace(self, mean=-self.mean, effect=turned, **names)

    def figures(self) -> str:
        """Returns the mean and its interval in words."""
        return f"{h.signed(self.mean)} nats, {self.over()}"

    def over(self) -> str:
        """Returns the interval in words, and whether rounding alone causes differences of this size."""
        if self.effect is None and not math.isfinite(self.mean):
            return "a loss is not finite: no verdict"
        under = self.floor is not None and abs(self.mean) <= self.floor
        return interval_text(self.effect) + (f"; under the chaos floor of {h.number(self.floor, 2)}" if under else "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One row of the ranking table; a field is None if there are not enough runs for it."""

    remedy: str
    sensitivity: Spread | None
    sensitivity_clipped: Spread | None
    best_lr: float
    best_loss: Spread
    collapsed: bool
    gains: Mapping[float, PairedGain]
    max_logit: float
    stable_lr: float | None
    stable_lrs: tuple[float, float] | None
    alarm: tuple[int, float] | None
    cpu_ratio: float | None


def interval_text(effect: PairedEffect | None) -> str:
    """Formats an interval and its number of seeds.

    >>> interval_text(paired_effect([0.1, 0.12, 0.11]))
    '+0.085 to +0.135, 3 seeds'
    """
    if effect is None:
        return "one seed: no verdict"
    if math.isinf(effect.high):
        return f"the same in each of {h.count(effect.n, 'seed')}"
    return f"{h.signed(effect.low)} to {h.signed(effect.high)}, {h.count(effect.n, 'seed')}"


def more_seeds(effect: PairedEffect | None) -> str:
    """Returns how many seeds would decide the comparison, as the end of a sentence."""
    if effect is None:
        return "one seed is not enough to decide"
    return "more seeds are unlikely to decide" if effect.seeds is None else f"about {effect.seeds:,} seeds would decide"


def spread(values: Sequence[float]) -> Spread:
    """Returns the mean and the range; if any value is NaN, the mean and both ends are NaN.

    >>> spread([1.0, 2.0, 6.0])
    Spread(mean=3.0, low=1.0, high=6.0, n=3)
    """
    if any(math.isnan(value) for value in values):
        return Spread(mean=math.nan, low=math.nan, high=math.nan, n=len(values))
    return Spread(mean=statistics.fmean(values), low=min(values), high=max(values), n=len(values))


def losses(rows: Sequence[Row], remedy: str, lr: float) -> dict[int, float]:
    """Returns the held-out loss by seed of one remedy at one LR."""
    return {row["seed"]: row["val_loss"] for row in rows if row["remedy"] == remedy and row["lr"] == lr}


def collapses(rows: Sequence[Row], remedy: str, lr: float) -> bool:
    """True if attention collapsed in a run of the remedy at the LR."""
    return any(row["collapsed"] for row in rows if row["remedy"] == remedy and row["lr"] == lr)


def judge(
    rows: Sequence[Row], comparisons: Sequence[Comparison], beside: Sequence[Sequence[float]] = ()
) -> list[PairedGain]:
    """Returns the gain for each comparison over the seeds with both runs, corrected together by Holm's method.

    `beside` holds the differences of further comparisons that belong to the same correction.
    """
    known = [(of, found) for of in comparisons if (found := paired_gain(rows, *of))]
    judged = [i for i, (_, found) in enumerate(known) if _testable(found)]
    effects = dict(zip(judged, paired_effects([*(known[i][1] for i in judged), *beside], MARGIN)))
    return [
        PairedGain(
            remedy=remedy,
            baseline=baseline,
            lr=lr,
            mean=math.fsum(found) / len(found),
            effect=effects.get(i),
            collapsed=collapses(rows, remedy, lr),
            floor=_floor(rows, (remedy, baseline), lr),
        )
        for i, ((remedy, baseline, lr), found) in enumerate(known)
    ]


def _testable(differences: Sequence[float]) -> bool:
    """True if the differences can be judged: one seed has no interval, and an infinite loss has no mean difference."""
    return len(differences) > 1 and all(map(math.isfinite, differences))


def _floor(rows: Sequence[Row], both: tuple[str, str], lr: float) -> float | None:
    """The chaos floors of two remedies at a rate, added in quadrature; None unless both are known."""
    known = {row["remedy"]: row["chaos_floor"] for row in rows if row["lr"] == lr and "chaos_floor" in row}
    return math.hypot(*(known[name] for name in both)) if set(both) <= known.keys() else None


def primary_gain(study: StudyData) -> PairedGain | None:
    """Returns the gain of the primary comparison, judged alone; None if there is no primary comparison or if no seed
    has both runs."""
    named = study.primary
    found = judge(study.rows(), [(named["remedy"], named["baseline"], named["lr"])]) if named else []
    return found[0] if found else None


def _gains_alone(study: StudyData) -> list[PairedGain]:
    """Returns the gains of a study with a primary comparison; only the primary comparison has a verdict.

    The intervals are not corrected for multiple comparisons: each covers its true mean with a probability of 95 %, but
    all of them together do not.
    """
    rows, primary = study.rows(), primary_gain(study)
    remedies, lrs = [name for name in study.remedies if name != BASELINE], study.lrs()
    alone = [found for name in remedies for lr in lrs for found in judge(rows, [(name, BASELINE, lr)])]
    return [g if g == primary else dataclasses.replace(g, secondary=True) for g in alone]


def gains(rows: Sequence[Row], remedies: Sequence[str], baseline: str = BASELINE) -> list[PairedGain]:
    """Returns the gain of each remedy at each LR, corrected together by Holm's method."""
    return judge(rows, _against(rows, remedies, baseline))


def page_gains(study: StudyData) -> list[PairedGain]:
    """Returns the gain of each remedy over the baseline at each LR, corrected by Holm's method together with those of
    the page's other parts."""
    rows = study.rows()
    return judge(rows, _against(rows, study.remedies, study.baseline), differences_beside(study))


def differences_beside(study: StudyData) -> list[list[float]]:
    """Returns the differences from the baseline that the page's other parts judge, one list per comparison."""
    each = [
        paired_gain(rows, *of) for rows in study.rows_beside() for of in _against(rows, study.remedies, study.baseline)
    ]
    return [found for found in each if _testable(found)]


def _against(rows: Sequence[Row], remedies: Sequence[str], baseline: str) -> list[Comparison]:
    lrs = sorted({row["lr"] for row in rows})
    return [(remedy, baseline, lr) for remedy in remedies if remedy != baseline for lr in lrs]


def sensitivity(rows: Sequence[Row], remedy: str, lrs: Sequence[float], clip: bool) -> Spread | None:
    """Returns the LR sensitivity with a bootstrap interval over the seeds that finished at every LR.

    `clip` limits losses to the loss at initialisation. With one seed or a loss that is not finite, low and high equal
    the mean.
    """
    values = []
    for seed in sorted({row["seed"] for row in rows}):
        mine = {row["lr"]: row for row in rows if row["remedy"] == remedy and row["seed"] == seed}
        if len(lrs) > 1 and set(mine) == set(lrs):  # a missing rate would make the mean incomparable
            start = statistics.fmean(row["init_loss"] for row in mine.values()) if clip else math.inf
            values.append(lr_sensitivity([mine[lr]["val_loss"] for lr in lrs], start))
    if not values:
        return None
    total = spread(values)
    if len(values) < 2 or not math.isfinite(total.mean):
        return dataclasses.replace(total, low=total.mean, high=total.mean)
    low, high = bootstrap_interval(values)
    return dataclasses.replace(total, low=low, high=high)


def stable_lrs(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Returns the bootstrap interval of the largest stable LR over the seeds that finished at every LR.

    A seed without a stable LR counts as 0. The result is None if there are fewer than two seeds.
    """
    lrs = {row["lr"] for row in rows}
    whole = [s for s in sorted({row["seed"] for row in rows}) if {r["lr"] for r in rows if r["seed"] == s} == lrs]
    by_seed = [largest_stable_lr([row for row in rows if row["seed"] == seed]) or 0.0 for seed in whole]
    return bootstrap_interval(by_seed, np.min) if len(by_seed) > 1 else None


def standings(study: StudyData) -> list[Standing]:
    """Returns each remedy with a finished run in the grid, ranked by largest LR without collapse, then by LR
    sensitivity."""
    rows = study.rows()
    present = {row["remedy"] for row in rows}
    judged = _gains_alone(study) if study.primary else page_gains(study)
    lines = [
        _standing(rows, remedy, study.lrs(), {g.lr: g for g in judged if g.remedy == remedy}, study.baseline)
        for remedy in study.remedies
        if remedy in present
    ]
    return sorted(lines, key=_rank)


def _rank(line: Standing) -> tuple[float, float, float]:
    def last(value: float | None) -> float:
        return math.inf if value is None or math.isnan(value) else value

    clipped = last(line.sensitivity_clipped.mean if line.sensitivity_clipped else None)
    return -(line.stable_lr or 0.0), clipped, last(line.best_loss.mean)


def _standing(
    rows: Sequence[Row], remedy: str, lrs: Sequence[float], judged: Mapping[float, PairedGain], baseline: str
) -> Standing:
    mine = [row for row in rows if row["remedy"] == remedy]
    by_lr = {lr: spread(list(losses(rows, remedy, lr).values())) for lr in sorted({row["lr"] for row in mine})}
    # A collapsed run may have a low loss by chance, so its rate is the best only if every rate collapsed.
    works = {lr: total for lr, total in by_lr.items() if not collapses(rows, remedy, lr)}
    tried = works or by_lr
    best_lr = min(tried, key=lambda lr: math.inf if math.isnan(tried[lr].mean) else tried[lr].mean)
    alarms = [(row["alarm_step"], row["lr"]) for row in mine if row["alarm_step"] is not None]
    return Standing(
        remedy=remedy,
        sensitivity=sensitivity(rows, remedy, lrs, clip=False),
        sensitivity_clipped=sensitivity(rows, remedy, lrs, clip=True),
        best_lr=best_lr,
        best_loss=by_lr[best_lr],
        collapsed=not works,
        gains=judged,
        max_logit=spread([row["max_logit"] for row in mine]).high,
        stable_lr=largest_stable_lr(mine),
        stable_lrs=stable_lrs(mine),
        alarm=min(alarms) if alarms else None,
        cpu_ratio=_cpu_ratio(mine, [row for row in rows if row["remedy"] == baseline]),
    )


def _cpu_ratio(mine: Sequence[Row], baseline: Sequence[Row]) -> float | None:
    """Returns the CPU seconds of the remedy relative to the baseline, summed over the (LR, seed) pairs of both."""
    theirs = {(row["lr"], row["seed"]): row["cpu_seconds"] for row in baseline}
    pairs = [(row["cpu_seconds"], theirs[key]) for row in mine if (key := (row["lr"], row["seed"])) in theirs]
    below = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / below if below > 0 else None


HELD, REVERSE, INSIDE, UNDECIDED = "held", "the reverse", "inside the margin", "undecided"
RATIO_MARGIN = math.log(1.1)  # a tenth, because logits and norms of heads differ by more and no threshold is finer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SeedEffect:
    """A ratio or a difference for each seed; ratios are judged by their logarithms.

    margin: the largest effect that counts as no effect, on the scale of the test.
    """

    values: Sequence[float]
    ratio: bool
    margin: float
    level: float = 0.95

    @property
    def numbers(self) -> list[float]:
        """The values on the scale of the test, where 0 means no effect."""
        return [math.log(value) for value in self.values] if self.ratio else list(self.values)

    @property
    def mean(self) -> float:
        """The mean over seeds, which is geometric for ratios."""
        return self._back(math.fsum(self.numbers) / len(self.values))

    @property
    def judged(self) -> PairedEffect | None:
        """The interval and test of the numbers; None for one seed."""
        return paired_effect(self.numbers, self.margin, self.level) if len(self.values) > 1 else None

    @property
    def verdict(self) -> str:
        """The verdict: "held" if the interval lies above the margin, "the reverse" if it lies below minus the margin,
        "inside the margin" if it lies between, otherwise "undecided".

        >>> times({0: 2.0, 1: 2.1, 2: 2.2}, {0: 1.0, 1: 1.0, 2: 1.0}).verdict, times({0: 3.0}, {0: 1.0}).verdict
        ('held', 'undecided')
        """
        judged = self.judged
        said = {"better": HELD, "worse": REVERSE, "equal": INSIDE}
        return said.get(judged.verdict if judged else "", UNDECIDED)

    def text(self) -> str:
        """Formats the mean with its interval, like 1.3× (0.9× to 1.9×, 3 seeds)."""
        write, judged = _times if self.ratio else h.signed, self.judged
        if judged is None:
            return f"{write(self.mean)} (one seed)"
        if math.isinf(judged.high):
            return f"{write(self.mean)} ({interval_text(judged)})"
        low, high = (write(self._back(end)) for end in (judged.low, judged.high))
        return f"{write(self.mean)} ({low} to {high}, {h.count(judged.n, 'seed')})"

    def said(self) -> str:
        """Returns the verdict as the end of a sentence."""
        if self.verdict == UNDECIDED:
            return f"not shown: {more_seeds(self.judged)}"
        if self.verdict == INSIDE:
            return f"did not hold: any effect is below {'10 %' if self.ratio else f'{self.margin:g}'}"
        return "held" if self.verdict == HELD else "the reverse was seen"

    def _back(self, number: float) -> float:
        if not self.ratio:
            return number
        return math.exp(number) if number < 700 else math.inf  # math.exp raises OverflowError above 709


def _times(value: float) -> str:
    return f"{value:.2f}×" if value < 10 else f"{h.number(value, 2)}×"


def times(above: Mapping[int, float], below: Mapping[int, float]) -> SeedEffect | None:
    """Returns the ratio `above` / `below` over the seeds that both have; None if there are no such seeds."""
    seeds = [s for s in sorted(above.keys() & below.keys()) if _positive(above[s]) and _positive(below[s])]
    return SeedEffect(values=[above[s] / below[s] for s in seeds], ratio=True, margin=RATIO_MARGIN) if seeds else None


def less(mine: Mapping[int, float], theirs: Mapping[int, float], margin: float) -> SeedEffect | None:
    """Returns the difference `theirs` - `mine` over the seeds that both have; None if there are no such seeds."""
    seeds = [s for s in sorted(mine.keys() & theirs.keys()) if math.isfinite(mine[s]) and math.isfinite(theirs[s])]
    return SeedEffect(values=[theirs[s] - mine[s] for s in seeds], ratio=False, margin=margin) if seeds else None


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


# HTML tables of the ranking, of every run, and of the runs without a result.

TABLE_SERIES = 8  # number of colours in assets/report.css


def swatch(study: StudyData, remedy: str) -> Markup:
    """Returns the remedy's name with its colour, which is the same everywhere on the page."""
    index = study.remedies.index(remedy)
    attributes = {
        "class": "swatch",
        "data-series": str(index % TABLE_SERIES),
        "data-round": str(index // TABLE_SERIES),
        "aria-hidden": "true",
    }
    return h.join([h.tag("span", attributes), remedy])


def ranking(study: StudyData) -> Markup:
    """Returns a table with one row per remedy; empty if there is nothing to rank."""
    lines = standings(study)
    if not lines:
        return Markup()
    several = len(study.lrs()) > 1
    clips = any(line.sensitivity != line.sensitivity_clipped for line in lines)
    gain_lrs = study.lrs() if any(line.gains for line in lines) else []
    head = h.columns("Remedy", kind="text")
    head += h.columns("LR sensitivity", *["… clipped at initial loss"] * clips) if several else []
    head += h.columns("Best held-out loss", *(f"Gain at LR\u00a0{h.rate(lr)}" for lr in gain_lrs))
    head += h.columns("Largest logit", "Alarm step", "Largest LR without collapse", f"CPU, ×\u00a0{study.baseline}")
    body = [_line(study, line, gain_lrs, several + several * clips) for line in lines]
    return h.table("Ranking of the remedies", head, body, sortable=True)


def _line(study: StudyData, line: Standing, gain_lrs: Sequence[float], sensitivities: int) -> Markup:
    cells = [_loss(line.sensitivity), _loss(line.sensitivity_clipped)][:sensitivities]
    best = f"at LR {h.rate(line.best_lr)}{', collapsed' if line.collapsed else ''}"
    cells.append(h.cell(h.loss(line.best_loss.mean), line.best_loss.mean, best))
    cells += [_gain(line.gains.get(lr), line.remedy == study.baseline) for lr in gain_lrs]
    cells.append(h.cell(h.number(line.max_logit), line.max_logit))
    if line.alarm is None:
        cells.append(h.cell("never", math.inf))
    else:
        cells.append(h.cell(f"{line.alarm[0]:,}", line.alarm[0], f"at LR {h.rate(line.alarm[1])}"))
    top = study.lrs()[-1]
    ends = " to ".join("no LR" if end == 0 else h.rate(end) for end in line.stable_lrs or ())
    note = "all tried" if line.stable_lr == top else ends
    cells.append(h.cell("no LR" if line.stable_lr is None else h.rate(line.stable_lr), line.stable_lr or 0.0, note))
    return h.table_row(swatch(study, line.remedy), *cells, cost_cell(line))


def _loss(total: Spread | None) -> Markup:
    return h.cell("–", math.inf, "needs every LR") if total is None else spread_cell(total, h.loss)


def spread_cell(total: Spread, write: Callable[[float], str]) -> Markup:
    """Returns the cell of a mean over seeds, with the range below it."""
    return h.cell(write(total.mean), total.mean, f"{write(total.low)} to {write(total.high)}" if total.n > 1 else "")


def _gain(one: PairedGain | None, baseline: bool) -> Markup:
    if one is None:
        return h.cell("" if baseline else "–", -math.inf)
    return gain_cell(one, f"{one.over()}{'; collapsed' if one.collapsed else ''}")


def gain_cell(one: PairedGain, small: str) -> Markup:
    """Returns the cell of a gain, which is grey if the verdict is equal or undecided, or if attention collapsed."""
    faint = one.collapsed or one.verdict in ("equal", "undecided")
    return h.cell(h.signed(one.mean), one.mean, small, "faint" if faint else "")


def cost_cell(line: Standing) -> Markup:
    """Returns the cell of a remedy's CPU time relative to the baseline."""
    return h.NOTHING if line.cpu_ratio is None else h.cell(f"{line.cpu_ratio:.2f}", line.cpu_ratio)


RUN_COLUMNS: Mapping[str, str] = {
    "val_loss": "Held-out loss",
    "init_loss": "… before training",
    "max_logit": "Largest logit",
    "end_max_logit": "… at the end",
    "end_entropy": "Entropy at the end",
    "alarm_step": "Alarm step",
    "collapsed": "Collapsed",
    "spike_score": "Spike score",
    "cpu_seconds": "CPU s",
    "steps": "Steps",
}


def every_run(study: StudyData) -> Markup:
    """Returns a table with one row per finished run, including drift runs."""
    runs = [run for run in study.runs if run.row is not None]
    if not runs:
        return Markup()
    head = [*h.columns("Remedy", kind="text"), *h.columns("LR", "Seed", *RUN_COLUMNS.values())]
    head += h.columns("Run", kind="text")
    inner = h.table("Every finished run", head, [_run_line(study, run) for run in runs], sortable=True)
    return h.details(h.count(len(runs), "finished run"), inner)


def _run_line(study: StudyData, run: RunData) -> Markup:
    results = run.row or {}
    cells = [h.cell(h.rate(run.lr), run.lr), h.cell(str(run.seed), run.seed)]
    for name in RUN_COLUMNS:
        value = results.get(name)
        if isinstance(value, bool):
            cells.append(h.cell("yes" if value else "no", value))
        elif value is None:
            cells.append(h.NOTHING)
        elif name in ("val_loss", "init_loss"):
            cells.append(h.cell(h.loss(value), value))
        else:
            cells.append(h.cell(f"{value:,}" if isinstance(value, int) else h.number(value), value))
    head = h.join([swatch(study, run.remedy), h.tag("small", {}, _role(run)) if _role(run) else ""])
    return h.table_row(head, *cells, h.words(h.tag("code", {}, run.run_id)))


def without_result(study: StudyData) -> Markup:
    """Returns the failed, unfinished and missing runs with what is known about them; empty if there are none."""
    failed = [_failure(study, run) for run in study.runs if run.status is RunStatus.FAILED]
    waiting = [_waiting(study, status) for status in WAITING]
    items = [item for item in [*failed, *waiting] if item]
    return h.tag("ul", {"class": "failures"}, *items) if items else Markup("")


WAITING = {
    RunStatus.STARTED: ("unfinished", "They are still running or were stopped; the same command resumes them."),
    RunStatus.MISSING: ("missing", "They are planned, but have no directory yet; the same command runs them."),
}


def _run_name(study: StudyData, run: RunData) -> Markup:
    return h.join([swatch(study, run.remedy), f", LR {h.rate(run.lr)}, seed {run.seed}{_role(run)}"])


def _role(run: RunData) -> str:
    return "" if run.role == "grid" else f" ({run.role})"


def _reached(run: RunData) -> str:
    return f" after step {int(run.metrics[-1]['step']):,}" if run.metrics else ""


def _waiting(study: StudyData, status: RunStatus) -> Markup:
    runs = [run for run in study.runs if run.status is status]
    if not runs:
        return Markup("")
    word, hint = WAITING[status]
    names = [h.tag("span", {"class": "run"}, _run_name(study, run), _reached(run)) for run in runs]
    head = h.tag("strong", {}, f"{h.count(len(runs), 'run')} {word}")
    return h.tag("li", {"class": "waiting"}, head, h.tag("p", {}, hint), h.tag("p", {"class": "runs"}, *names))


def _failure(study: StudyData, run: RunData) -> Markup:
    lines = [line for line in run.error.strip().splitlines() if line.strip()]
    title = h.join([_run_name(study, run), ": ", h.tag("strong", {}, "failed" + _reached(run))])
    last = h.tag("p", {"class": "error"}, h.tag("code", {}, lines[-1] if lines else "no message was written"))
    if len(lines) < 2:
        return h.tag("li", {}, title, last)
    return h.tag("li", {}, title, last, h.details("Traceback", h.tag("pre", {}, run.error.strip())))
