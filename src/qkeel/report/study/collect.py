"""Reads the runs of studies into one table, with their names and times."""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from qkeel.errors import InvalidTypeError, RunDirectoryError, unknown
from qkeel.metrics import Row, collapsed
from qkeel.records import Heads, RunDirectory, RunStatus
from qkeel.records.disk import refuse_path
from qkeel.records.file_formats import read_object
from qkeel.records.run_directory import flat

# Runs are named by the settings in which their configurations and commands differ.

_MOST = 3  # largest number of settings in a name
_LEFT_OUT = frozenset({"crc32", "kind", "sites", "missed", "fields", "seed", "remedy", "versions", "step"})


def differences(settings: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns, for each of several runs, the settings that are not equal in all runs; "" if nothing differs.

    >>> differences([{"optim": {"name": "adamw", "momentum": 0.9}}, {"optim": {"name": "muon", "momentum": 0.9}}])
    ['name adamw', 'name muon']
    >>> differences([{"command": "train.py --lr 3e-2"}, {"command": "train.py --lr 3e-3 --compile"}])
    ['--lr 3e-2', '--compile, --lr 3e-3']
    >>> differences([{"watcher": "qkeel watch -- python t.py"}, {"watcher": "qkeel watch --apply lalr -- python t.py"}])
    ['', '--apply lalr']
    """
    each = [dict(_named(one)) for one in settings]
    names = sorted({name for one in each for name in one})
    apart = [name for name in names if len({one.get(name) for one in each}) > 1]
    named = [[f"{n.rpartition('.')[2]} {one[n]}".strip() for n in apart if one.get(n) is not None] for one in each]
    return [", ".join(own[:_MOST]) for own in named]


def _named(settings: Mapping[str, object]) -> Iterator[tuple[str, str | None]]:
    for name, value in flat(settings).items():
        if name in ("command", "watcher"):
            yield from _options(str(value))
        elif not _LEFT_OUT.intersection(name.split(".")):
            yield name, None if value is None else str(value)


def _options(command: str) -> Iterator[tuple[str, str]]:
    """Yields the options of a command line with their values."""
    try:
        words = shlex.split(command)
    except ValueError:
        return
    for word, after in zip(words, [*words[1:], ""]):
        if word.startswith("--") and word != "--":
            name, _, value = word.partition("=")
            if name not in ("--out", "--jobs"):
                yield name, value or ("" if after.startswith("-") else after)


# Modification times of the files of runs. For a copied directory, they may be the times at which it was copied.


def duration(seconds: float) -> str:
    """Formats a time span in a suitable unit.

    >>> duration(42.3), duration(200), duration(7_200), duration(200_000)
    ('42 s', '3.3 min', '2 h', '2.3 days')
    """
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


def written_times(*runs: Path) -> dict[str, str]:
    """Returns the times at which the first and the last file of the runs were written and the time between them, or {}
    if there are no files."""
    files = [file for run in runs for name in ("config.json", "metrics.jsonl") if (file := run / name).exists()]
    if not files:
        return {}
    times = [file.stat().st_mtime for file in files]
    first, last = (time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in (min(times), max(times)))
    between = "" if first == last else f" to {last}, in {duration(max(times) - min(times))}"
    return {"Files written": first + between}


# Reading run directories and studies. Nothing on disk is changed.

BASELINE = "none"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One run.

    source: the name of the directory that was given. row: the run's row of the table, or None if it has not finished.
    long: the run's lines of extrapolation.jsonl. remedy: the remedy, or the form of attention in studies that compare
    forms.
    """

    path: Path
    source: str
    run_id: str
    remedy: str
    lr: float
    seed: int
    role: str = "grid"
    status: RunStatus
    row: Row | None = None
    metrics: Sequence[Row] = ()
    heads: Heads | None = None
    long: Sequence[Row] = ()
    config: Row = dataclasses.field(default_factory=dict)
    env: Row = dataclasses.field(default_factory=dict)
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StudyData:
    """The runs on a page.

    name: the name of the study; empty if there is no study.json. tuned: the rates chosen for the remedies, as in
    study.json, if each remedy is compared at its own rate. chaos: the pairs in the study's chaos.json. baseline: the
    remedy with which the other remedies are compared. primary: the primary comparison; see `lab.plan.Primary`. beside:
    for a part of a study, the finished rows of each other part, whose comparisons are judged together with its own.
    """

    name: str
    command: str
    remedies: Sequence[str]
    runs: Sequence[RunData]
    tuned: Sequence[Row] = ()
    chaos: Sequence[Row] = ()
    baseline: str = BASELINE
    primary: Row | None = None
    beside: Sequence[Sequence[Row]] = ()

    def rows(self, role: str = "grid") -> list[Row]:
        """Returns the table rows of the finished runs of a role."""
        return [run.row for run in self.runs if run.row is not None and run.role == role]

    def parts(self) -> dict[str, StudyData]:
        """Returns the parts of the study by name, e.g. runs with other optimizers; empty if there is only one grid.

        Each part is a study whose runs are its grid. The remedies keep their order and therefore their colours.
        """
        found: dict[str, list[RunData]] = {}
        for run in (run for run in self.runs if run.role not in ("grid", "drift")):
            found.setdefault(run.role, []).append(dataclasses.replace(run, role="grid"))
        parts = {role: dataclasses.replace(self, runs=runs, primary=None) for role, runs in found.items()}
        rows = {role: part.rows() for role, part in parts.items()}
        grid = [] if self.primary else self.rows()  # a primary comparison is judged alone
        return {
            role: dataclasses.replace(part, beside=[grid, *(rows[other] for other in parts if other != role)])
            for role, part in parts.items()
        }

    def rows_beside(self) -> Sequence[Sequence[Row]]:
        """Returns the finished rows of each other grid on the page: the other parts, or all parts beside the grid."""
        return self.beside or [part.rows() for part in self.parts().values()]

    def lrs(self) -> list[float]:
        """Returns the learning rates of the finished runs of the grid."""
        return sorted({row["lr"] for row in self.rows()})

    def counted_bigrams(self) -> float | None:
        """Returns the mean held-out loss of a bigram model, which counts pairs of tokens; None unless it was recorded
        for every finished run."""
        runs = [run for run in self.runs if run.row is not None and run.role == "grid"]
        known = [run.env["counted_bigrams"] for run in runs if run.env.get("counted_bigrams") is not None]
        return math.fsum(known) / len(known) if known and len(known) == len(runs) else None

    def loss_unit(self) -> str:
        """Returns the unit of the corpus, nats/byte or nats/token; nats/token if the runs have different units."""
        corpora = [run.env.get("corpus") for run in self.runs]
        units = {corpus["loss_unit"] for corpus in corpora if isinstance(corpus, dict) and corpus.get("loss_unit")}
        return f"nats/{units.pop()}" if len(units) == 1 else "nats/token"


def collect(paths: str | Path | Iterable[str | Path], baseline: str = BASELINE) -> StudyData:
    """Reads a study directory, a run directory, or several of either.

    Args:
        paths: the directories.
        baseline: the remedy with which the other remedies are compared.

    Raises:
        RunDirectoryError: a path is neither a study nor a run, or a file in it is damaged.
        UnknownNameError: the baseline is not "none" and does not occur in any run.
    """
    studies = [_open(path) for path in as_paths(paths)]
    runs = _distinct(list({run.path.resolve(): run for study in studies for run in study.runs}.values()))
    names = list(dict.fromkeys(study.name for study in studies if study.name))
    commands = list(dict.fromkeys(study.command for study in studies if study.command))
    stated = [remedy for study in studies for remedy in study.remedies]
    used = {run.remedy for run in runs}
    order = dict.fromkeys([*(r for r in stated if r in used), *(run.remedy for run in runs)])
    if baseline != BASELINE and baseline not in order:
        raise unknown("baseline", baseline, order)
    remedies = sorted(order, key=lambda remedy: remedy != baseline)  # the baseline first, all others in order
    tuned = [choice for study in studies for choice in study.tuned]
    chaos = [pair for study in studies for pair in study.chaos]
    return StudyData(
        name=" + ".join(names),
        command="\n".join(commands),
        remedies=remedies,
        runs=runs,
        tuned=tuned,
        chaos=chaos,
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
        raise RunDirectoryError("expected at least one study or run directory, got an empty list")
    return list(dict.fromkeys(Path(path) for path in several))


def _open(path: Path) -> StudyData:
    if (path / "study.json").exists():
        return _study(path)
    directory = RunDirectory(path)
    if directory.status is RunStatus.MISSING:
        found = "a file" if path.is_file() else "a directory with neither" if path.is_dir() else "no such directory"
        raise RunDirectoryError(
            f"cannot read {path}: expected the directory of a study or of a run, with study.json or config.json, "
            f"got {found}. Give the directory that `qkeel study` or `qkeel run` printed; if it is a folder of runs, "
            "give each run."
        )
    run = _run(directory, {}, path.name)
    return StudyData(name="", command="", remedies=[run.remedy], runs=[run])


def _study(path: Path) -> StudyData:
    file = path / "study.json"
    about = read_object(file, "runs")
    runs = [
        _run(RunDirectory(path / "runs" / refuse_path(planned["run_id"], str(file))), planned, path.name)
        for planned in about["runs"]
    ]
    remedies = [str(remedy) for remedy in about.get("remedies") or ()]
    name, command = about.get("study") or path.name, about.get("command") or ""
    tuned = about.get("tuned") or ()
    for i, run in enumerate(runs):
        floor = chaos_floors(path, (about.get("base") or {}).get(run.role)).get((run.remedy, run.lr))
        if run.row is not None and floor is not None:
            runs[i] = dataclasses.replace(run, row={**run.row, "chaos_floor": floor})
    chaos = _chaos(path)["pairs"]
    return StudyData(
        name=str(name),
        command=str(command),
        remedies=remedies,
        runs=runs,
        tuned=tuned,
        chaos=chaos,
        primary=about.get("primary"),
    )


def _chaos(path: Path) -> Row:
    file = path / "chaos.json"
    return read_object(file, "pairs") if file.exists() else {"base": {}, "pairs": []}


def chaos_floors(path: Path, base: object) -> dict[tuple[str, float], float]:
    """Returns the chaos floor of each remedy and LR for a configuration, if known.

    The chaos floor is the root mean square over seeds of the change of the loss due to one float32 step in one weight.
    It is read from the study's own chaos.json, or from that of the neighbouring directory `chaos`.
    """
    known: dict[tuple[str, float], list[float]] = {}
    # The study's own pairs come first; the neighbouring chaos study is used only if its training is the same.
    for place in dict.fromkeys((path, path.resolve().parent / "chaos")):
        found = _chaos(place)
        for pair in found["pairs"] if _trained(found["base"]) == _trained(base) else ():
            known.setdefault((pair["remedy"], float(pair["lr"])), []).append(float(pair["loss_difference"]))
        if known:
            break
    return {key: math.sqrt(math.fsum(x * x for x in apart) / len(apart)) for key, apart in known.items()}


def _trained(base: object) -> object:
    """Returns a configuration without the cadence of measurements, which does not affect the final loss."""
    cadence = ("log_every", "eval_every", "probe_sequences")
    return {k: v for k, v in base.items() if k not in cadence} if isinstance(base, dict) else None


def _run(directory: RunDirectory, planned: Row, source: str) -> RunData:
    status, path = directory.status, directory.path
    config = {} if status is RunStatus.MISSING else directory.config()
    if not planned:
        file = path / "config.json"
        _need(config, ("remedy", "optim", "seed"), file)
        optim = config["optim"]
        _need(optim, ("lr",), file)
        planned = {"run_id": path.name, "remedy": config["remedy"], "seed": config["seed"], "lr": optim["lr"]}
    run = RunData(
        path=path,
        source=source,
        run_id=str(planned["run_id"]),
        remedy=str(planned["remedy"]),
        lr=float(planned["lr"]),
        seed=int(planned["seed"]),
        role=str(planned.get("role") or "grid"),
        status=status,
        config=config,
    )
    if status is RunStatus.MISSING:
        return run
    return dataclasses.replace(
        run,
        metrics=directory.metrics(),
        row=_row(directory.summary(), run) if status is RunStatus.DONE else None,
        env=directory.env() if (path / "env.json").exists() else {},
        heads=directory.heads() if (path / "heads.json").exists() else None,
        error=directory.failure() if status is RunStatus.FAILED else "",
        long=directory.long_contexts(),
    )


def _row(summary: Row, run: RunData) -> Row:
    """Returns the run's table row, with names from the study, missing values as NaN and `collapsed` filled in."""
    row = dict(summary)
    row.update(remedy=run.remedy, lr=run.lr, seed=run.seed, run_id=run.run_id, status=str(run.status))
    for name in ("val_loss", "max_logit", "end_max_logit", "end_entropy", "init_loss", "cpu_seconds", "spike_score"):
        row[name] = as_number(row.get(name))
    alarm, steps = row.get("alarm_step"), row.get("steps")
    row["alarm_step"] = int(alarm) if isinstance(alarm, (int, float)) and math.isfinite(alarm) else None
    row["steps"] = int(steps) if isinstance(steps, (int, float)) else None
    if not isinstance(row.get("collapsed"), bool):
        start = math.inf if math.isnan(row["init_loss"]) else row["init_loss"]
        row["collapsed"] = collapsed(row["end_entropy"], row["val_loss"], start)
    return row


def _distinct(runs: Sequence[RunData]) -> list[RunData]:
    """Labels runs with equal remedy, LR and seed by the settings in which they differ, otherwise by directory."""
    times = Counter(map(_cell, runs))
    alike = [run for run in runs if times[_cell(run)] > 1]
    settings = dict(zip([run.path for run in alike], differences([run.config for run in alike])))
    # Each label is applied only to runs that are still ambiguous after the previous label.
    for label in (lambda run: settings.get(run.path, ""), lambda run: run.source, lambda run: run.run_id):
        times = Counter(_cell(run) for run in runs)
        runs = [_labelled(run, name) if times[_cell(run)] > 1 and (name := label(run)) else run for run in runs]
    return list(runs)


def _cell(run: RunData) -> tuple[str, float, int, str]:
    return run.remedy, run.lr, run.seed, run.role


def _labelled(run: RunData, label: str) -> RunData:
    remedy = f"{run.remedy} ({label})"
    return dataclasses.replace(run, remedy=remedy, row=None if run.row is None else {**run.row, "remedy": remedy})


def as_number(value: object) -> float:
    """Returns a recorded number as a float; NaN for null, text and booleans."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _need(value: Row, names: Iterable[str], file: Path) -> None:
    missing = [name for name in names if value.get(name) is None]
    if missing:
        raise RunDirectoryError(
            f"{file} lacks {', '.join(missing)}; it was not written by qkeel, or it was damaged later. "
            "Restore it, or delete the directory and run again."
        )
