"""A study: a plan executed in one directory, which it goes on with, extends, or refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import final

from qkeel.errors import RunDirectoryError
from qkeel.lab.config import RunConfig
from qkeel.lab.config_fields import Json
from qkeel.lab.execution.results_table import rows, write_table
from qkeel.lab.execution.workers import Job, Outcome, Shard, execute
from qkeel.lab.lengths.longer_texts import check_methods, long_rows, missing
from qkeel.lab.model.build_model import check, resolve
from qkeel.lab.plan import Grid, LongContexts, Plan, PlannedRun
from qkeel.lab.stack.what_runs_share import How
from qkeel.lab.studies import find_study
from qkeel.lab.tasks.text import load_task
from qkeel.records import EXTRAPOLATION_COLUMNS, RunDirectory, RunStatus, read_json, write_json
from qkeel.records.file_fields import check_parts
from qkeel.records.files import remove_leftovers
from qkeel.records.regular_files import refuse_path
from qkeel.records.rundir import differences, locked


def _ignore(outcome: Outcome) -> None:
    return


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The options of a study's execution; nothing here changes a number."""

    workers: int = 1
    """Processes at once, each with a run or a stack of runs; 1 does them in this one."""
    stack: How = "off"
    """Runs that differ in rate and seed only train as one model: a number of them, or where models are small."""
    shard: Shard = dataclasses.field(default_factory=Shard)
    """Which part of the runs is done here."""
    command: str = ""
    """What the user typed, for the record."""
    on_outcome: Callable[[Outcome], None] = _ignore
    """Called as each run ends."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """The result of a study: tables of all runs of the directory and of its long contexts, and the new failures."""

    path: Path
    table: Sequence[Json]
    long_table: Sequence[Json]
    failures: Sequence[Outcome]


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
    """Runs the study `name` over a grid in the directory `out`; finished runs are kept, killed ones go on.

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

    Raises: RunDirectoryError if the directory is in use, holds another study, or cannot be written.
    """
    out = Path(out)
    shard = execution.shard
    part = "" if shard.count == 1 else f".{shard.index}-of-{shard.count}"
    with locked(out / f"lock{part}", f"{out} is in use by another study"):
        with _alone(out):
            about = _merge(out, plan, execution.command)
            write_json(out / "study.json", about)
        failures: list[Outcome] = []
        try:
            with closing(execute(_jobs(plan, out, execution), execution.workers, execution.stack)) as outcomes:
                for outcome in outcomes:
                    execution.on_outcome(outcome)
                    if outcome.error:
                        failures.append(outcome)
        finally:
            with _alone(out):
                about = read_study(out)
                table = rows(out, about["runs"])
                long_table = long_rows(out, about) if plan.contexts else []
                if plan.contexts:
                    write_table(out, long_table, list(EXTRAPOLATION_COLUMNS))
                else:
                    write_table(out, table)
    return StudyResult(path=out, table=table, long_table=long_table, failures=failures)


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
    """The shard's runs that are not done, the longest first, so that no worker ends long after the others."""
    mine = list(plan.runs)[shard.index - 1 :: shard.count]
    left = []
    for run in mine:
        place = RunDirectory(run_directory(out, run))
        if place.status is not RunStatus.DONE or (plan.contexts and missing(place, plan.contexts.of(run.name))):
            left.append(run)
    return sorted(left, key=lambda run: -run.config.steps)


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


def _merge(out: Path, plan: Plan, command: str) -> Json:
    """The study.json of the plan and of what is in the directory already."""
    entries = [run.entry() for run in plan.runs]
    grid = plan.grid
    axes = {name: list(values) for name, values in dataclasses.asdict(grid).items()}
    bases, commands = plan.bases(), [command]
    contexts = {} if plan.contexts is None else {"contexts": json.loads(json.dumps(dataclasses.asdict(plan.contexts)))}
    if (out / "study.json").exists():
        old = read_study(out)
        _same_study(out, old, plan)
        known = {entry["run_id"] for entry in old["runs"]}
        new = [entry for entry in entries if entry["run_id"] not in known]
        commands = [*old["command"].splitlines(), *([command] if new else [])]
        entries = [*old["runs"], *new]
        axes = {name: list(dict.fromkeys([*(old.get(name) or ()), *values])) for name, values in axes.items()}
        axes = {name: sorted(values) if name in ("lrs", "seeds") else values for name, values in axes.items()}
        bases = {**old["base"], **bases}
        contexts = {name: _joined(old.get(name), now) for name, now in contexts.items()}
    elif out.exists() and any(not p.name.startswith("lock") for p in out.iterdir()):
        raise RunDirectoryError(
            f"{out} is not empty and holds no study.json, so it is no study's directory. "
            "Choose another directory; nothing was changed."
        )
    return {
        "study": plan.name,
        "command": "\n".join(dict.fromkeys(filter(None, commands))),
        **axes,
        **contexts,
        "runs": _in_order(entries, axes["remedies"], list(bases)),
        "base": bases,
    }


def read_study(out: Path) -> Json:
    """The study.json of a directory, every field there and of its type; see records.file_fields.

    Raises: RunDirectoryError for a file that is damaged, or names directories that are not the study's.
    """
    file = out / "study.json"
    about = check_parts(read_json(file), "study.json", str(file))
    lost = [name for name in ("study", "base", "remedies", "lrs", "seeds", "command") if about.get(name) is None]
    if lost:
        raise RunDirectoryError(
            f"{file} lacks {', '.join(lost)}; it was not written by qkeel or was damaged later. "
            "Restore it, or choose another directory; nothing was changed."
        )
    for entry in about["runs"]:
        refuse_path(entry["run_id"], str(file))
        if entry.get("role") not in about["base"]:
            raise RunDirectoryError(
                f"{file} has no base of the role {entry.get('role')!r} of {entry['run_id']}; it was damaged. "
                "Restore it, or choose another directory; nothing was changed."
            )
    return about


def _joined(old: Json | None, new: Json) -> Json:
    """Methods and lengths of both; how many sequences they are measured on stays as it was."""
    if old is None:
        return dict(new)
    for name, what in (
        ("sequences", "measures on {} held-out sequences"),
        ("continue_steps", "trains on for {} steps"),
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


def _same_study(out: Path, old: Json, plan: Plan) -> None:
    name, bases = old["study"], old["base"]
    changed = [] if name == plan.name else [f"study: {name}, not {plan.name}"]
    for role, base in plan.bases().items():
        # As JSON reads it back: a float that is whole stays a float, a tuple becomes a list.
        changed += differences(bases.get(role, base), json.loads(json.dumps(base)))
    if changed:
        raise RunDirectoryError(
            f"{out} holds a study of another configuration (different: {', '.join(dict.fromkeys(changed))}). A study "
            "takes more remedies, rates or seeds, nothing else. Choose another directory; nothing was changed."
        )


def _in_order(entries: Sequence[Json], remedies: Sequence[str], roles: Sequence[str]) -> list[Json]:
    place = {remedy: i for i, remedy in enumerate(remedies)}

    def key(entry: Json) -> tuple[int, int, float, int]:
        remedy = place.get(entry["remedy"], len(place))
        return roles.index(entry["role"]), remedy, entry["lr"], entry["seed"]

    return sorted(entries, key=key)
