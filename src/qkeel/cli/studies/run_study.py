"""A study from the command line: plan, progress, table, report, exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from qkeel.cli.console import StudyView, extrapolated, make_console, print_line, ranking, spent
from qkeel.cli.exits import COLLAPSED, FAILED, OK, command_line
from qkeel.cli.studies.study import HowFlags
from qkeel.errors import check_known
from qkeel.lab.config import RunConfig
from qkeel.lab.execution.execute import Execution, StudyResult, make_plan, pending, run_directory, run_plan
from qkeel.lab.execution.executors.executor import executor
from qkeel.lab.execution.progress import estimate_seconds
from qkeel.lab.execution.workers import Shard
from qkeel.lab.model.run_remedies import canonical
from qkeel.lab.plan import Grid, LongContexts, Plan, PlannedRun
from qkeel.lab.stack.what_runs_share import check_how
from qkeel.lab.tuning import FOLDER, in_words, tuned_plan, tuning_plan
from qkeel.report import write
from qkeel.report.study.collect import BASELINE

_LONG = 60  # seconds; a study that takes longer says so before its first run ends


def run_study(
    name: str, base: RunConfig, grid: Grid, contexts: LongContexts | None, *, out: Path, how: HowFlags
) -> int:
    """Runs a study, writes its table and report, and returns the exit code; the directory is printed first and last.

    Args:
        name: the study, as in lab.studies.
        base: the configuration that all runs share.
        grid: the axes.
        contexts: lengths of the test and post-hoc methods, where the study has them.
        out: directory of the study.
        how: processes, stacking, shard, dry run.
    """
    console = make_console()
    shard = Shard.parse(how.shard) if how.shard else Shard()
    place = executor(how.executor)
    check_how(how.stack)
    plan = make_plan(name, base, grid, contexts)
    if grid.tuning_seeds and not how.dry_run:
        plan = _tuned(console, plan, out, how)
    baseline = canonical(how.baseline)
    if baseline != BASELINE:
        check_known("baseline", baseline, {run.config.remedy for run in plan.runs})
    left = pending(plan, out, shard)
    print_line(console, f"study {out}")
    jobs = how.jobs if how.jobs is not None else place.capacity() if left else 1
    part = f", shard {shard.index}/{shard.count}" if shard.count > 1 else ""
    console.print(f"{len(plan.runs)} runs{part}, {len(left)} to do, {jobs} at once", highlight=False)
    if left and not how.dry_run and (seconds := estimate_seconds(left, jobs)) >= _LONG:
        console.print(f"about {spent(seconds)} on this machine", highlight=False)
    if how.dry_run:
        return _dry_run(console, plan, out, left, jobs)
    result = _execute(console, plan, out, how, jobs)
    write(out, out / "report.html", baseline=baseline)
    _print_tables(console, plan, result)
    for failure in result.failures:
        print_line(console, f"failed: {failure.directory}: {failure.error}")
    print_line(console, f"report {out / 'report.html'}")
    print_line(console, f"study {out}")
    if result.failures:
        return FAILED
    collapsed = any(row["collapsed"] for row in result.table)
    return COLLAPSED if how.fail_on_collapse and collapsed else OK


def _tuned(console: Console, plan: Plan, out: Path, how: HowFlags) -> Plan:
    """The plan at the rates that are best on the tuning seeds, which are printed."""
    jobs = how.jobs if how.jobs is not None else executor(how.executor).capacity()
    trial = tuning_plan(plan)
    console.print(f"{len(trial.runs)} runs choose the rates", highlight=False)
    tuned = tuned_plan(plan, _execute(console, trial, out / FOLDER, how, jobs).table)
    for choice in tuned.tuned:
        print_line(console, in_words(choice))
    return tuned


def _execute(console: Console, plan: Plan, out: Path, how: HowFlags, jobs: int) -> StudyResult:
    """Does what is left of a plan, with its progress on the console."""
    shard = Shard.parse(how.shard) if how.shard else Shard()
    view = StudyView(console, pending(plan, out, shard), out)
    execution = Execution(
        workers=jobs,
        stack=check_how(how.stack),
        executor=how.executor,
        shard=shard,
        command=command_line(),
        on_outcome=view.on_outcome,
    )
    with view.following():
        return run_plan(plan, out, execution)


def _print_tables(console: Console, plan: Plan, result: StudyResult) -> None:
    if plan.contexts:
        console.print("mean over seeds, next tokens predicted in %:", highlight=False)
        console.print(extrapolated(result.long_table))
        return
    for role in dict.fromkeys(run.role for run in plan.runs if run.role != "drift"):
        ids = {run.config.run_id for run in plan.runs if run.role == role}
        title = "" if role == "grid" else f"{role}: "
        console.print(f"{title}mean val_loss over seeds (largest max logit):", highlight=False)
        console.print(ranking([row for row in result.table if row["run_id"] in ids]))


def _dry_run(console: Console, plan: Plan, out: Path, left: Sequence[PlannedRun], jobs: int) -> int:
    for run in plan.runs:
        state = "to do" if run in left else "done, or another shard's"
        about = f"{run.title}, {run.config.steps} steps: {state}"
        print_line(console, f"{run_directory(out, run).name}  {about}")
    console.print(f"about {spent(estimate_seconds(left, jobs))} on this machine; nothing was written", highlight=False)
    return OK
