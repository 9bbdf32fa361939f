"""How early and how often wrongly alarms go off, how good forecasts are, on recorded studies; what an update costs.

    python -m experiments.alarms STUDY…
    python -m experiments.alarms [--toy]

Studies that hold `qk_norm` runs to compare losses with are used for alarms, all of them for forecasts. Without a study,
the time of one update late in a long run. See experiments/notes/alarms.md.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import numpy as np
from benchmarks.measure import Bench

from experiments.files import read_json
from qkeel.lab import OptimConfig, RunDirectory, RunStatus, learning_rate
from qkeel.metrics import collapsed
from qkeel.monitor import (
    DEFAULT,
    AlarmLog,
    Forecast,
    History,
    PlannedRates,
    Recording,
    Rule,
    Severity,
    forecast,
    replay,
)

GAP = 0.1  # nats of held-out loss behind qk_norm; a slow but healthy remedy (lalr at small rates) is up to 0.06 behind
SMOOTH = 5  # records whose median is taken
REFERENCE = "qk_norm"
THRESHOLDS = {100.0: 10.0, 1e3: 30.0, 1e4: 30.0}  # forecast threshold -> the logit from which on it is asked for
HORIZON = 4.0
LEAD = 20  # steps of warning that are asked for
ROOM = 40  # a gap from this step on leaves room for them


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


def recorded(run: RunDirectory) -> History:
    """A run with its schedule."""
    config = run.config()
    optim, steps = OptimConfig(**config["optim"]), config["steps"]
    return History.read(run, planned=PlannedRates.of([learning_rate(optim, step, steps) for step in range(steps)]))


def unplanned(history: History) -> History:
    """The same for someone who does not know the schedule."""
    return dataclasses.replace(history, planned=None)


def cases(study: Path, gap: float = GAP) -> list[Case]:
    """The finished runs of an LR study, marked healthy or collapsing; none of a study without a reference."""
    runs = {}
    for entry in read_json(study / "study.json")["runs"]:
        run = RunDirectory(study / "runs" / entry["run_id"])
        if run.status is RunStatus.DONE:
            runs[entry["remedy"], entry["lr"], entry["seed"]] = (recorded(run), run.summary())
    if not any(remedy == REFERENCE for remedy, _, _ in runs):
        return []
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


def row(name: str, rules: Sequence[Rule], runs: Sequence[Case], histories: Sequence[History]) -> str:
    """One line: alarm in how many collapsing runs, how early, false in how many healthy ones."""
    first = {id(run): replay(history, rules) for run, history in zip(runs, histories)}
    bad = [run for run in runs if run.bad]
    healthy = [run for run in runs if not run.bad]
    caught = [run for run in bad if first[id(run)]]
    leads = [(run.gap_step, run.gap_step - first[id(run)][0].step) for run in caught if run.gap_step is not None]
    gaps = [run.gap_step for run in bad if run.gap_step is not None]
    early = f"{sum(lead >= LEAD for _, lead in leads)}/{len(gaps)}"
    roomy = f"{sum(lead >= LEAD for gap, lead in leads if gap >= ROOM)}/{sum(gap >= ROOM for gap in gaps)}"
    false = sum(bool(first[id(run)]) for run in healthy)
    shown = f"{min(lead for _, lead in leads)} / {statistics.median(lead for _, lead in leads):g}" if leads else "-"
    return f"| {name} | {len(caught)}/{len(bad)} | {early} | {roomy} | {shown} | {false}/{len(healthy)} |"


def outcomes(history: History, threshold: float) -> Iterator[tuple[Forecast, History, float]]:
    """Every forecast there is to make, what was known then, and the step of passing: infinity if it never came."""
    top = history.top("max_logit")
    assert top is not None
    for n in range(2, len(history) + 1):
        past = history.upto(n)
        if not THRESHOLDS[threshold] < top[n - 1] < threshold:
            continue
        ahead = forecast(past.steps, top[:n], threshold, rates=past.rates, planned=past.planned)
        if ahead is not None:
            passed = np.flatnonzero((top > threshold) & (history.steps > past.steps[-1]))
            yield ahead, past, float(history.steps[passed[0]]) if len(passed) else math.inf


def unplanned_row(name: str, histories: Sequence[History], threshold: float) -> str:
    """One line on forecasts that take the rate to stay: as if said of steps, and as meant, of the clock."""
    errors, steps, clock, open_ = [], [], [], 0
    for history in histories:
        assert history.planned is not None
        end = float(history.steps[-1])
        for ahead, past, passed in outcomes(unplanned(history), threshold):
            now = float(past.steps[-1])
            if ahead.step > HORIZON * now:
                continue
            errors += [abs(ahead.step / passed - 1)] if passed < math.inf else []
            if passed < math.inf or ahead.high < end:
                steps.append(ahead.low <= passed <= ahead.high)
            else:
                open_ += 1  # the run ended inside the interval: nobody knows
            assert past.rates is not None
            now_tick, last_tick = history.planned.ticks(np.array([now, min(passed, end)]))
            there = now + (last_tick - now_tick) / past.rates[-1]  # the step it would be, had the rate stayed
            if passed < math.inf or ahead.high < there:
                clock.append(passed < math.inf and ahead.low <= there <= ahead.high)
    error = f"{statistics.median(errors):.0%}" if errors else "-"
    return f"| {name}, {threshold:g} | {len(steps)} (+{open_} open) | {error} | {share(steps)} | {share(clock)} |"


def planned_row(name: str, histories: Sequence[History], threshold: float) -> str:
    """Returns one line on forecasts that know the schedule, by what they predict."""
    said: dict[str, list[bool]] = {kind: [] for kind in ("within", "perhaps", "hardly", "never")}
    errors = []
    for history in histories:
        for ahead, _, passed in outcomes(history, threshold):
            known = Counter(x < math.inf for x in (ahead.low, ahead.step, ahead.high))[True]
            said[("never", "hardly", "perhaps", "within")[known]].append(ahead.low <= passed <= ahead.high)
            errors += [abs(ahead.step / passed - 1)] if passed < math.inf and ahead.step < math.inf else []
    error = f"{statistics.median(errors):.0%}" if errors else "-"
    open_ended = [inside for kind in ("within", "perhaps", "hardly") for inside in said[kind]]
    cells = " | ".join(share(said[kind]) for kind in ("within", "perhaps", "hardly"))
    return f"| {name}, {threshold:g} | {error} | {cells} | **{share(open_ended)}** | {share(said['never'])} |"


def share(inside: Sequence[bool]) -> str:
    """`9/10 = 90%`."""
    return f"{sum(inside)}/{len(inside)} = {sum(inside) / len(inside):.0%}" if inside else "-"


def cost(layers: int = 80, heads: int = 64, last: int = 50, records: int = 100_000) -> None:
    """Print the time of one record, with all rules, in a long run of a large model."""
    planned = PlannedRates.of(np.full(records + 1, 1e-3))
    recording, log = Recording([f"layers.{i}" for i in range(layers)], planned=planned), AlarmLog()
    noise = np.random.default_rng(0).random((last, layers, heads))
    times: list[float] = []
    first = 0.0
    print(f"| records so far | time per record, {layers} layers of {heads} heads | relative |\n|---|---|---|")
    for n in range(1, records + 1):
        logits = noise[n % last] * (40 + 50 * n / records)  # high enough that every rule has to look
        before = time.perf_counter()
        recording.append(
            {"step": n, "lr": 1e-3}, {"max_logit": logits, "entropy": 1 + logits / 100, "query_norm": logits}
        )
        if n <= 10 or n % 1000 > 1000 - last or n % 1000 == 0:
            log.update(recording.history)
            times.append(time.perf_counter() - before)
        if n in (10, 1000, 10_000, 100_000):
            now = statistics.median(times[-last:])
            first = first or now
            print(f"| {n:,} | {1e3 * now:.2f} ms | {now / first:.1f} |")
    assert not log.alarms


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of experiments/notes/alarms.md."""
    flags = {"studies": {"nargs": "*", "type": Path, "metavar": "STUDY"}}
    bench = Bench("alarms", __doc__, arguments, rounds=None, flags=flags)
    studies = bench.options.studies
    if not studies:
        return cost(2, 4, records=1000) if bench.toy else cost()
    report_alarms([run for study in studies for run in cases(study)])
    report_forecasts(studies)


def report_alarms(runs: Sequence[Case]) -> None:
    """The tables on alarms."""
    alarms = [rule for rule in DEFAULT if rule.severity is not Severity.NOTICE]
    all_ = [run.history for run in runs]
    blind = [unplanned(history) for history in all_]
    named: list[tuple[str, Sequence[Rule], Sequence[History]]] = [
        ("**any alarm** (default rules but notices)", alarms, all_),
        ("any alarm, schedule not known", alarms, blind),
        ("any alarm, a record every 10 steps", alarms, [every(history, 5) for history in all_]),
        ("any alarm, both", alarms, [every(history, 5) for history in blind]),
    ]
    named += [(f"{rule.name} ({rule.severity})", [rule], all_) for rule in DEFAULT]
    bad = [run for run in runs if run.bad]
    print(f"{len(runs)} runs: {len(bad)} collapsing, {len(runs) - len(bad)} healthy\n")
    print(f"| rule | alarm in collapsing | ≥ {LEAD} steps before the gap | of gaps from step {ROOM} on |", end="")
    print(" lead: least / median | false in healthy |\n|---|---|---|---|---|---|")
    for name, rules, histories in named:
        print(row(name, rules, runs, histories))
    for run in runs:
        raised = replay(run.history, alarms)
        late = run.gap_step is not None and bool(raised) and run.gap_step - raised[0].step < LEAD
        if run.bad != bool(raised) or late:
            kind = "missed" if not raised else "late" if late else "false"
            what = f"gap {run.gap_step}" + (f", step {raised[0].step}, {raised[0].rule}" if raised else "")
            top = np.nanmax(run.history.values["max_logit"])
            print(f"\n{kind}: {run.remedy}, lr {run.lr:g}, seed {run.seed}: {what}, max logit {top:,.0f}")


def report_forecasts(studies: Sequence[Path]) -> None:
    """The tables on forecasts."""
    loaded = {}
    for study in studies:
        directories = [RunDirectory(study / "runs" / e["run_id"]) for e in read_json(study / "study.json")["runs"]]
        loaded[study.name] = [recorded(run) for run in directories if run.status is RunStatus.DONE]
    print("\nSchedule not known: the rate is taken to stay.\n")
    print("| forecasts of | made | median error of the step | inside, in steps | inside, on the clock |")
    print("|---|---|---|---|---|")
    for name, histories in loaded.items():
        for threshold in THRESHOLDS:
            print(unplanned_row(name, histories, threshold))
    print("\nSchedule known.\n\n| forecasts of | median error of the step | inside: within this run |", end="")
    print(" high end open | step open | **all three** | says never |\n|---|---|---|---|---|---|---|")
    for name, histories in loaded.items():
        for threshold in THRESHOLDS:
            print(planned_row(name, histories, threshold))


if __name__ == "__main__":
    main()
