"""How early and how often wrongly alarms go off, and how good forecasts are, on recorded studies.

    python -m benchmarks.alarms LR_STUDY [DRIFT_STUDY …]

The first study holds `qk_norm` runs to compare losses with; all of them are used for forecasts. See docs/alarms.md.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import numpy as np

from qkeel.metrics import collapsed
from qkeel.monitor import DEFAULT, EntropyDrop, History, Rule, Severity, forecast, replay
from qkeel.monitor.rule import largest
from qkeel.records import RunDirectory, RunStatus, read_json

GAP = 0.1  # nats of held-out loss behind qk_norm; a slow but healthy remedy (lalr at small rates) is up to 0.06 behind
SMOOTH = 5  # records whose median is taken
REFERENCE = "qk_norm"
THRESHOLDS = {100.0: 10.0, 1e3: 30.0, 1e4: 30.0}  # forecast threshold -> the logit from which on it is asked for
HORIZON = 4.0


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recorded run, and what became of it."""

    remedy: str
    lr: float
    seed: int
    history: History
    collapsed: bool
    gap_step: int | None

    @property
    def bad(self) -> bool:
        """Collapsed, or behind qk_norm for good."""
        return self.collapsed or self.gap_step is not None


def lasting_gap(history: History, reference: History, gap: float = GAP) -> int | None:
    """The step from which on the held-out loss stays more than `gap` nats above the reference's, or None."""
    known = {int(s): v for s, v in zip(reference.steps, reference.values["val_loss"])}
    steps = [int(s) for s in history.steps if int(s) in known]
    own = dict(zip((int(s) for s in history.steps), history.values["val_loss"]))
    raw = [own[s] - known[s] for s in steps]
    half = SMOOTH // 2
    behind = [statistics.median(raw[max(0, i - half) : i + half + 1]) > gap for i in range(len(raw))]
    last_fine = max((i for i, b in enumerate(behind) if not b), default=-1)
    return steps[last_fine + 1] if last_fine + 1 < len(steps) else None


def cases(study: Path, gap: float = GAP) -> list[Case]:
    """The finished runs of an LR study, told healthy from collapsing."""
    runs = {}
    for entry in read_json(study / "study.json")["runs"]:
        run = RunDirectory(study / "runs" / entry["run_id"])
        if run.status is RunStatus.DONE:
            runs[entry["remedy"], entry["lr"], entry["seed"]] = (History.read(run), run.summary())
    found = []
    for (remedy, lr, seed), (history, summary) in runs.items():
        reference = runs.get((REFERENCE, lr, seed))
        fallen = collapsed(summary["end_entropy"], summary["val_loss"], summary["init_loss"])
        gap_step = None if reference is None else lasting_gap(history, reference[0], gap)
        found.append(Case(remedy=remedy, lr=lr, seed=seed, history=history, collapsed=fallen, gap_step=gap_step))
    return found


def every(history: History, n: int) -> History:
    """Only each n-th record, as a coarser log would have it."""
    keep = slice(None, None, n)
    return dataclasses.replace(
        history,
        steps=history.steps[keep],
        rates=None if history.rates is None else history.rates[keep],
        values={k: v[keep] for k, v in history.values.items()},
        heads={k: v[keep] for k, v in history.heads.items()},
    )


def row(name: str, rules: Sequence[Rule], runs: Sequence[Case], thin: int = 1) -> str:
    """One line: alarm in how many collapsing runs, how early, false in how many healthy ones."""
    first = {id(run): replay(every(run.history, thin), rules) for run in runs}
    bad = [run for run in runs if run.bad]
    healthy = [run for run in runs if not run.bad]
    caught = [run for run in bad if first[id(run)]]
    leads = [run.gap_step - first[id(run)][0].step for run in caught if run.gap_step is not None]
    early = sum(lead >= 20 for lead in leads)
    false = sum(bool(first[id(run)]) for run in healthy)
    with_gap = sum(run.gap_step is not None for run in bad)
    shown = f"{min(leads)} / {statistics.median(leads):g}" if leads else "-"
    return f"| {name} | {len(caught)}/{len(bad)} | {early}/{with_gap} | {shown} | {false}/{len(healthy)} |"


def forecasts(
    history: History, threshold: float, floor: float, per_head: bool
) -> Iterator[tuple[float, float, float, float | None]]:
    """Every forecast that would have been shown: its step, low, high, and the step of passing (or None).

    Of the largest logit of the run, or of the head that has it now.
    """
    for n in range(2, len(history) + 1):
        past = history.upto(n)
        top = largest(past, "max_logit")
        if top is None or not floor < top.value < threshold:
            continue
        known = top.series if per_head else top.envelope
        ahead = forecast(past.steps, known, threshold, rates=past.rates)
        if ahead is None or ahead.step > HORIZON * past.steps[-1]:
            continue
        series = history.series("max_logit")
        full = series[:, top.at.layer, top.at.head] if per_head else series.reshape(len(history), -1).max(1)
        passed = np.flatnonzero((full > threshold) & (history.steps > past.steps[-1]))
        yield ahead.step, ahead.low, ahead.high, float(history.steps[passed[0]]) if len(passed) else None


def forecast_row(name: str, histories: Sequence[History], threshold: float, per_head: bool) -> str:
    """One line: how many forecasts, median error, share of outcomes inside the interval, all and first of each run."""
    errors, inside, first, open_ = [], [], [], 0
    for history in histories:
        end, mine = float(history.steps[-1]), []
        for step, low, high, passed in forecasts(history, threshold, THRESHOLDS[threshold], per_head):
            if passed is None and high >= end:
                open_ += 1  # the run ended inside the interval: nobody knows
                continue
            mine.append(passed is not None and low <= passed <= high)
            if passed is not None:
                errors.append(abs(step / passed - 1))
        inside += mine
        first += mine[:1]
    error = f"{statistics.median(errors):.0%}" if errors else "-"
    share = f"{sum(inside)}/{len(inside)} = {sum(inside) / len(inside):.0%}" if inside else "-"
    what = f"{name}, {'one head' if per_head else 'the run'}, {threshold:g}"
    return f"| {what} | {len(inside)} (+{open_} open) | {error} | {share} | {sum(first)}/{len(first)} |"


def main(arguments: Sequence[str]) -> None:
    """Print the tables of docs/alarms.md."""
    studies = [Path(a) for a in arguments]
    runs = cases(studies[0])
    alarms = [rule for rule in DEFAULT if rule.severity is not Severity.NOTICE]
    named: list[tuple[str, Sequence[Rule], int]] = [("**any alarm** (default rules but notices)", alarms, 1)]
    named += [("any alarm, a record every 10 steps", alarms, 5)]
    named += [(f"{rule.name} ({rule.severity})", [rule], 1) for rule in (*DEFAULT, EntropyDrop())]
    bad = [run for run in runs if run.bad]
    print(f"{len(runs)} runs: {len(bad)} collapsing, {len(runs) - len(bad)} healthy\n")
    print("| rule | alarm in collapsing | ≥ 20 steps before the gap | lead: least / median | false in healthy |")
    print("|---|---|---|---|---|")
    for name, rules, thin in named:
        print(row(name, rules, runs, thin))
    for run in runs:
        raised = replay(run.history, alarms)
        if run.bad != bool(raised):
            kind = "missed" if run.bad else f"false (step {raised[0].step}, {raised[0].rule})"
            end = f"end entropy {np.nanmean(run.history.series('entropy')[-1]):.2f}"
            top = f"max logit {np.nanmax(run.history.series('max_logit')):,.0f}"
            print(f"\n{kind}: {run.remedy}, lr {run.lr:g}, seed {run.seed}: {top}, {end}")
    print("\n| forecasts of | made | median error | inside the 90 % interval | first of each run inside |")
    print("|---|---|---|---|---|")
    for study in studies:
        ids = [e["run_id"] for e in read_json(study / "study.json")["runs"]]
        histories = [History.read(RunDirectory(study / "runs" / i)) for i in ids]
        for per_head in (False, True):
            for threshold in THRESHOLDS:
                print(forecast_row(study.name, histories, threshold, per_head))


if __name__ == "__main__":
    main(sys.argv[1:])
