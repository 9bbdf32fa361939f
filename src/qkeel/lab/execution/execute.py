"""A study: a plan executed in one directory, which it goes on with, extends, or refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import final

from qkeel.errors import RunDirectoryError
from qkeel.lab.config import RunConfig
from qkeel.lab.execution.chaos_record import write_chaos
from qkeel.lab.execution.executors.executor import executor
from qkeel.lab.execution.results_table import rows, write_table
from qkeel.lab.execution.study_record import in_order, joined_study, read_study, study_of
from qkeel.lab.execution.workers import Job, Outcome, Shard, units_of
from qkeel.lab.lengths.longer_texts import check_methods, long_rows, missing
from qkeel.lab.model.build_model import check, resolve
from qkeel.lab.plan import Grid, LongContexts, Plan, PlannedRun
from qkeel.lab.stack.what_runs_share import How
from qkeel.lab.studies import find_study
from qkeel.lab.tasks.text import load_task
from qkeel.lab.training.environment import identity, refuse_mixture
from qkeel.lab.tuning import FOLDER, tuned_plan, tuning_plan
from qkeel.options import Json
from qkeel.records import EXTRAPOLATION_COLUMNS, RunDirectory, RunStatus, write_json
from qkeel.records.disk import remove_leftovers
from qkeel.records.rundir import locked


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The options of a study's execution; nothing here changes a number."""

    workers: int | None = 1
    """Processes at once, each with a run or a stack of runs; 1 does them in this one, None asks the executor."""
    executor: str = "local"
    """Where: local, ray, dask or slurm, with options as "slurm:partition=gpu,time=60"; see lab.execution.executors."""
    stack: How = "off"
    """Runs that differ in seed, steps and rates only train as one model: so many, or where models are small."""
    shard: Shard = dataclasses.field(default_factory=Shard)
    """Which part of the runs is done here."""
    command: str = ""
    """What the user typed, for the record."""
    on_outcome: Callable[[Outcome], None] = lambda outcome: None
    """Called as each run ends."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """The result of a study: tables of all runs of the directory and of its long contexts, and the new failures."""

    path: Path  #: of the study's directory
    table: Sequence[Json]  #: one row for each run that is done
    long_table: Sequence[Json]  #: one row for each of them, method and length
    failures: Sequence[Outcome]  #: runs that failed this time


def make_plan(
    name: str, base: RunConfig | None = None, grid: Grid | None = None, contexts: LongContexts | None = None
) -> Plan:
    """The plan of a study by name, checked: every remedy, the model, and the corpus can be used.

    >>> [run.name for run in make_plan("lr", grid=Grid(remedies=["none"], lrs=[0.01, 0.03], seeds=[0])).runs]
    ['none', 'none']

    Args:
        name: of lab.studies.STUDIES. base: the configuration of its runs. grid: its axes. The study has defaults for
            all of them.
        contexts: of the extrapolation study, in place of its own.

    Raises: UnknownNameError, InvalidValueError, RefusedError or DataError, before anything is written.
    """
    plan = find_study(name).plan(name, base, grid, contexts)
    runs = [dataclasses.replace(run, config=resolve(run.config)) for run in plan.runs]
    unlike = {(run.role, run.name): run.config for run in runs}
    for config in unlike.values():
        check(config)
        if plan.contexts:
            check_methods(config, plan.contexts)
    for config in {run.role: run.config for run in runs}.values():
        load_task(config)
    axes = dataclasses.replace(plan.grid, remedies=[r.name for r in runs if r.role != "drift"])
    once = list({run.config.run_id: run for run in runs}.values())
    return dataclasses.replace(plan, grid=axes, runs=once)


def study(
    name: str,
    *,
    remedies: Sequence[str],
    lrs: Sequence[float],
    seeds: Sequence[int],
    out: str | Path,
    base: RunConfig | None = None,
    jobs: int = 1,
    contexts: LongContexts | None = None,
) -> StudyResult:
    """Runs the study `name` over a grid in the directory `out`; finished runs are kept, killed ones resume.

    >>> base = RunConfig(steps=1, eval_sequences=1)
    >>> len(study("lr", remedies=["none"], lrs=[0.01], seeds=[0], out="a", base=base).table)
    1

    Args:
        name: of lab.studies.STUDIES. remedies, lrs, seeds: the grid; the same directory takes more of them later.
        out: the directory. base: model, corpus and length of its runs, which stay the same in one directory.
        jobs: processes at once; small models train several as one. `run_plan` takes more options.
        contexts: in the study "extrapolation", where remedies are attention forms, what is done with the weights.
    """
    plan = make_plan(name, base, Grid(remedies=remedies, lrs=lrs, seeds=seeds), contexts)
    return run_plan(plan, out, Execution(workers=jobs, stack="auto"))


def run_plan(plan: Plan, out: str | Path, execution: Execution) -> StudyResult:
    """Executes what of the plan is not done yet, then writes table.csv.

    >>> grid = Grid(remedies=["none"], lrs=[0.01], seeds=[0])
    >>> len(run_plan(make_plan("lr", RunConfig(steps=1, eval_sequences=1), grid), "b", Execution()).failures)
    0

    Raises: RunDirectoryError if the directory is in use, holds another study or runs that were computed otherwise, or
    cannot be written.
    """
    out = Path(out)
    if plan.grid.tuning_seeds and not plan.tuned:
        plan = tune(plan, out, execution)
    shard = execution.shard
    part = "" if shard.count == 1 else f".{shard.index}-of-{shard.count}"
    with locked(out / f"lock{part}", f"{out} is in use by another study"):
        with _alone(out):
            if execution.executor == "local":  # else the machines that compute find out
                for run in {run.role: run for run in pending(plan, out, shard)}.values():
                    refuse_mixture(out / "runs", identity(run.config))
            about = _study(out, plan, execution.command)
            write_json(out / "study.json", about)
        failures: list[Outcome] = []
        try:
            for outcome in _outcomes(plan, out, execution):
                execution.on_outcome(outcome)
                if outcome.error:
                    failures.append(outcome)
        finally:
            with _alone(out):
                table, long_table = write_tables(out)
    return StudyResult(path=out, table=table, long_table=long_table, failures=failures)


def tune(plan: Plan, out: Path, execution: Execution) -> Plan:
    """Returns the plan at the rate of each remedy that is best on the tuning seeds, after doing what of them is left.

    Raises: RunDirectoryError where one of their runs is not done, or the directory holds another study.
    """
    return tuned_plan(plan, run_plan(tuning_plan(plan), out / FOLDER, execution).table)


def write_tables(out: Path) -> tuple[list[Json], list[Json]]:
    """Writes the table.csv of a study's directory; returns the rows of its runs and those of its long contexts."""
    about = read_study(out)
    table = rows(out, about["runs"])
    long_table = long_rows(out, about) if "contexts" in about else []
    if "contexts" in about:
        write_table(out, long_table, list(EXTRAPOLATION_COLUMNS))
    else:
        write_table(out, table)
    write_chaos(out, about)
    return table, long_table


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Shards of one study share study.json and table.csv; each holds them for a moment."""
    with locked(out / "lock.files", f"{out / 'study.json'} is in use by another study", wait=60.0):
        remove_leftovers(out)
        yield


def run_directory(out: Path, run: PlannedRun) -> Path:
    """The directory of a run of a study."""
    return out / "runs" / run.config.run_id


def pending(plan: Plan, out: Path, shard: Shard) -> list[PlannedRun]:
    """The shard's runs that are not done or were damaged since, the longest first: no worker ends long after others."""
    mine = list(plan.runs)[shard.index - 1 :: shard.count]
    left = []
    for run in mine:
        place = RunDirectory(run_directory(out, run))
        done = place.status is RunStatus.DONE and not place.damage()
        if not done or (plan.contexts and missing(place, plan.contexts.of(run.name))):
            left.append(run)
    return sorted(left, key=lambda run: -run.config.steps)


def _outcomes(plan: Plan, out: Path, execution: Execution) -> Generator[Outcome, None, None]:
    """Does what is left of the plan, yielding each outcome as it comes; closed, it stops what goes on."""
    place = executor(execution.executor)
    if not (jobs := _jobs(plan, out, execution)):
        return
    # Other machines start in other folders: they get whole paths, and the user the paths that were typed.
    typed = {str(Path(job.directory).absolute()): job.directory for job in jobs}
    jobs = [dataclasses.replace(job, directory=whole) for whole, job in zip(typed, jobs)]
    most = place.capacity()  # asked in any case: a cluster that cannot be reached says so here
    workers = most if execution.workers is None else execution.workers
    with closing(place.outcomes(units_of(jobs, workers, execution.stack), workers, out.absolute())) as found:
        for outcomes in found:
            for outcome in outcomes:
                yield dataclasses.replace(outcome, directory=typed[outcome.directory])


def _jobs(plan: Plan, out: Path, execution: Execution) -> list[Job]:
    return [
        Job(
            run.config.to_dict(),
            str(run_directory(out, run)),
            execution.command,
            plan.contexts and plan.contexts.of(run.name),
        )
        for run in pending(plan, out, execution.shard)
    ]


def _study(out: Path, plan: Plan, command: str) -> Json:
    """The study.json of the plan and of what is in the directory already."""
    new = study_of(plan, command)
    if (out / "study.json").exists():
        return joined_study(out, read_study(out), new)
    if out.exists() and any(not p.name.startswith("lock") and p.name != FOLDER for p in out.iterdir()):
        raise RunDirectoryError(
            f"{out} is not empty and holds no study.json, so it is no study's directory. "
            "Choose another directory; nothing was changed."
        )
    return {**new, "runs": in_order(new["runs"], new["remedies"], list(new["base"]))}
