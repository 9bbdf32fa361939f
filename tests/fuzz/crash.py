"""`python -m tests.fuzz.crash`: kill -9 at random instants of studies, watched runs and reports.

Killed are whole process groups, the main process alone, and single workers. Afterwards nothing that was finished may
be lost, nothing may differ from an undisturbed run, and no process may be left. Exit code 1 if any of that happens.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.lab.killing import session, survivors
from tests.lab.recorded import table

STUDY = "study lr --remedies none lalr:tau=0.3 --lrs 0.1 0.01 --seeds 0 --data topics --context 16 --d-model 16 "
STUDY += "--n-heads 2 --steps 1500 --checkpoint-every 7 --log-every 5 --device cpu --jobs 2"
SCRIPT = """
import torch
from qkeel.nn import Decoder, DecoderConfig
torch.manual_seed(0)
model = Decoder(DecoderConfig(vocab_size=11, d_model=16, n_heads=2, n_layers=1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1500):
    optimizer.zero_grad()
    model(torch.randint(11, (2, 8))).square().mean().backward()
    optimizer.step()
"""
ORPHANS_END = 10.0  # seconds in which what the killed process started must end
LONGEST = 900.0  # seconds of an undisturbed command

Process = subprocess.Popen[bytes]


class Crash:
    """A command that is started and killed again and again in one directory, and what must hold of it."""

    def __init__(self, place: Path, instants: random.Random) -> None:
        self.place, self.instants = place, instants
        self.findings: list[str] = []
        self.kills = 0

    def command(self) -> list[str]:
        """The words to run."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """More variables of the environment."""
        return {}

    def progress(self) -> object:
        """A value that changes once the command does its work."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Before each start."""

    def check(self) -> None:
        """After each kill: appends to `findings`."""

    def finish(self) -> None:
        """After the last kill: the command runs to its end, and its result is compared."""

    def kill(self) -> None:
        """Starts the command, kills it at some instant after it began to work, and looks for what is left."""
        self.prepare()
        before, process = self.progress(), self._start()
        early = self.starts_workers and self.instants.random() < 0.5
        deadline = time.monotonic() + LONGEST
        while process.poll() is None and time.monotonic() < deadline:
            if self.progress() != before or (early and len(session(process.pid)) > 1):
                break
            time.sleep(0.01)
        time.sleep(self.instants.uniform(0, self.longest))
        if process.poll() is None:
            self.kills += 1
            self._strike(process)
        if (code := process.wait(LONGEST)) not in (0, 1, -signal.SIGKILL):
            self.findings.append(f"{type(self).__name__}: exit code {code}")
        for orphan in survivors(process.pid, ORPHANS_END):
            self.findings.append(f"{type(self).__name__}: process {orphan} outlived the command")
            os.kill(orphan, signal.SIGKILL)
        self.check()

    longest = 1.0
    starts_workers = False  # then half of the kills come while these start, before they record anything

    def _strike(self, process: Process) -> None:
        """The whole group, the main process, or one of the others."""
        target = self.instants.choice(["group", "main", "worker"])
        others = [pid for pid in session(process.pid) if pid != process.pid]
        if target == "group":
            os.killpg(process.pid, signal.SIGKILL)
        elif target == "worker" and others:
            try:
                os.kill(self.instants.choice(others), signal.SIGKILL)
            except ProcessLookupError:
                process.kill()
        else:
            process.kill()

    def _start(self) -> Process:
        return subprocess.Popen(
            self.command(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **self.environment()},
        )

    def run(self, out: Path) -> None:
        """The command undisturbed, into another place."""
        words = [str(out) if word == str(self.place / "cut") else word for word in self.command()]
        subprocess.run(
            words, check=True, capture_output=True, timeout=LONGEST, env={**os.environ, **self.environment()}
        )


class StudyCrash(Crash):
    """A study of four runs with two workers."""

    longest = 3.0
    starts_workers = True

    def command(self) -> list[str]:
        """The study's command."""
        return [sys.executable, "-m", "qkeel", *shlex.split(STUDY), "--out", str(self.place / "cut")]

    def progress(self) -> object:
        """The sizes of the runs' records."""
        return {str(p): p.stat().st_size for p in (self.place / "cut").glob("runs/*/metrics.jsonl")}

    def prepare(self) -> None:
        """Where everything is done, two runs begin once more."""
        done = sorted((self.place / "cut").glob("runs/*/DONE"))
        if len(done) == 4:
            for again in done[:2]:
                shutil.rmtree(again.parent)
            done = done[2:]
        self.done = {path.parent: _kept(path.parent) for path in done}

    def check(self) -> None:
        """Runs that were done are as they were."""
        for run, kept in self.done.items():
            if _kept(run) != kept:
                self.findings.append(f"the finished run {run.name} was lost or changed")

    def finish(self) -> None:
        """The table of an undisturbed study."""
        self.run(self.place / "cut")
        self.run(self.place / "whole")
        if table(self.place / "cut") != table(self.place / "whole"):
            self.findings.append("the study's table differs from that of an undisturbed one")
        if _heads(self.place / "cut") != _heads(self.place / "whole"):
            self.findings.append("the study's heads differ from those of an undisturbed one")


class WatchCrash(Crash):
    """A script that trains under `qkeel watch`; each start has a directory of its own."""

    def prepare(self) -> None:
        """Writes the script, and counts the starts."""
        (self.place / "train.py").write_text(SCRIPT)
        self.number = self.kills

    def command(self) -> list[str]:
        """The script's command."""
        words = [sys.executable, "-m", "qkeel", "watch", "--out", str(self.place / "cut"), "--", sys.executable]
        return [*words, str(self.place / "train.py")]

    def progress(self) -> object:
        """The newest directory's records."""
        return sorted((str(p), p.stat().st_size) for p in self.place.glob("cut*/metrics.jsonl"))

    def finish(self) -> None:
        """Each directory has the first records of an undisturbed run, and a page."""
        self.run(self.place / "whole")
        whole = (self.place / "whole" / "metrics.jsonl").read_bytes()
        for run in sorted(self.place.glob("cut*")):
            if not (run / "metrics.jsonl").exists():
                continue
            lines = (run / "metrics.jsonl").read_bytes()
            if not whole.startswith(lines):
                self.findings.append(f"the records of {run.name} are no beginning of those of an undisturbed run")
            page = [sys.executable, "-m", "qkeel", "report", str(run), "-o", str(self.place / "page.html")]
            done = subprocess.run(page, capture_output=True, text=True)
            if done.returncode:
                self.findings.append(f"no page of {run.name}: {done.stderr.strip()[-300:]}")


class ReportCrash(Crash):
    """A report that is written over one that is there."""

    longest = 0.3

    def prepare(self) -> None:
        """Makes the study and its page once."""
        if not (self.place / "page.html").exists():
            from tests.report.synthetic_study import Made, make_study

            make_study(self.place / "study", [Made(remedy="none", status="done"), Made(remedy="lalr", status="done")])
            subprocess.run(self.command(), check=True, capture_output=True)
            self.page = (self.place / "page.html").read_bytes()
        self.start = time.monotonic() + self.instants.uniform(0, 6)

    def command(self) -> list[str]:
        """The report's command."""
        return [sys.executable, "-m", "qkeel", "report", str(self.place / "study"), "-o", str(self.place / "page.html")]

    def progress(self) -> object:
        """The temporary file of the page, or the clock: most of the command's time is its start."""
        return time.monotonic() > self.start, len(list(self.place.glob(".page*")))

    def check(self) -> None:
        """The page is whole."""
        if (self.place / "page.html").read_bytes() != self.page:
            self.findings.append("the page is another one")


KINDS: dict[str, tuple[type[Crash], float]] = {  # and the share of the kills
    "study": (StudyCrash, 0.45),
    "watch": (WatchCrash, 0.2),
    "report": (ReportCrash, 0.35),
}


def _kept(run: Path) -> dict[str, bytes]:
    names = ("DONE", "summary.json", "metrics.jsonl", "heads.f32", "config.json")
    return {name: (run / name).read_bytes() for name in names if (run / name).exists()}


def _heads(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("heads.f32")}


def main() -> int:
    """Kills each kind of command its share of times; prints a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.crash", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)} [default: all]")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    findings: list[str] = []
    for name in options.kinds or KINDS:
        kind, share = KINDS[name]
        with tempfile.TemporaryDirectory(prefix=f"qkeel-crash-{name}-") as folder:
            one = kind(Path(folder), random.Random(f"{options.seed} {name}"))
            _repeat(one, max(1, round(share * options.kills)))
            print(f"{name}: {one.kills} kills, {len(one.findings)} findings", *one.findings, sep="\n  ", flush=True)
            findings += one.findings
    return 1 if findings else 0


def _repeat(one: Crash, kills: int) -> None:
    step: Callable[[], None] = one.kill
    for _ in range(10 * kills):
        if one.kills >= kills:
            break
        step()
    one.finish()


if __name__ == "__main__":
    sys.exit(main())
