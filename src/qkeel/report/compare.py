"""The comparison of a study: paired differences from the baseline, with an interval each."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping

from qkeel.metrics import PairedEffect, paired_effect
from qkeel.report import html as h
from qkeel.report.study_runs import RunData, StudyData

# Coverage of each interval of a page.
LEVEL = 0.95


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The mean of paired differences; `effect` has the interval, None with one seed or a loss that is not finite."""

    mean: float
    n: int
    effect: PairedEffect | None

    def interval(self) -> str:
        """Returns the interval and the number of seeds in words."""
        if self.effect is None:
            return (
                "one seed, no interval"
                if math.isfinite(self.mean)
                else "a value is not finite"
            )
        seeds = h.count(self.n, "seed")
        if math.isinf(self.effect.high):
            return f"the same in each of {seeds}"
        low, high = h.signed(self.effect.low), h.signed(self.effect.high)
        return f"{low} to {high}, {seeds}"

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.effect is not None and self.effect.verdict in ("better", "worse")


def difference(
    above: Mapping[int, float], below: Mapping[int, float]
) -> Difference | None:
    """Returns the mean of `above` - `below` over the seeds that both have, or None if there are no such seeds.

    The same seed means the same initial weights and batches, so pairing removes the variance between seeds.

    >>> found = difference({0: 2.5, 1: 2.6, 2: 2.7}, {0: 2.4, 1: 2.48, 2: 2.59})
    >>> round(found.mean, 3), found.interval()
    (0.11, '+0.085 to +0.135, 3 seeds')
    """
    # In the order of seeds, so that the last digits do not depend on the order of the runs.
    values = [above[seed] - below[seed] for seed in sorted(above.keys() & below.keys())]
    if not values:
        return None
    # One pair has no spread, and a loss that is not finite has no mean.
    judged = len(values) > 1 and all(map(math.isfinite, values))
    return Difference(
        mean=math.fsum(values) / len(values),
        n=len(values),
        effect=paired_effect(values, level=LEVEL) if judged else None,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The finished runs of one remedy at one learning rate in one part of a study.

    gain: the held-out loss of the baseline minus that of the remedy, so that positive means better; None for the
    baseline itself and where no seed has both.
    """

    part: str
    remedy: str
    lr: float
    runs: list[RunData]
    gain: Difference | None = None

    def over(self, baseline: Cell) -> Difference | None:
        """Returns the held-out loss of a baseline minus that of this cell."""
        return difference(baseline.values("val_loss"), self.values("val_loss"))

    def values(self, name: str) -> dict[int, float]:
        """Returns a number of the table by seed."""
        return {
            run.seed: run.row[name]
            for run in self.runs
            if run.row is not None and run.row.get(name) is not None
        }

    @property
    def max_logit(self) -> float:
        """The largest attention logit of all runs, NaN if one is."""
        logits = list(self.values("max_logit").values())
        # `max` keeps a NaN or loses it, depending on where it stands.
        return (
            math.nan if any(map(math.isnan, logits)) else max(logits, default=math.nan)
        )

    @property
    def collapsed(self) -> int:
        """The number of runs whose attention collapsed."""
        return sum(bool(run.row and run.row["collapsed"]) for run in self.runs)


def cells(study: StudyData) -> list[Cell]:
    """Returns every remedy at every rate with a finished run, part by part, in the study's order."""
    table = []
    for name, part_of_study in study.parts().items():
        cell_of = {}
        for run in part_of_study.finished:
            key = (run.remedy, run.lr)
            empty = Cell(part=name, remedy=run.remedy, lr=run.lr, runs=[])
            cell_of.setdefault(key, empty).runs.append(run)
        for remedy in study.remedies:
            for lr in part_of_study.lrs():
                cell, baseline = (
                    cell_of.get((r, lr)) for r in (remedy, study.baseline)
                )
                if cell is not None and baseline is not None and cell is not baseline:
                    cell = dataclasses.replace(cell, gain=cell.over(baseline))
                if cell is not None:
                    table.append(cell)
    return table


def primary_cell(study: StudyData) -> tuple[Cell, Cell] | None:
    """Returns the one comparison that the page leads with: a remedy and its baseline at one rate.

    It is the primary comparison if the study named one before its runs. Otherwise it is the first remedy at the rate at
    which the baseline has its lowest mean loss, so that it does not depend on how the remedies did; in a study with
    parts, it is in the first part. None if no two remedies have finished runs of the same seed and rate.
    """
    table = cells(study)
    first_part = [cell for cell in table if cell.part == table[0].part]
    primary = study.primary or {}
    name = str(primary.get("baseline") or study.baseline)
    baselines = [cell for cell in first_part if cell.remedy == name]
    if primary.get("lr") is not None:
        baselines = [cell for cell in baselines if cell.lr == float(primary["lr"])]
    for baseline in sorted(baselines, key=_mean_loss):
        for cell in first_part:
            is_compared = cell.remedy == primary.get("remedy", cell.remedy) != name
            if is_compared and cell.lr == baseline.lr:
                gain = cell.over(baseline)
                if gain is not None:
                    return dataclasses.replace(cell, gain=gain), baseline
    return None


def _mean_loss(cell: Cell) -> float:
    mean = statistics.fmean(cell.values("val_loss").values())
    return math.inf if math.isnan(mean) else mean


# Studies of length extrapolation compare the share of accuracy that is kept on longer texts.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LongCell:
    """One form of attention with one post-hoc method at one length, in one part of a study.

    values: numbers by name and seed. gain: the share of accuracy that the form keeps minus that of the first form.
    """

    part: str
    form: str
    method: str
    length: int
    values: Mapping[str, Mapping[int, float]]
    gain: Difference | None = None

    @property
    def kept(self) -> float:
        """The share of the accuracy at the training length that is kept, averaged over seeds."""
        return statistics.fmean(self.values["kept_nonrepeat"].values())


def long_cells(study: StudyData) -> list[LongCell]:
    """Returns every form, method and length that was measured, part by part, in the study's order."""
    table = []
    for name, part_of_study in study.parts().items():
        measured: dict[tuple[str, str, int], dict[str, dict[int, float]]] = {}
        for run in sorted(
            part_of_study.runs, key=lambda run: study.remedies.index(run.remedy)
        ):
            for line in run.long:
                if line.get("kept_nonrepeat") is None:
                    # The form refused the method.
                    continue
                key = (run.remedy, str(line["posthoc"]), int(line["test_length"]))
                for field, value in line.items():
                    if isinstance(value, float):
                        by_seed = measured.setdefault(key, {}).setdefault(field, {})
                        by_seed[run.seed] = value
        for (form, method, length), values in measured.items():
            gain, baseline = None, measured.get((study.baseline, method, length))
            if form != study.baseline and baseline is not None:
                kept = baseline["kept_nonrepeat"]
                gain = difference(values["kept_nonrepeat"], kept)
            table.append(
                LongCell(
                    part=name,
                    form=form,
                    method=method,
                    length=length,
                    values=values,
                    gain=gain,
                )
            )
    return table
