"""Reads studies and single runs of the lab. Nothing on disk is changed."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from qkeel.errors import InvalidTypeError, RunDirectoryError, unknown
from qkeel.metrics import Row, collapsed
from qkeel.records import RunDirectory, RunStatus
from qkeel.records.disk import refuse_path
from qkeel.records.file_formats import read_object

BASELINE = "none"
# The role of a run; every other role names a part of a study, like a mix of modalities.
GRID = "grid"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One run.

    remedy: the remedy, or the form of attention in a study that compares forms. source: the name of the directory that
    was given. row: the run's row of the table, or None if it has not finished. long: the lines of
    extrapolation.jsonl.
    """

    path: Path
    source: str
    remedy: str
    lr: float
    seed: int
    role: str = GRID
    status: RunStatus
    row: Row | None = None
    metrics: Sequence[Row] = ()
    long: Sequence[Row] = ()
    config: Row = dataclasses.field(default_factory=dict)
    env: Row = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StudyData:
    """The runs on a page.

    name: the name of the study, empty if there is no study.json. baseline: the remedy with which the others are
    compared. primary: the comparison that was named before the runs, see `lab.plan.Primary`.
    """

    name: str
    command: str
    remedies: Sequence[str]
    runs: Sequence[RunData]
    baseline: str = BASELINE
    primary: Row | None = None

    @property
    def finished(self) -> list[RunData]:
        """The finished runs."""
        return [run for run in self.runs if run.row is not None]

    def lrs(self) -> list[float]:
        """Returns the learning rates of the finished runs."""
        return sorted({run.lr for run in self.finished})

    def parts(self) -> dict[str, StudyData]:
        """Returns the parts of the study by name, such as mixes of modalities; a study without parts is its own."""
        roles = dict.fromkeys(run.role for run in self.runs)
        if len(roles) < 2 and (not roles or GRID in roles):
            return {"": self}
        return {
            role: dataclasses.replace(
                self, runs=[run for run in self.runs if run.role == role], primary=None
            )
            for role in roles
        }

    def loss_unit(self) -> str:
        """Returns the unit of the corpus, nats/byte or nats/token; nats/token if the runs have different units."""
        corpora = [run.env.get("corpus") for run in self.runs]
        units = {
            corpus["loss_unit"]
            for corpus in corpora
            if isinstance(corpus, dict) and corpus.get("loss_unit")
        }
        return f"nats/{units.pop()}" if len(units) == 1 else "nats/token"


def read_study(
    paths: str | Path | Iterable[str | Path], baseline: str = BASELINE
) -> StudyData:
    """Reads a study directory, a run directory, or several of either.

    Args:
        paths: the directories.
        baseline: the remedy with which the other remedies are compared.

    Raises:
        RunDirectoryError: a path is neither a study nor a run, or a file in it is damaged.
        UnknownNameError: the baseline is not "none" and does not occur in any run.
    """
    studies = [_open(path) for path in as_paths(paths)]
    by_path = {run.path.resolve(): run for study in studies for run in study.runs}
    runs = _distinct(list(by_path.values()))
    used = dict.fromkeys(run.remedy for run in runs)
    stated = [
        remedy for study in studies for remedy in study.remedies if remedy in used
    ]
    remedies = list(dict.fromkeys([*stated, *used]))
    if baseline not in remedies:
        if baseline != BASELINE:
            raise unknown("baseline", baseline, remedies)
        # Forms of attention are compared with the first.
        baseline = remedies[0] if remedies else BASELINE
    names = dict.fromkeys(study.name for study in studies if study.name)
    commands = dict.fromkeys(study.command for study in studies if study.command)
    return StudyData(
        name=" + ".join(names),
        command="\n".join(commands),
        remedies=sorted(remedies, key=lambda remedy: remedy != baseline),
        runs=runs,
        baseline=baseline,
        primary=studies[0].primary if len(studies) == 1 else None,
    )


def as_paths(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Returns one path or several as a list without duplicates."""
    several = [paths] if isinstance(paths, (str, Path)) else list(paths)
    for path in several:
        if not isinstance(path, (str, Path)):
            raise InvalidTypeError(
                f"expected a path or a list of paths, got an item of type {type(path).__name__}; "
                "give the directory of a study or of a run"
            )
    if not several:
        raise RunDirectoryError(
            "expected at least one study or run directory, got an empty list"
        )
    return list(dict.fromkeys(Path(path) for path in several))


def _open(path: Path) -> StudyData:
    file = path / "study.json"
    if file.exists():
        about = read_object(file)
        runs = []
        for planned in about["runs"]:
            folder = path / "runs" / refuse_path(planned["run_id"], str(file))
            runs.append(_run(RunDirectory(folder), planned, path.name))
        return StudyData(
            name=str(about.get("study") or path.name),
            command=str(about.get("command") or ""),
            remedies=[str(remedy) for remedy in about.get("remedies") or ()],
            runs=runs,
            primary=about.get("primary"),
        )
    directory = RunDirectory(path)
    if directory.status is RunStatus.MISSING:
        kind = "a directory with neither" if path.is_dir() else "no such directory"
        raise RunDirectoryError(
            f"cannot read {path}: expected the directory of a study or of a run, with study.json or config.json, "
            f"got {kind}. Give the directory that `qkeel study` or `qkeel run` printed; if it is a folder of runs, "
            "give each run."
        )
    config = directory.config()
    optim = config.get("optim")
    planned = {
        "lr": optim.get("lr") if isinstance(optim, dict) else None,
    }
    planned |= {name: config.get(name) for name in ("remedy", "seed")}
    missing = [name for name, value in planned.items() if value is None]
    if missing:
        raise RunDirectoryError(
            f"{path / 'config.json'} lacks {', '.join(missing)}; it was not written by qkeel, or it was damaged later. "
            "Restore it, or delete the directory and run again."
        )
    run = _run(directory, planned, path.name)
    return StudyData(name="", command="", remedies=[run.remedy], runs=[run])


def _run(directory: RunDirectory, planned: Row, source: str) -> RunData:
    status, path = directory.status, directory.path
    run = RunData(
        path=path,
        source=source,
        remedy=str(planned["remedy"]),
        lr=float(planned["lr"]),
        seed=int(planned["seed"]),
        role=str(planned.get("role") or GRID),
        status=status,
    )
    if status is RunStatus.MISSING:
        return run
    directory.check_complete()
    return dataclasses.replace(
        run,
        config=directory.config(),
        metrics=directory.metrics(),
        row=_row(directory.summary(), run) if status is RunStatus.DONE else None,
        env=directory.env() if (path / "env.json").exists() else {},
        long=directory.long_contexts(),
    )


def _row(summary: Row, run: RunData) -> Row:
    """Returns the run's table row, with names from the study, missing values as NaN and `collapsed` filled in."""
    row = {**summary, "remedy": run.remedy, "lr": run.lr, "seed": run.seed}
    for name in ("val_loss", "max_logit", "end_entropy", "init_loss"):
        row[name] = as_number(row.get(name))
    if not isinstance(row.get("collapsed"), bool):
        # Without the loss at the start, a loss that is NaN and the entropy alone tell a collapse.
        start = math.inf if math.isnan(row["init_loss"]) else row["init_loss"]
        row["collapsed"] = collapsed(row["end_entropy"], row["val_loss"], start)
    return row


def as_number(value: object) -> float:
    """Returns a recorded number as a float; NaN for null, text and booleans."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value)


def _distinct(runs: Sequence[RunData]) -> list[RunData]:
    """Labels runs with equal remedy, LR and seed by the directory that was given, or else by their own."""
    named = list(runs)
    for labels in ([run.source for run in runs], [str(run.path) for run in runs]):
        times = Counter((run.remedy, run.lr, run.seed, run.role) for run in named)
        for i, (run, label) in enumerate(zip(named, labels)):
            if times[run.remedy, run.lr, run.seed, run.role] > 1:
                remedy = f"{run.remedy} ({label})"
                row = None if run.row is None else {**run.row, "remedy": remedy}
                named[i] = dataclasses.replace(run, remedy=remedy, row=row)
    return named
