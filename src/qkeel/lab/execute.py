"""Executes studies: the remaining runs, and the result tables.

Any number of processes and machines may execute one plan in one shared directory: each takes the runs that no other has
claimed, and all end when the study is complete.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import final

from qkeel.errors import RunDirectoryError
from qkeel.lab.build_run import check, resolve
from qkeel.lab.checkpoint import identity, refuse_mixture
from qkeel.lab.config import RunConfig
from qkeel.lab.executors import Job, Outcome, default_jobs, outcomes, parse_executor
from qkeel.lab.lengths import check_methods, long_rows, missing
from qkeel.lab.plan import Grid, LongContexts, Plan, PlannedRun, Study
from qkeel.lab.studies import find_study
from qkeel.lab.study_file import joined_study, read_study, study_of
from qkeel.lab.tasks import load_task
from qkeel.options import Json
from qkeel.records import (
    EXTRAPOLATION_COLUMNS,
    TABLE_COLUMNS,
    RunDirectory,
    RunStatus,
    write_json,
    write_text,
)
from qkeel.records.disk import remove_leftovers
from qkeel.records.run_directory import locked

# Execution of a plan in a directory, which may already contain a part of the same study.

# Seconds between looks at runs that other processes train.
BUSY_WAIT = 2.0
# Seconds until a file written on another machine must be visible here.
NETWORK_WAIT = 10.0


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Execution options of a study; none of them changes a result.

    >>> Execution(workers=2).executor
    'loky'
    """

    #: number of runs at once; 1 uses this process, None asks the executor
    workers: int | None = 1
    #: loky, ray, dask or slurm, the last with options of submitit as in "slurm:slurm_partition=gpu,timeout_min=60"
    executor: str = "loky"
    command: str = ""  #: the user's command line, which is recorded
    #: called when a run ends
    on_outcome: Callable[[Outcome], None] = lambda outcome: None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """The result of a study: a table of all runs in the directory, a table of their long-context tests, and the runs
    that failed."""

    path: Path  #: the study's directory
    table: Sequence[Json]  #: one row per finished run
    long_table: Sequence[Json]  #: one row per finished run, post-hoc method and length
    failures: Sequence[Outcome]  #: runs that failed in this execution


def make_plan(
    study: str | Study,
    base: RunConfig | None = None,
    grid: Grid | None = None,
    contexts: LongContexts | None = None,
) -> Plan:
    """Plans a study, and checks that every remedy, the model and the corpus can be used.

    >>> [run.name for run in make_plan("lr", grid=Grid(remedies=["none"], lrs=[0.01, 0.03], seeds=[0])).runs]
    ['none', 'none']

    Args:
        study: a key of lab.studies.STUDIES, or a study of your own.
        base: the configuration of the runs; each study has a default.
        grid: the axes; each study has a default.
        contexts: the long contexts of the extrapolation study, if they differ from its default.

    Raises:
        QkeelError: a name is unknown, a value is invalid, a remedy cannot be applied or the data is missing. In that
            case, nothing has been written.
    """
    plan = (find_study(study) if isinstance(study, str) else study).plan(
        base,
        grid,
        contexts,
    )
    runs = [dataclasses.replace(run, config=resolve(run.config)) for run in plan.runs]
    for config in {(run.role, run.name): run.config for run in runs}.values():
        check(config)
        if plan.contexts:
            check_methods(config, plan.contexts)
    for config in {run.role: run.config for run in runs}.values():
        load_task(config)
    axes = dataclasses.replace(plan.grid, remedies=[run.name for run in runs])
    # Two roles may hold the same configuration, as when a study's grid contains its baseline: it is trained once.
    distinct = list({run.config.run_id: run for run in runs}.values())
    return dataclasses.replace(plan, grid=axes, runs=distinct)


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
    """Runs the study `name` over a grid in the directory `out`; finished runs are kept, interrupted runs resume.

    >>> base = RunConfig(steps=1, eval_sequences=1)
    >>> len(study("lr", remedies=["none"], lrs=[0.01], seeds=[0], out="a", base=base).table)
    1

    Args:
        name: a key of lab.studies.STUDIES.
        remedies: the spec strings of the remedies; a later call for the same directory may add remedies, rates and
            seeds.
        lrs: the learning rates.
        seeds: the seeds.
        out: the directory of the study.
        base: the configuration with the model, corpus and length of the runs, which cannot change within a directory.
        jobs: the number of processes. `run_plan` has more options.
        contexts: the tests of the trained weights in the study "extrapolation", where remedies are attention forms.
    """
    plan = make_plan(
        name, base, Grid(remedies=remedies, lrs=lrs, seeds=seeds), contexts
    )
    return run_plan(plan, out, Execution(workers=jobs))


def run_plan(
    plan: Plan, out: str | Path, execution: Execution = Execution()
) -> StudyResult:
    """Executes the runs of the plan that have not finished yet, then writes table.csv.

    Runs that other processes train are waited for; if such a process ends, its run is continued here.

    >>> grid = Grid(remedies=["none"], lrs=[0.01], seeds=[0])
    >>> len(run_plan(make_plan("lr", RunConfig(steps=1, eval_sequences=1), grid), "b").failures)
    0

    Raises:
        RunDirectoryError: the directory contains another study or runs that were computed differently, or cannot be
            written to.
    """
    out = Path(out)
    # All processes of a study write study.json, so a plan is joined with what is there while no other one writes.
    with _alone(out):
        # Otherwise the computing machines check this.
        if parse_executor(execution.executor).name == "loky":
            for run in {run.role: run for run in pending(plan, out)}.values():
                refuse_mixture(out / "runs", identity(run.config))
        write_json(out / "study.json", _study(out, plan, execution.command))
    failures: list[Outcome] = []
    try:
        with closing(_outcomes(plan, out, execution)) as ended:
            for outcome in ended:
                execution.on_outcome(outcome)
                if outcome.error:
                    failures.append(outcome)
    finally:
        # A study that is interrupted leaves the table of what has finished.
        with _alone(out):
            table, long_table = write_tables(out)
    return StudyResult(path=out, table=table, long_table=long_table, failures=failures)


def write_tables(out: Path) -> tuple[list[Json], list[Json]]:
    """Writes the table.csv of a study's directory, and returns the rows of its runs and of its long contexts."""
    about = read_study(out)
    table = rows(out, about["runs"])
    if "contexts" not in about:
        write_table(out, table)
        return table, []
    long_table = long_rows(out, about)
    write_table(out, long_table, list(EXTRAPOLATION_COLUMNS))
    return table, long_table


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Briefly locks study.json and table.csv, which the processes of a study share."""
    with locked(
        out / "lock.files",
        f"{out / 'study.json'} is in use by another study",
        wait=60.0,
    ):
        remove_leftovers(out)
        yield


def run_directory(out: Path, run: PlannedRun) -> Path:
    """Returns the directory of a run of a study."""
    return out / "runs" / run.config.run_id


def pending(plan: Plan, out: Path) -> list[PlannedRun]:
    """Returns the unfinished runs in the order in which they begin.

    The longest come first, so that workers finish at about the same time; of equally long ones the primary comparison,
    and then one seed after the other, so that a page about an unfinished study has whole comparisons.
    """

    def order(run: PlannedRun) -> tuple[int, bool, int]:
        is_primary = plan.primary is not None and plan.primary.holds(run)
        return -run.config.steps, not is_primary, run.config.seed

    return sorted((run for run in plan.runs if _is_pending(plan, out, run)), key=order)


def _is_pending(plan: Plan, out: Path, run: PlannedRun) -> bool:
    directory = RunDirectory(run_directory(out, run))
    if directory.status is not RunStatus.DONE:
        return True
    return plan.contexts is not None and bool(
        missing(directory, plan.contexts.of(run.name))
    )


def _outcomes(
    plan: Plan, out: Path, execution: Execution
) -> Generator[Outcome, None, None]:
    """Executes the rest of the plan and yields each outcome as it arrives; closing the generator stops all jobs."""
    # Other machines start in other folders, so jobs get absolute paths; outcomes name the paths that were typed.
    runs = {str(run_directory(out, run).absolute()): run for run in pending(plan, out)}
    workers = (
        execution.workers
        if execution.workers is not None
        else default_jobs(execution.executor)
    )
    # Each round starts what is left; the rounds end when every run has a result, whoever computed it.
    while runs:
        jobs = [
            Job(
                run.config.to_dict(),
                directory,
                execution.command,
                plan.contexts and plan.contexts.of(run.name),
            )
            for directory, run in runs.items()
        ]
        with closing(
            outcomes(jobs, workers, execution.executor, out.absolute())
        ) as ended:
            for outcome in ended:
                if outcome.busy:
                    # Looked at again below, until the process that trains it has
                    # finished or died.
                    continue
                run = runs.pop(outcome.directory)
                error = (
                    (outcome.error or _invisible(plan, out, run))
                    if _is_pending(plan, out, run)
                    else ""
                )
                yield Outcome(str(run_directory(out, run)), error)
        if runs:
            time.sleep(BUSY_WAIT)
        for directory, run in list(runs.items()):
            # Another process has finished it.
            if not _is_pending(plan, out, run):
                del runs[directory]
                yield Outcome(str(run_directory(out, run)))


def _invisible(plan: Plan, out: Path, run: PlannedRun) -> str:
    """Returns why a run that was computed has no results here; "" if they are here."""
    deadline = time.monotonic() + NETWORK_WAIT
    while _is_pending(plan, out, run):
        if time.monotonic() > deadline:
            return (
                "finished on another machine, but its files are not here, because --out is not a folder that this "
                "machine and the others share; choose such a folder"
            )
        time.sleep(0.2)
    return ""


def _study(out: Path, plan: Plan, command: str) -> Json:
    """Returns the study.json of the plan, joined with the one in the directory."""
    new = study_of(plan, command)
    # A directory of runs without study.json may be anything, so nothing is added to it.
    if (out / "study.json").exists():
        return joined_study(out, read_study(out), new)
    if out.exists() and any(not p.name.startswith("lock") for p in out.iterdir()):
        raise RunDirectoryError(
            f"{out} is not empty and has no study.json, so it is not a study directory. "
            "Choose another directory; nothing was changed."
        )
    return new


# table.csv has one row per run in the order of the grid; equal results always produce the same bytes.


def rows(out: Path, entries: Sequence[Json]) -> list[Json]:
    """Returns one dict per run, with the keys of `columns`; a run without a result has only its name and status."""
    table = [
        _row(RunDirectory(out / "runs" / entry["run_id"]), entry) for entry in entries
    ]
    names = columns(table)
    return [{name: row.get(name) for name in names} for row in table]


def columns(table: Iterable[Json]) -> list[str]:
    """Returns records.TABLE_COLUMNS, then the columns that the tasks of the runs add."""
    return list(
        dict.fromkeys([*TABLE_COLUMNS, *(name for row in table for name in row)])
    )


def _row(directory: RunDirectory, entry: Json) -> Json:
    blank = dict.fromkeys(TABLE_COLUMNS)
    named = {name: entry[name] for name in ("remedy", "lr", "seed", "run_id")}
    status = directory.status
    summary = directory.summary() if status is RunStatus.DONE else {}
    optional = {"mix": entry["role"]} if any("/" in name for name in summary) else {}
    optional |= {"part": entry["part"]} if entry.get("part") else {}
    optional |= {"primary": entry["primary"]} if "primary" in entry else {}
    return {**blank, **optional, **summary, **named, "status": str(status)}


def write_table(out: Path, table: Sequence[Json], names: Sequence[str] = ()) -> None:
    """Writes table.csv atomically, by default with all columns of the table.

    Floats are written with all their digits, booleans as true or false, and unknown values as empty cells.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    names = list(names) or columns(table)
    writer.writerow(names)
    writer.writerows([_cell(row[name]) for name in names] for row in table)
    write_text(out / "table.csv", text.getvalue())


def _cell(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
