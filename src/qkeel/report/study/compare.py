"""Remedies against each other: spreads over seeds, paired gains, and the standing of each remedy. The scalars come
from `metrics`; here they are only gathered per remedy and learning rate."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from qkeel.metrics import Row, largest_stable_lr, lr_sensitivity, paired_gain
from qkeel.report.html.formats import count, number, signed
from qkeel.report.study.collect import BASELINE, StudyData


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A mean with its smallest and largest value over seeds."""

    mean: float
    low: float
    high: float
    n: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The paired gain of a remedy over another at one LR; positive = the remedy's loss is lower.

    `within` says that the difference is within seed spread: its mean is no larger than its own range over the seeds
    (so also where its sign changes), or than the range of either remedy's own loss over them. None for a single seed.
    """

    remedy: str
    baseline: str
    lr: float
    spread: Spread
    within: bool | None

    @property
    def clear(self) -> bool:
        """True if the difference is larger than the seed spread, which a single seed cannot show."""
        return self.within is False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One line of the ranking table; None where the runs do not suffice."""

    remedy: str
    sensitivity: Spread | None
    sensitivity_clipped: Spread | None
    best_lr: float
    best_loss: Spread
    gains: Mapping[float, Gain]
    max_logit: float
    stable_lr: float | None
    alarm: tuple[int, float] | None
    cpu_ratio: float | None


def spread(values: Sequence[float]) -> Spread:
    """Mean and range; NaN anywhere makes all three NaN rather than vanish.

    >>> spread([1.0, 2.0, 6.0])
    Spread(mean=3.0, low=1.0, high=6.0, n=3)
    """
    if any(math.isnan(value) for value in values):
        return Spread(mean=math.nan, low=math.nan, high=math.nan, n=len(values))
    return Spread(mean=statistics.fmean(values), low=min(values), high=max(values), n=len(values))


def losses(rows: Sequence[Row], remedy: str, lr: float) -> dict[int, float]:
    """Held-out loss by seed of one remedy at one LR."""
    return {row["seed"]: row["val_loss"] for row in rows if row["remedy"] == remedy and row["lr"] == lr}


def gain(rows: Sequence[Row], remedy: str, baseline: str, lr: float) -> Gain | None:
    """The paired gain at one LR, or None where no seed has both."""
    differences = paired_gain(rows, remedy, baseline, lr)
    if not differences:
        return None
    total = spread(differences)
    mine, theirs = losses(rows, remedy, lr), losses(rows, baseline, lr)
    seeds = mine.keys() & theirs.keys()
    within = None
    if len(seeds) > 1 and math.isfinite(total.mean):
        ranges = [max(side[s] for s in seeds) - min(side[s] for s in seeds) for side in (mine, theirs)]
        within = abs(total.mean) <= max(total.high - total.low, *ranges)
    return Gain(remedy=remedy, baseline=baseline, lr=lr, spread=total, within=within)


def gains(rows: Sequence[Row], remedy: str, baseline: str) -> dict[float, Gain]:
    """The paired gain at each LR that has one."""
    found = {lr: gain(rows, remedy, baseline, lr) for lr in sorted({row["lr"] for row in rows})}
    return {lr: one for lr, one in found.items() if one is not None}


def sensitivity(rows: Sequence[Row], remedy: str, lrs: Sequence[float], clip: bool) -> Spread | None:
    """LR sensitivity over the seeds that finished at every LR; clipped at the loss of initialisation or not."""
    values = []
    for seed in sorted({row["seed"] for row in rows}):
        mine = {row["lr"]: row for row in rows if row["remedy"] == remedy and row["seed"] == seed}
        if len(lrs) > 1 and set(mine) == set(lrs):
            start = statistics.fmean(row["init_loss"] for row in mine.values()) if clip else math.inf
            values.append(lr_sensitivity([mine[lr]["val_loss"] for lr in lrs], start))
    return spread(values) if values else None


def standings(study: StudyData) -> list[Standing]:
    """Each remedy with a finished grid run, least sensitive to the LR first; those without a figure last."""
    rows = study.rows()
    present = {row["remedy"] for row in rows}
    lines = [_standing(rows, remedy, study.lrs()) for remedy in study.remedies if remedy in present]
    return sorted(lines, key=_rank)


def _rank(line: Standing) -> tuple[float, float]:
    def last(value: float | None) -> float:
        return math.inf if value is None or math.isnan(value) else value

    return last(line.sensitivity_clipped.mean if line.sensitivity_clipped else None), last(line.best_loss.mean)


def _standing(rows: Sequence[Row], remedy: str, lrs: Sequence[float]) -> Standing:
    mine = [row for row in rows if row["remedy"] == remedy]
    by_lr = {lr: spread(list(losses(rows, remedy, lr).values())) for lr in sorted({row["lr"] for row in mine})}
    best_lr = min(by_lr, key=lambda lr: math.inf if math.isnan(by_lr[lr].mean) else by_lr[lr].mean)
    alarms = [(row["alarm_step"], row["lr"]) for row in mine if row["alarm_step"] is not None]
    return Standing(
        remedy=remedy,
        sensitivity=sensitivity(rows, remedy, lrs, clip=False),
        sensitivity_clipped=sensitivity(rows, remedy, lrs, clip=True),
        best_lr=best_lr,
        best_loss=by_lr[best_lr],
        gains=gains(rows, remedy, BASELINE) if remedy != BASELINE else {},
        max_logit=spread([row["max_logit"] for row in mine]).high,
        stable_lr=largest_stable_lr(mine),
        alarm=min(alarms) if alarms else None,
        cpu_ratio=_cpu_ratio(mine, [row for row in rows if row["remedy"] == BASELINE]),
    )


def _cpu_ratio(mine: Sequence[Row], baseline: Sequence[Row]) -> float | None:
    """CPU seconds of the remedy over those of the baseline, summed over the (LR, seed) pairs that both have."""
    theirs = {(row["lr"], row["seed"]): row["cpu_seconds"] for row in baseline}
    pairs = [(row["cpu_seconds"], theirs[key]) for row in mine if (key := (row["lr"], row["seed"])) in theirs]
    below = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / below if below > 0 else None


HELD, REVERSE, NOT_SHOWN, UNDECIDED = "held", "the reverse", "not shown", "undecided"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A ratio or a difference by seed. `noise`: how far seeds are apart, as ratios are in logarithms."""

    values: Sequence[float]
    noise: float
    ratio: bool
    unit: str = "seed"

    @property
    def mean(self) -> float:
        """Over the seeds; geometric of ratios."""
        if not self.ratio:
            return math.fsum(self.values) / len(self.values)
        return math.exp(math.fsum(map(math.log, self.values)) / len(self.values))

    @property
    def verdict(self) -> str:
        """Held if it is larger than nothing by more than seeds differ, the reverse if smaller.

        >>> times({0: 2.0, 1: 2.2}, {0: 1.0, 1: 1.0}).verdict, times({0: 3.0}, {0: 1.0}).verdict
        ('held', 'undecided')
        """
        if len(self.values) < 2:
            return UNDECIDED
        size = math.log(self.mean) if self.ratio else self.mean
        if not abs(size) > self.noise:
            return NOT_SHOWN
        return HELD if size > 0 else REVERSE

    def text(self) -> str:
        """The mean with its range: 1.3× (0.9× to 1.9×, 3 seeds)."""
        low, high = min(self.values), max(self.values)
        write = _times if self.ratio else signed
        if len(self.values) == 1:
            return f"{write(self.mean)} (one seed)"
        return f"{write(self.mean)} ({write(low)} to {write(high)}, {count(len(self.values), self.unit)})"

    def said(self) -> str:
        """The verdict as the end of a sentence."""
        return {
            HELD: "held",
            REVERSE: "the reverse was seen",
            NOT_SHOWN: "inside the seed spread, not shown",
            UNDECIDED: "one seed, undecided",
        }[self.verdict]


def _times(value: float) -> str:
    return f"{value:.2f}×" if value < 10 else f"{number(value, 2)}×"


def times(above: Mapping[int, float], below: Mapping[int, float], *, same_run: bool = False) -> Effect | None:
    """The ratio `above` / `below` over the seeds that both have; None without any. The noise is the range of the
    ratio over the seeds, and unless both numbers are of one run, also that of either."""
    seeds = [s for s in sorted(above.keys() & below.keys()) if _positive(above[s]) and _positive(below[s])]
    if not seeds:
        return None
    logs = [math.log(above[s] / below[s]) for s in seeds]
    sides = [] if same_run else [[math.log(side[s]) for s in seeds] for side in (above, below)]
    return Effect(values=[math.exp(x) for x in logs], noise=max(map(_range, [logs, *sides])), ratio=True)


def less(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Effect | None:
    """The difference `theirs` - `mine` over the seeds that both have; None without any."""
    seeds = [s for s in sorted(mine.keys() & theirs.keys()) if math.isfinite(mine[s]) and math.isfinite(theirs[s])]
    if not seeds:
        return None
    values = [theirs[s] - mine[s] for s in seeds]
    noise = max(map(_range, [values, [mine[s] for s in seeds], [theirs[s] for s in seeds]]))
    return Effect(values=values, noise=noise, ratio=False)


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)
