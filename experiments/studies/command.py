"""The command line that the studies share."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from qkeel import report
from qkeel.lab import Execution, RunConfig, Study, StudyResult, make_plan, run_plan


def main(study: Study) -> StudyResult:
    """Runs a study with the options of the command line, and writes its table and page."""
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
    grid = dataclasses.replace(
        study.grid, remedies=options.remedies, lrs=options.lrs, seeds=options.seeds
    )
    base = study.base or RunConfig()
    plan = make_plan(
        study, dataclasses.replace(base, steps=options.steps or base.steps), grid
    )
    command = " ".join([f"python -m experiments.studies.{study.name}", *sys.argv[1:]])
    result = run_plan(
        plan,
        options.out,
        Execution(workers=options.jobs, executor=options.executor, command=command),
    )
    report.write(options.out, options.out / "report.html")
    print(
        f"{options.out / 'report.html'}: {len(result.table)} runs, {len(result.failures)} of this call failed"
    )
    return result
