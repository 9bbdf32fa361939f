"""The messages about a watched run, apart from the output of its script: lines on stderr that begin with `qkeel:`."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from qkeel.errors import AlarmWarning, QkeelWarning
from qkeel.handle import Handle
from qkeel.monitor import Alarm, RunDirectorySink, Sample, Severity, Sink, sample_table


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """What is said to do about an alarm: the command that was typed, and what is being done already."""

    own: Sequence[str]  # words of `qkeel watch ...` before --
    command: Sequence[str]  # the words after it
    applied: str = ""  # by --apply
    piloted: bool = False  # by --autopilot

    @property
    def watcher(self) -> str:
        """The command that was typed."""
        return shlex.join(["qkeel", *self.own, *self.command])

    def lines(self, remedy: str) -> list[str]:
        """What to do, where the alarm advises `remedy`; nothing where an autopilot sees to it."""
        found = _APPLY.search(remedy)
        if self.piloted:
            return []
        if found is None:
            return [f"to act: {remedy}"]
        spec = found[1]
        again = shlex.join(["qkeel", *self.own[:-1], "--apply", spec, "--", *self.command])
        why = _WHY if set(re.findall(r"\w+(?=[:+]|$)", spec)) & {"lalr", "qk_clip"} else ""
        return [f"to fix it: {again}", f"or in the script, after the optimizer is made: {found[0]}{why}"]


_APPLY = re.compile(r'qkeel\.apply\("([^"]+)", model, optimizer[^)]*\)')
_WHY = "  (the forward pass stays as it is, so a checkpoint can be resumed; in a new training try qk_norm first)"


@final
class MessageSink(Sink):
    """Prints the directory of the run, what alarms say, and at the end the last numbers.

    Alarms of one cause are one story: the first grave one says what to do, those after it only how it continues; of
    several at one step the gravest speaks.
    """

    def __init__(self, run: RunDirectorySink, writer: MessageWriter, *, shown: Path, fix: Fix) -> None:
        self.run, self.writer, self.fix = run, writer, fix
        self._shown = shown
        self._sample: Sample | None = None
        self._alarms: list[Alarm] = []
        self._fixed: set[str] = set()
        self._model = ""

    @property
    def last(self) -> int | None:
        """The step measured last."""
        return None if self._sample is None else self._sample.step

    @property
    def place(self) -> str:
        """The directory, in the words in which it was asked for."""
        return str(self._shown.with_name((self.run.path or self.run.asked).name))

    def open(self, about: Mapping[str, Any]) -> None:
        """One line: what is watched, and where it is written."""
        self._model = str(about["model"])
        sites, missed = len(about.get("sites") or ()), len(about.get("missed") or ())
        number = f"{sites} of {sites + missed}" if missed else f"{sites}"
        what = f"{number} attention layers of {about['model']}" if sites else f"the attention of {about['model']}"
        with_it = f" with {self.fix.applied} applied" if self.fix.applied else ""
        self.writer(f"watching {what}{with_it}, run {self.place}")

    def write(self, sample: Sample) -> None:
        """Nothing now."""
        if sample.phase == "train" or self._sample is None:
            self._sample = sample

    def alarm(self, alarm: Alarm) -> None:
        """One line, and the first time that something is to be done about it, what."""
        before = [other for other in self._alarms if other.cause == alarm.cause]
        self._alarms.append(alarm)
        if any(other.step == alarm.step for other in before):
            return  # the gravest came first
        self.writer(dataclasses.replace(alarm, trend="").line if before else alarm.line)
        if alarm.severity is not Severity.NOTICE and alarm.remedy not in self._fixed:
            self._fixed.add(alarm.remedy)
            for line in self.fix.lines(alarm.remedy):
                self.writer(line)

    def event(self, event: Mapping[str, Any]) -> None:
        """One line, of an event that says something."""
        if "text" in event:
            self.writer(str(event["text"]))

    def close(self, complete: bool) -> None:
        """Nothing now: `summary()` may come later."""

    def summary(self) -> None:
        """The numbers measured last, layer by layer, and how many alarms there were."""
        if self._sample is not None:
            for line in sample_table(self._sample, root=self._model).splitlines():
                self.writer(line)
        counts = Counter(alarm.severity for alarm in self._alarms)
        alarms = ", ".join(f"{counts[severity]} {severity}" for severity in reversed(Severity) if counts[severity])
        self.writer(f"alarms: {alarms or 'none'}")
        for cause, own in self._by_cause().items():
            grave = max(own, key=lambda alarm: list(Severity).index(alarm.severity))
            self.writer(f"{cause}, since step {own[0].step:,}; {grave.line}")

    def _by_cause(self) -> dict[str, list[Alarm]]:
        """The alarms of each cause of which one is more than a notice, and that has several."""
        causes: dict[str, list[Alarm]] = {}
        for alarm in self._alarms:
            causes.setdefault(alarm.cause, []).append(alarm)
        return {
            cause: own
            for cause, own in causes.items()
            if len({alarm.step for alarm in own}) > 1 and any(alarm.severity is not Severity.NOTICE for alarm in own)
        }


@final
class MessageWriter(Handle):
    """Writes lines to stderr as it was at the start; qkeel's own warnings too, each as one line. Of several
    processes only rank 0 speaks, but all warn; those that the script forks do neither.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._stream, self._pid = sys.stderr, os.getpid()
        self._plain = plain = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if not issubclass(category, QkeelWarning):
                plain(message, category, *where)
            elif self.here and not issubclass(category, AlarmWarning):  # alarms have lines of their own
                self._print(f"warning{f' (rank {rank})' if rank else ''}: {' '.join(str(message).split())}")

        warnings.showwarning = show
        super().__init__(self._stop)

    @property
    def here(self) -> bool:
        """Returns whether this is the process that the run began in, not one that the script has forked."""
        return os.getpid() == self._pid

    def __call__(self, line: str) -> None:
        """Prints the line, on rank 0."""
        if self.rank == 0:
            self._print(line)

    def _print(self, line: str) -> None:
        """Begins at the left, also where a progress bar has left the cursor in the middle of a line."""
        bars = sys.modules.get("tqdm.std")  # a script without bars need not wait for it
        text, shown = f"qkeel: {line}", bars is not None and bool(vars(bars.tqdm).get("_instances"))
        if bars is not None and shown and self._stream.isatty():
            bars.tqdm.write(text, file=self._stream)  # takes the bars away and draws them again below
        else:
            print(f"\n{text}" if shown else text, file=self._stream, flush=True)

    def _stop(self) -> None:
        warnings.showwarning = self._plain
