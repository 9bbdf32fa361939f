"""The command line that the studies share."""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkeel import report
from qkeel.lab import (
    Execution,
    PlannedRun,
    RunConfig,
    Study,
    StudyResult,
    make_plan,
    run_plan,
)


def main(study: Study, tuning_seeds: Sequence[int] = ()) -> StudyResult:
    """Runs a study with the options of the command line, and writes its table and page.

    With tuning seeds, each remedy runs at its best rate on those seeds alone. Their runs are in OUT-tuning.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.studies.{study.name}", description=study.line
    )
    parser.add_argument("--remedies", nargs="+", default=study.grid.remedies)
    parser.add_argument("--lrs", nargs="+", type=float, default=study.grid.lrs)
    parser.add_argument("--seeds", nargs="+", type=int, default=study.grid.seeds)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs") / study.name)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--executor", default="loky", help="loky, ray, dask or slurm")
    options = parser.parse_args()
    if {*tuning_seeds}.intersection(options.seeds):
        parser.error(f"seeds {tuning_seeds} choose the rates, so none is compared")
    grid = dataclasses.replace(
        study.grid, remedies=options.remedies, lrs=options.lrs, seeds=options.seeds
    )
    base = study.base or RunConfig()
    base = dataclasses.replace(base, steps=options.steps or base.steps)
    plan = make_plan(study, base, grid)
    command = " ".join([f"python -m experiments.studies.{study.name}", *sys.argv[1:]])
    execution = Execution(
        workers=options.jobs, executor=options.executor, command=command
    )
    if tuning_seeds:
        trial = make_plan(study, base, dataclasses.replace(grid, seeds=tuning_seeds))
        out = options.out.with_name(f"{options.out.name}-tuning")
        best = best_rates(trial.runs, run_plan(trial, out, execution).table)
        chosen = [r for r in plan.runs if r.config.optim.lr == best[r.role, r.name]]
        plan = dataclasses.replace(plan, runs=chosen)
    result = run_plan(plan, options.out, execution)
    report.write(options.out, options.out / "report.html")
    print(
        f"{options.out / 'report.html'}: {len(result.table)} runs, {len(result.failures)} of this call failed"
    )
    return result


def best_rates(
    runs: Sequence[PlannedRun], table: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, str], float]:
    """Returns, by role and remedy, the rate with the lowest mean held-out loss; the lower of two that are equal.

    A loss that is not finite counts as infinite.
    """
    losses = {row["run_id"]: row["val_loss"] for row in table}
    by_rate: dict[tuple[str, str], dict[float, list[float]]] = {}
    for run in sorted(runs, key=lambda run: run.config.optim.lr):
        loss = losses[run.config.run_id]
        rates = by_rate.setdefault((run.role, run.name), {})
        rates.setdefault(run.config.optim.lr, []).append(
            loss if math.isfinite(loss) else math.inf
        )
    return {
        key: min(rates, key=lambda lr: statistics.fmean(rates[lr]))
        for key, rates in by_rate.items()
    }
