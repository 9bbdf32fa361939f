"""`python -m tests.fuzz.disk_faults`: power losses, failing calls and damaged files, of a study and of a watched run.

A power loss after every change of a file, with what was not synced lost, kept, or kept by chance; ENOSPC, EIO and EINTR
at every call in turn; flipped bits and cut ends of every file. Afterwards the study goes on to the result of an
undisturbed one, or an error names the file; of a watched run the page has the same records, the first of them where
the run did not end, or names the file. Exit code 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import logging
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.fuzz.damaged import CONFIG
from tests.fuzz.disk_model import Failing, Journal, Killed, Unsynced, after_power_loss, in_place
from tests.fuzz.places import scratch
from tests.report.synthetic_watch import Seen, make_watch

from qkeel.errors import QkeelError
from qkeel.lab import Execution, Grid, make_plan, run_plan
from qkeel.records import RunDirectory
from qkeel.report import render
from qkeel.report.watch_page import read_watched

_CONFIG = dataclasses.replace(CONFIG, steps=5, checkpoint_every=2, log_every=1)
_GRID = Grid(remedies=["none", "qk_clip:threshold=1"], lrs=[0.01], seeds=[0])
_SEEN = Seen(layers=2, heads=2, samples=22)
_TIMES = ("cpu_seconds", "tokens_per_second", "mfu")
Files = dict[str, bytes | None]


class Silent(AssertionError):
    """A result that differs from the undisturbed one, and nothing said so."""


class Study:
    """A study of two runs."""

    def journal(self, out: Path, journal: Journal) -> None:
        """Begins it, is killed at its second checkpoint, finds a damaged record of the first step, and goes on."""
        first = Journal(out.parent)
        with in_place(first):
            self.make(out.parent / "first")
        checkpoints = [i for i, call in enumerate(first.calls) if call[0] == "rename" and call[2].parent.name == "last"]
        journal.last = checkpoints[1] + 3
        with contextlib.suppress(Killed):
            self.make(out)
        journal.last = None
        journal.flip(next(out.glob("runs/*/metrics.jsonl")), 20)
        self.make(out)

    def make(self, out: Path) -> None:
        """Begins it, or goes on; the error of a run is raised."""
        done = run_plan(make_plan("lr", _CONFIG, _GRID), out, Execution())
        for failure in done.failures:
            assert not failure.error.startswith(("OSError", "InterruptedError", "FileNotFound")), failure.error
            raise QkeelError(failure.error)

    def result(self, out: Path) -> Any:
        """All numbers but those of the clock."""
        runs = [RunDirectory(path) for path in sorted((out / "runs").iterdir())]
        rows = [line.split(",") for line in (out / "table.csv").read_text().splitlines()]
        timed = rows[0].index("cpu_seconds")
        return (
            [[_timeless(line) for line in run.metrics()] for run in runs],
            [[cell for i, cell in enumerate(row) if i != timed] for row in rows],
            [(run.path / "heads.f32").read_bytes() for run in runs],
        )

    def check(self, out: Path, whole: Any) -> None:
        """Goes on, and compares."""
        self.make(out)
        if self.result(out) != whole:
            raise Silent("the study ended with other numbers")


class Watched:
    """A watched run, whose records are read."""

    def journal(self, out: Path, journal: Journal) -> None:
        """Records all of it."""
        self.make(out)

    def make(self, out: Path) -> None:
        """Records into the directory as a monitor would."""
        make_watch(out, _SEEN)

    def result(self, out: Path) -> Any:
        """The numbers of all records."""
        seen = read_watched([out])[0]
        heads = [
            (h.steps.tolist(), {n: v.tobytes() for n, v in h.values.items()}) for h in (seen.heads, seen.eval_heads)
        ]
        return list(seen.records), list(seen.eval_records), heads, list(seen.alarms), seen.about, seen.env

    def check(self, out: Path, whole: Any) -> None:
        """Reads what is there: the beginning, or all where it says that it is done."""
        seen = self.result(out)
        done = (out / "DONE").exists()
        for own, all_of_it in zip(seen[:2], whole[:2]):
            if own != all_of_it[: len(own)] or (done and len(own) < len(all_of_it)):
                raise Silent("the records are other ones")
        if done and seen != whole:
            raise Silent("the records are other ones")


SUBJECTS: dict[str, Study | Watched] = {"study": Study(), "watched": Watched()}


def _timeless(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in _TIMES}


@functools.cache
def undisturbed(name: str) -> tuple[Journal, Any, Files]:
    """The journal of a subject, its result, and its files; made once a process."""
    place = Path(tempfile.mkdtemp(prefix="qkeel-disk-")) / "out"
    journal = Journal(place.parent)
    try:
        with in_place(journal):
            SUBJECTS[name].journal(place, journal)
        files = {str(p.relative_to(place.parent)): None if p.is_dir() else p.read_bytes() for p in place.rglob("*")}
        return journal, SUBJECTS[name].result(place), files
    finally:
        shutil.rmtree(place.parent)


def lay_out(files: Files, place: Path) -> Path:
    """Writes files, those of directories first; returns where the subject lies."""
    for name in sorted(files):
        path, content = place / name, files[name]
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            os.utime(path, (0, 0))  # pages say when files were written
    return place / "out"


def outcome(name: str, files: Files, told: str = "") -> str:
    """What becomes of these files: the same result, or an error that names a file (`told`: this one).

    Raises: Silent for another result; AssertionError for an error that names none.
    """
    with scratch() as place:
        out = lay_out(files, place)
        whole = undisturbed(name)[1]
        try:
            with in_place(Unsynced()):
                SUBJECTS[name].check(out, whole)
        except QkeelError as error:
            if told not in str(error) or str(place) not in str(error):
                raise AssertionError(f"the error does not name {told or 'a file'}: {error}") from error
            return "reported"
    return "same"


def power_losses(name: str, seed: int, chances: int) -> Iterator[tuple[str, Files]]:
    """A disk after each change of a file: all lost that was not synced, nothing, and some of it by chance."""
    journal = undisturbed(name)[0]
    seen = set()
    for count in range(1, len(journal.calls) + 1):
        ways = {"lost": False, "kept": True}
        ways |= {f"chance {i}": random.Random(f"{seed} {count} {i}") for i in range(chances)}
        for way, keep in ways.items():
            files = after_power_loss(journal, count, keep)
            known = hash(tuple(files.items()))
            if known not in seen:
                seen.add(known)
                yield f"after {count} of {len(journal.calls)} changes, {way}", files


def lose_power(name: str, case: tuple[str, Files]) -> str:
    """A watched run without its first files is no run: what is not there says nothing wrong."""
    if name == "watched" and "out/config.json" not in case[1]:
        return "same"
    return outcome(name, case[1])


def failures(name: str) -> Iterator[tuple[int, int]]:
    """Each call of a run, and each error it can give."""
    counter = Failing(0, 0)
    with scratch() as place, in_place(counter):
        SUBJECTS[name].make(place / "out")
    yield from ((at, number) for number in Failing.NUMBERS for at in range(1, counter.count + 1))


def fail(name: str, case: tuple[int, int]) -> str:
    """A run whose n-th call fails: one error or none, and a sound disk that goes on to the undisturbed result."""
    with scratch() as place:
        out, said = place / "out", "same"
        whole = undisturbed(name)[1]
        with in_place(Failing(*case)):
            try:
                SUBJECTS[name].make(out)
            except QkeelError as error:
                if str(place) not in str(error):
                    raise AssertionError(f"the error names no file: {error}") from error
                said = "reported"
        if name == "study" or (out / "config.json").exists():
            with in_place(Unsynced()):
                SUBJECTS[name].check(out, whole)
    return said


def damages(name: str, seed: int, count: int) -> Iterator[tuple[str, str, Files]]:
    """Files of a subject that ended, or of a study that was cut, with one bit flipped or the end of one cut."""
    chance = random.Random(f"{seed} {name}")
    journal, _, ended = undisturbed(name)
    for number in range(count):
        half = name == "study" and number % 2
        files = after_power_loss(journal, chance.randrange(1, len(journal.calls)), True) if half else dict(ended)
        there = sorted(path for path, content in files.items() if content and not path.endswith(".part"))
        if not there:
            continue
        path = chance.choice(there)
        raw = bytearray(files[path] or b"")
        at = chance.randrange(len(raw))
        if chance.random() < 0.3:
            del raw[at:]
        else:
            raw[at] ^= 1 << chance.randrange(8)
        files[path] = bytes(raw)
        yield f"{path}, byte {at}{', half a study' if half else ''}", Path(path).name.split(".")[0], files


def damage(name: str, case: tuple[str, str, Files]) -> str:
    """The page of a run or study that ended is the same or names the file; a study goes on to the same result."""
    _, told, files = case
    said = "same"
    if name == "watched" or "half" not in case[0]:
        said = _page(name, files, told)
    again = outcome(name, files, told)
    return "reported" if "reported" in (said, again) else "same"


def _page(name: str, files: Files, told: str) -> str:
    with scratch() as place:
        out = lay_out(undisturbed(name)[2], place)
        whole = render.page(out).html()
        lay_out(files, place)
        try:
            page = render.page(out).html()
        except QkeelError as error:
            if told not in str(error):
                raise AssertionError(f"the error does not name {told}: {error}") from error
            return "reported"
    if page != whole:
        raise Silent("the page has other numbers")
    return "same"


CLASSES = {"power": lose_power, "errors": fail, "damage": damage}


def cases(kind: str, name: str, seed: int, count: int) -> Iterator[Any]:
    """The cases of a class; `count` is the number of damages, and of chances a power loss."""
    if kind == "power":
        return power_losses(name, seed, count)
    return failures(name) if kind == "errors" else damages(name, seed, count)


def hunt(kind: str, name: str, found: Iterator[Any]) -> tuple[Counter[str], list[str]]:
    """How the cases ended, and those that ended wrong."""
    ends: Counter[str] = Counter()
    findings = []
    log = logging.getLogger("qkeel")
    with warnings.catch_warnings(), ExitStack() as after:
        after.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL)
        warnings.simplefilter("ignore")
        for case in found:
            try:
                ends[CLASSES[kind](name, case)] += 1
            except Exception as error:
                ends["wrong"] += 1
                shown = case[0] if kind != "errors" else case
                findings.append(f"{kind} of the {name}, {shown}: {type(error).__name__}: {str(error)[:600]}")
    return ends, findings


def main() -> int:
    """Runs each class of faults; prints a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.disk_faults", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(CLASSES)} [default: all]")
    parser.add_argument("--subjects", nargs="*", default=list(SUBJECTS))
    parser.add_argument("--chances", type=int, default=3, help="disks by chance after each change")
    parser.add_argument("--damages", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = False
    for kind in options.kinds or CLASSES:
        for name in options.subjects:
            count = options.chances if kind == "power" else options.damages
            ends, findings = hunt(kind, name, cases(kind, name, options.seed, count))
            print(f"{kind}, {name}: {sum(ends.values())} cases, {dict(ends)}", *findings, sep="\n  ", flush=True)
            wrong = wrong or bool(findings)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
