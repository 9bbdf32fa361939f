"""Parts of one study that were made apart, in directories of their own, merged into one."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import final

from qkeel.errors import DamagedFileError, RunDirectoryError, reported
from qkeel.lab.execution.execute import write_tables
from qkeel.lab.execution.progress import last_step
from qkeel.lab.execution.study_record import joined_study, read_study
from qkeel.lab.training.environment import refuse_mixture
from qkeel.options import Json
from qkeel.records import RunDirectory, RunStatus, write_json
from qkeel.records.disk import make_directory, move_directory, replace_file
from qkeel.records.regular_files import refuse_irregular
from qkeel.records.rundir import locked

_OF_THE_MACHINE = ("cpu_seconds", "tokens_per_second", "mfu")  # how long a run took is no result of it


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MergedStudy:
    """A merged study: its table, that of its long contexts, and how many of its runs have a result."""

    path: Path  #: of the merged directory
    table: Sequence[Json]  #: one row for each run that is done
    long_table: Sequence[Json]  #: one row for each of them, method and length
    done: int  #: runs that have a result


def merge_studies(sources: Sequence[str | Path], out: str | Path) -> MergedStudy:
    """Merges directories of the same study, made on several machines, into a new one; the sources stay as they are.

    A run that is in several of them is taken where it is done, else where it is furthest. Unfinished runs come along:
    the study's own command with `out` goes on with them. `out` appears whole or not at all.

    >>> from qkeel.lab import RunConfig, study
    >>> base = RunConfig(steps=1, eval_sequences=1)
    >>> for seed in (0, 1):
    ...     _ = study("lr", remedies=["none"], lrs=[0.01], seeds=[seed], out=f"part-{seed}", base=base)
    >>> merge_studies(["part-0", "part-1"], "whole").done
    2

    Raises: RunDirectoryError if a source holds no study or another one, runs of two were computed otherwise or on
    another text, a run that is done in two of them has different results there, a source is in use, or `out` holds
    something already.
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
    shutil.rmtree(staged, ignore_errors=True)  # of a merge that was killed
    advice = ". Expected a writable place with free space; nothing that was there is changed."
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
        raise RunDirectoryError("expected directories of one study to merge, got none")
    seen: set[str] = set()
    for place in places:
        if os.path.realpath(place) in seen:
            raise RunDirectoryError(f"{place} is named twice; name each directory once")
        seen.add(os.path.realpath(place))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunDirectoryError(
            f"cannot merge into {out}: something is there already. Name a new directory; nothing was changed."
        )


def _choice(places: Sequence[Path], run_id: str) -> RunDirectory | None:
    """The directory to take a run from, None where no source has begun it."""
    runs = [RunDirectory(place / "runs" / run_id) for place in places]
    done = [run for run in runs if run.status is RunStatus.DONE]
    for other in done[1:]:
        _check_same_results(done[0], other)
    # What long texts gave is added to a run that is done, so one of two equal runs may have more of it.
    furthest = max(done, key=lambda run: len(run.long_contexts()), default=None)
    begun = [run for run in runs if run.status is not RunStatus.MISSING]
    return furthest or max(begun, key=lambda run: last_step(run.path), default=None)


def _check_same_results(one: RunDirectory, other: RunDirectory) -> None:
    """Raises RunDirectoryError where a run that was done twice did not come to the same numbers, to the last bit."""
    first, second = _results(one), _results(other)
    unlike = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    texts = _of_long_texts(one), _of_long_texts(other)
    unlike += [name for name in texts[0] if name in texts[1] and texts[0][name] != texts[1][name]]
    if unlike:
        raise RunDirectoryError(
            f"{one.path} and {other.path} are the same run with different results, first of all {unlike[0]}: machines, "
            "versions or kernels differed, so the two are no parts of one study. Leave one of the directories out; "
            "nothing was changed."
        )


def _results(run: RunDirectory) -> dict[str, str]:
    """Every number of a run by name and step; as text, since NaN is not equal to itself."""
    lines = [(f" at step {line['step']}", line) for line in run.metrics()]
    lines.append((" of the summary", run.summary()))
    return _as_text(lines)


def _of_long_texts(run: RunDirectory) -> dict[str, str]:
    """The numbers of a run at other lengths."""
    lines = run.long_contexts()
    return _as_text([(f" with {line['posthoc']} at length {line['test_length']}", line) for line in lines])


def _as_text(lines: Sequence[tuple[str, Json]]) -> dict[str, str]:
    return {name + at: repr(x) for at, line in lines for name, x in line.items() if name not in _OF_THE_MACHINE}


def _copy(run: RunDirectory, to: Path) -> None:
    """Copies the files of a run; of one that is not done under its lock, so that nobody writes meanwhile."""
    held = locked(run.path / "lock", f"{run.path} is in use by another process")
    if run.status is RunStatus.DONE and (damage := run.damage()):
        raise DamagedFileError(f"{damage} Run its study again, then merge.")
    with nullcontext() if run.status is RunStatus.DONE else held:
        for file in sorted(run.path.rglob("*")):
            if file.name == "lock" or file.name.endswith(".part") or (file.is_dir() and not file.is_symlink()):
                continue
            refuse_irregular(file)
            place = to / file.relative_to(run.path)
            make_directory(place.parent)
            replace_file(place, file.read_bytes())
