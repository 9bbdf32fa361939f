"""Executes studies: progress, remaining runs, result tables, and merging of studies."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import final

import numpy as np

from qkeel.errors import DamagedFileError, RunDirectoryError, reported
from qkeel.lab.build_run import check, resolve, threads
from qkeel.lab.checkpoint import RunState, identity, refuse_mixture
from qkeel.lab.config import RunConfig
from qkeel.lab.executors import Job, Outcome, Shard, executor, units_of
from qkeel.lab.lengths import check_methods, long_rows, missing
from qkeel.lab.plan import (
    FOLDER,
    MOVED,
    UNMOVED,
    Grid,
    LongContexts,
    Plan,
    PlannedRun,
    check_choices,
    tuned_plan,
    tuning_plan,
)
from qkeel.lab.stack_models import StackSize
from qkeel.lab.studies import find_study
from qkeel.lab.tasks import load_task
from qkeel.lab.training import choose_arithmetic, train_step
from qkeel.metrics import distance, divergence_rate
from qkeel.options import Json
from qkeel.records import EXTRAPOLATION_COLUMNS, TABLE_COLUMNS, RunDirectory, RunStatus, write_json, write_text
from qkeel.records.disk import (
    make_directory,
    move_directory,
    refuse_path,
    remove_leftovers,
    replace_file,
)
from qkeel.records.file_formats import parse_json, read_object
from qkeel.records.run_directory import differences, locked

# Progress of a study, read from its files, and an estimate of its duration from a few timed steps.

_WARM, _TIMED = 3, 10  # steps


def last_step(directory: Path) -> int:
    """Returns the last recorded step of a run, or 0 if there is none; reads only the end of the file."""
    try:
        path = directory / "metrics.jsonl"
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4096))
            line = file.read().split(b"\n")[-2] + b"\n"
        return int(parse_json(line)["step"])
    except (OSError, IndexError, ValueError, KeyError, TypeError):
        return 0


def estimate_seconds(runs: Sequence[PlannedRun], workers: int) -> float:
    """Estimates the duration in seconds of the runs with this many workers, by timing a few steps of the first run.

    Raises: any error that these steps raise.
    """
    if not runs or workers < 1:
        return 0.0
    steps = sum(run.config.steps for run in runs)
    return steps * _seconds_per_step(runs[0].config) / min(workers, len(runs))


def _seconds_per_step(config: RunConfig) -> float:
    config = resolve(config)
    with threads(config.threads):
        arithmetic = choose_arithmetic([RunState(config)])
        for step in range(_WARM):
            train_step(arithmetic, [step])
        arithmetic.probe()  # reads a result, so the device is idle when timing starts
        start = time.perf_counter()
        for step in range(_TIMED):
            train_step(arithmetic, [step])
        arithmetic.probe()  # once per ten steps, the default cadence of a run
        return (time.perf_counter() - start) / _TIMED


# Execution of a plan in a directory, which may already contain a part of the same study.


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Execution options of a study; none of them changes a result."""

    #: number of processes, each training one run or one stack of runs; 1 uses this process, None asks the executor
    workers: int | None = 1
    #: local, ray, dask or slurm, with options as in "slurm:partition=gpu,time=60"; see `lab.executors`
    executor: str = "local"
    #: how many runs that differ only in seed, steps and rates to train as one model: a number, "auto" or "off"
    stack: StackSize = "off"
    shard: Shard = dataclasses.field(default_factory=Shard)  #: the part of the runs to execute here
    command: str = ""  #: the user's command line, which is recorded
    on_outcome: Callable[[Outcome], None] = lambda outcome: None  #: called when a run ends


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
    name: str, base: RunConfig | None = None, grid: Grid | None = None, contexts: LongContexts | None = None
) -> Plan:
    """Plans the study with this name, and checks that every remedy, the model and the corpus can be used.

    >>> [run.name for run in make_plan("lr", grid=Grid(remedies=["none"], lrs=[0.01, 0.03], seeds=[0])).runs]
    ['none', 'none']

    Args:
        name: a key of lab.studies.STUDIES.
        base: the configuration of the runs; each study has a default.
        grid: the axes; each study has a default.
        contexts: the long contexts of the extrapolation study, if they differ from its default.

    Raises:
        QkeelError: a name is unknown, a value is invalid, a remedy cannot be applied or the data is missing. In that
            case, nothing has been written.
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
        jobs: the number of processes; with small models, several runs are trained together as one. `run_plan` has more
            options.
        contexts: the tests of the trained weights in the study "extrapolation", where remedies are attention forms.
    """
    plan = make_plan(name, base, Grid(remedies=remedies, lrs=lrs, seeds=seeds), contexts)
    return run_plan(plan, out, Execution(workers=jobs, stack="auto"))


def run_plan(plan: Plan, out: str | Path, execution: Execution) -> StudyResult:
    """Executes the runs of the plan that have not finished yet, then writes table.csv.

    >>> grid = Grid(remedies=["none"], lrs=[0.01], seeds=[0])
    >>> len(run_plan(make_plan("lr", RunConfig(steps=1, eval_sequences=1), grid), "b", Execution()).failures)
    0

    Raises:
        RunDirectoryError: the directory is in use, contains another study or runs that were computed differently, or
            cannot be written to.
    """
    out = Path(out)
    if plan.grid.tuning_seeds and not plan.tuned:
        plan = tune(plan, out, execution)
    shard = execution.shard
    part = "" if shard.count == 1 else f".{shard.index}-of-{shard.count}"
    with locked(out / f"lock{part}", f"{out} is in use by another study"):
        with _alone(out):
            if execution.executor == "local":  # otherwise the computing machines check this
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
    """Executes the remaining tuning runs, and returns the plan with the best learning rate of each remedy.

    Raises:
        RunDirectoryError: a tuning run has not finished, or the directory contains another study.
    """
    return tuned_plan(plan, run_plan(tuning_plan(plan), out / FOLDER, execution).table)


def write_tables(out: Path) -> tuple[list[Json], list[Json]]:
    """Writes the table.csv of a study's directory, and returns the rows of its runs and of its long contexts."""
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
    """Briefly locks study.json and table.csv, which the shards of a study share."""
    with locked(out / "lock.files", f"{out / 'study.json'} is in use by another study", wait=60.0):
        remove_leftovers(out)
        yield


def run_directory(out: Path, run: PlannedRun) -> Path:
    """Returns the directory of a run of a study."""
    return out / "runs" / run.config.run_id


def pending(plan: Plan, out: Path, shard: Shard) -> list[PlannedRun]:
    """Returns the shard's unfinished or damaged runs, longest first, so that workers finish at about the same time."""
    mine = list(plan.runs)[shard.index - 1 :: shard.count]
    left = []
    for run in mine:
        place = RunDirectory(run_directory(out, run))
        done = place.status is RunStatus.DONE and not place.damage()
        if not done or (plan.contexts and missing(place, plan.contexts.of(run.name))):
            left.append(run)
    return sorted(left, key=lambda run: -run.config.steps)


def _outcomes(plan: Plan, out: Path, execution: Execution) -> Generator[Outcome, None, None]:
    """Executes the rest of the plan and yields each outcome as it arrives; closing the generator stops all jobs."""
    place = executor(execution.executor)
    # Other machines start in other folders, so jobs get absolute paths; outcomes name the paths that were typed.
    typed = {str(run_directory(out, run).absolute()): run for run in pending(plan, out, execution.shard)}
    if not typed:
        return
    jobs = [
        Job(run.config.to_dict(), directory, execution.command, plan.contexts and plan.contexts.of(run.name))
        for directory, run in typed.items()
    ]
    most = place.capacity()  # always called, because it fails early if a cluster cannot be reached
    workers = most if execution.workers is None else execution.workers
    with closing(place.outcomes(units_of(jobs, workers, execution.stack), workers, out.absolute())) as found:
        for outcomes in found:
            for outcome in outcomes:
                yield dataclasses.replace(outcome, directory=str(run_directory(out, typed[outcome.directory])))


def _study(out: Path, plan: Plan, command: str) -> Json:
    """Returns the study.json of the plan, joined with the one in the directory."""
    new = study_of(plan, command)
    if (out / "study.json").exists():
        return joined_study(out, read_study(out), new)
    if out.exists() and any(not p.name.startswith("lock") and p.name != FOLDER for p in out.iterdir()):
        raise RunDirectoryError(
            f"{out} is not empty and has no study.json, so it is not a study directory. "
            "Choose another directory; nothing was changed."
        )
    return {**new, "runs": in_order(new["runs"], new["remedies"], list(new["base"]))}


# Merging parts of one study from several directories.

_OF_THE_MACHINE = ("cpu_seconds", "tokens_per_second", "mfu")  # may differ between runs with the same results


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MergedStudy:
    """A merged study: its tables and the number of finished runs."""

    path: Path  #: the merged directory
    table: Sequence[Json]  #: one row per finished run
    long_table: Sequence[Json]  #: one row per finished run, post-hoc method and length
    done: int  #: number of finished runs


def merge_studies(sources: Sequence[str | Path], out: str | Path) -> MergedStudy:
    """Merges directories of the same study, created on several machines, into a new directory without changing them.

    If a run appears more than once, the finished copy is used, or else the copy that has progressed furthest.
    Unfinished runs are copied too, and the study's own command with `out` continues them. `out` is written atomically:
    it is either complete or absent.

    >>> from qkeel.lab import RunConfig, study
    >>> base = RunConfig(steps=1, eval_sequences=1)
    >>> for seed in (0, 1):
    ...     _ = study("lr", remedies=["none"], lrs=[0.01], seeds=[seed], out=f"part-{seed}", base=base)
    >>> merge_studies(["part-0", "part-1"], "whole").done
    2

    Raises:
        RunDirectoryError: a source contains no study or a different study, was computed differently or on a different
            text, has different results for a run that also finished in another source, or is in use; or `out` is not
            empty.
    """
    places = [Path(source) for source in sources]
    out = Path(out)
    _check_places(places, out)
    about = read_study(places[0])
    for place in places[1:]:
        about = joined_study(place, about, read_study(place))
    begun = [file for place in places for file in sorted(place.glob("runs/*/env.json"))]
    for place in places[1:] if begun else ():
        refuse_mixture(place / "runs", RunDirectory(begun[0].parent).env())
    chosen = [_choice(places, entry["run_id"]) for entry in about["runs"]]
    staged = out.with_name(f".{out.name}.part")
    shutil.rmtree(staged, ignore_errors=True)  # left by a merge that was killed
    advice = ". Choose a writable directory on a disk with free space; existing files were not changed."
    try:
        with reported(f"cannot merge into {out}", advice):
            for run in filter(None, chosen):
                _copy(run, staged / "runs" / run.path.name)
            make_directory(staged)
            write_json(staged / "study.json", about)
            table, long_table = write_tables(staged)
            move_directory(staged, out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    done = sum(run is not None and run.status is RunStatus.DONE for run in chosen)
    return MergedStudy(path=out, table=table, long_table=long_table, done=done)


def _check_places(places: Sequence[Path], out: Path) -> None:
    if not places:
        raise RunDirectoryError("expected the directories of one study to merge, got none")
    seen: set[str] = set()
    for place in places:
        if os.path.realpath(place) in seen:
            raise RunDirectoryError(f"{place} is given twice; give each directory once")
        seen.add(os.path.realpath(place))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunDirectoryError(
            f"cannot merge into {out}: it is not an empty directory. Give a new directory; nothing was changed."
        )


def _choice(places: Sequence[Path], run_id: str) -> RunDirectory | None:
    """Returns the directory from which to copy a run; None if the run was not started in any source."""
    runs = [RunDirectory(place / "runs" / run_id) for place in places]
    done = [run for run in runs if run.status is RunStatus.DONE]
    for other in done[1:]:
        _check_same_results(done[0], other)
    # Long-context results are added after a run is done, so one of two equal runs may have more of them.
    furthest = max(done, key=lambda run: len(run.long_contexts()), default=None)
    begun = [run for run in runs if run.status is not RunStatus.MISSING]
    return furthest or max(begun, key=lambda run: last_step(run.path), default=None)


def _check_same_results(one: RunDirectory, other: RunDirectory) -> None:
    """Raises RunDirectoryError if two finished copies of a run differ in any bit of their results."""

    def results(run: RunDirectory) -> dict[str, str]:
        lines = [(f" at step {line['step']}", line) for line in run.metrics()]
        return _as_text([*lines, (" of the summary", run.summary())])

    def of_long_texts(run: RunDirectory) -> dict[str, str]:
        return _as_text([(f" with {x['posthoc']} at length {x['test_length']}", x) for x in run.long_contexts()])

    first, second = results(one), results(other)
    unlike = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    texts = of_long_texts(one), of_long_texts(other)
    unlike += [name for name in texts[0] if name in texts[1] and texts[0][name] != texts[1][name]]
    if unlike:
        raise RunDirectoryError(
            f"{one.path} and {other.path} are the same run with different results; the first difference is "
            f"{unlike[0]}. The machines, versions or kernels differed, so the directories are not parts of one "
            "study. Leave one of "
            "the directories out; nothing was changed."
        )


def _as_text(lines: Sequence[tuple[str, Json]]) -> dict[str, str]:
    # As text, because NaN is not equal to itself.
    return {name + at: repr(x) for at, line in lines for name, x in line.items() if name not in _OF_THE_MACHINE}


def _copy(run: RunDirectory, to: Path) -> None:
    """Copies the files of a run; an unfinished run is locked while it is copied, so that nothing writes to it."""
    held = locked(run.path / "lock", f"{run.path} is in use by another process")
    if run.status is RunStatus.DONE and (damage := run.damage()):
        raise DamagedFileError(f"{damage} Run the study that contains it again, then merge.")
    with nullcontext() if run.status is RunStatus.DONE else held:
        for file in sorted(run.path.rglob("*")):
            if file.name == "lock" or file.name.endswith(".part") or (file.is_dir() and not file.is_symlink()):
                continue
            place = to / file.relative_to(run.path)
            make_directory(place.parent)
            replace_file(place, file.read_bytes())


# table.csv has one row per run in the order of the grid; equal results always produce the same bytes.


def rows(out: Path, entries: Sequence[Json]) -> list[Json]:
    """Returns one dict per run, with the keys of `columns`; a run without a result has only its name and status."""
    table = [_row(RunDirectory(out / "runs" / entry["run_id"]), entry) for entry in entries]
    names = columns(table)
    return [{name: row.get(name) for name in names} for row in table]


def columns(table: Iterable[Json]) -> list[str]:
    """Returns records.TABLE_COLUMNS, then the columns that the tasks of the runs add."""
    return list(dict.fromkeys([*TABLE_COLUMNS, *(name for row in table for name in row)]))


def _row(directory: RunDirectory, entry: Json) -> Json:
    blank = dict.fromkeys(TABLE_COLUMNS)
    named = {name: entry[name] for name in ("remedy", "lr", "seed", "run_id")}
    status = directory.status
    results = directory.summary() if status is RunStatus.DONE else {}
    more = {"mix": entry["role"]} if any("/" in name for name in results) else {}
    more |= {"part": entry["part"]} if entry.get("part") else {}
    more |= {"primary": entry["primary"]} if "primary" in entry else {}
    return {**blank, **more, **results, **named, "status": str(status)}


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


# study.json, the record of a study.

_AXES = tuple(field.name for field in dataclasses.fields(Grid))


def study_of(plan: Plan, command: str) -> Json:
    """Returns the study.json of a plan."""
    named = plan.primary
    about = {
        "study": plan.name,
        "command": command,
        **dataclasses.asdict(plan.grid),
        "contexts": plan.contexts and dataclasses.asdict(plan.contexts),
        "tuned": list(plan.tuned) or None,
        "primary": named and dataclasses.asdict(named),
        "runs": [run.entry() | ({"primary": named.holds(run)} if named else {}) for run in plan.runs],
        "base": plan.bases(),
    }
    # A round trip through JSON turns tuples into lists, so that the result compares equal to a file's contents.
    return json.loads(json.dumps(_known(about)))


def _known(about: Json) -> Json:
    return {name: value for name, value in about.items() if value is not None}


def joined_study(out: Path, old: Json, new: Json) -> Json:
    """Joins `old`, the study.json of the directory `out`, with another part of the same study; each run appears once.

    Raises:
        RunDirectoryError: the two parts differ in more than remedies, rates, seeds and other axes.
    """
    _check_same_study(out, old, new)
    known = {entry["run_id"] for entry in old["runs"]}
    more = [entry for entry in new["runs"] if entry["run_id"] not in known]
    commands = [*old["command"].splitlines(), *(new["command"].splitlines() if more else [])]
    axes = {name: list(dict.fromkeys([*(old.get(name) or ()), *(new.get(name) or ())])) for name in _AXES}
    axes = {name: sorted(values) if name in ("lrs", "seeds") else values for name, values in axes.items()}
    bases = {**old["base"], **new["base"]}
    about = {
        "study": new["study"],
        "command": "\n".join(dict.fromkeys(filter(None, commands))),
        **axes,
        "contexts": _joined_contexts(old.get("contexts"), new["contexts"]) if "contexts" in new else None,
        "tuned": _joined_choices(old, new, out) if "tuned" in new else None,
        "primary": new.get("primary"),
        "runs": in_order([*old["runs"], *more], axes["remedies"], list(bases)),
        "base": bases,
    }
    return _known(about)


def _joined_choices(old: Json, new: Json, out: Path) -> list[Json]:
    """Returns the chosen rates of both parts; the rates of `new` take precedence."""
    before = old.get("tuned", [])
    check_choices(before, new["tuned"], out)
    both = {(choice["role"], choice["remedy"]): choice for choice in [*before, *new["tuned"]]}
    return list(both.values())


def read_study(out: Path) -> Json:
    """Reads the study.json of a directory.

    Raises:
        RunDirectoryError: the file is damaged, or names directories outside the study.
    """
    file = out / "study.json"
    about = read_object(file, "study", "base", "remedies", "lrs", "seeds", "command", "runs")
    for entry in about["runs"]:
        refuse_path(entry["run_id"], str(file))
        if entry.get("role") not in about["base"]:
            raise RunDirectoryError(
                f"{file} has no base for the role {entry.get('role')!r} of {entry['run_id']}; it was damaged. "
                "Restore it, or choose another directory; nothing was changed."
            )
    return about


def _joined_contexts(old: Json | None, new: Json) -> Json:
    """Joins the methods and lengths; the numbers of sequences and steps must be equal."""
    if old is None:
        return dict(new)
    for name, what in (
        ("sequences", "measures on {} held-out sequences"),
        ("continue_steps", "continues training for {} steps"),
    ):
        if old[name] != new[name]:
            raise RunDirectoryError(
                f"this study {what.format(old[name])}, not {new[name]}; choose another directory; nothing was changed."
            )
    return {
        **new,
        "posthoc": list(dict.fromkeys([*old["posthoc"], *new["posthoc"]])),
        "test_lengths": sorted({*old["test_lengths"], *new["test_lengths"]}),
    }


def _check_same_study(out: Path, old: Json, new: Json) -> None:
    changed = [] if old["study"] == new["study"] else [f"study: {old['study']}, not {new['study']}"]
    if ("tuned" in old) != ("tuned" in new):
        changed.append("tune: whether each remedy is compared at its own rate")
    if old.get("primary") != new.get("primary"):
        changed.append("primary: the primary comparison of the study")
    for role, base in new["base"].items():
        changed += differences(old["base"].get(role, base), base)
    if changed:
        raise RunDirectoryError(
            f"{out} contains a study with a different configuration (these differ: "
            f"{', '.join(dict.fromkeys(changed))}). Only remedies, rates and seeds can be added to a study. Choose "
            "another directory; nothing was changed."
        )


def in_order(entries: Sequence[Json], remedies: Sequence[str], roles: Sequence[str]) -> list[Json]:
    """Sorts the runs of a study by role, remedy, rate and seed, the order of its table."""
    place = {remedy: i for i, remedy in enumerate(remedies)}

    def key(entry: Json) -> tuple[int, int, float, int]:
        remedy = place.get(entry["remedy"], len(place))
        return roles.index(entry["role"]), remedy, entry["lr"], entry["seed"]

    return sorted(entries, key=key)


# chaos.json: how far the two runs of each pair diverged, and how fast.

_LOGITS = ("max_logit", "min_logit")


def write_chaos(out: Path, about: Json) -> None:
    """Writes chaos.json if the study has pairs: their common configuration and one entry per finished pair.

    Pairs of a study with parts, e.g. several widths, have no common configuration; instead, each entry names its part.
    The distance of a pair is the root mean square difference of the largest and smallest logit of every head on the
    probe.
    """
    if not any(role.partition(", ")[0] == MOVED for role in about["base"]):
        return
    runs = {(e["role"], e["remedy"], e["lr"], e["seed"]): out / "runs" / e["run_id"] for e in about["runs"]}
    pairs = []
    for (role, *key), place in runs.items():
        own, _, part = role.partition(", ")
        other = runs.get((f"{MOVED}, {part}" if part else MOVED, *key))
        if own == UNMOVED and other is not None:
            both = RunDirectory(place), RunDirectory(other)
            if all(run.status is RunStatus.DONE for run in both):
                named = {**({"part": part} if part else {}), **dict(zip(("remedy", "lr", "seed"), key))}
                pairs.append({**named, **_parted(both)})
    write_json(out / "chaos.json", {"base": about["base"].get(UNMOVED, {}), "pairs": pairs})


def _parted(both: Sequence[RunDirectory]) -> Json:
    heads = [run.heads() for run in both]
    steps = min((own.steps for own in heads), key=len)  # a run that diverges to NaN stops early
    courses = [np.stack([own.values[name][: len(steps)] for name in _LOGITS], axis=1) for own in heads]
    apart = distance(*courses)
    rate = divergence_rate(steps.tolist(), apart, distance(np.zeros_like(courses[0]), courses[0]))
    losses = [float(run.summary()["val_loss"]) for run in both]
    return {
        "loss_difference": abs(losses[1] - losses[0]),
        "logit_distance": float(apart[-1]),
        "exponent": None if math.isnan(rate) else rate,
    }
