"""The messages about a watched run, apart from the output of its script: lines on stderr that begin with `qkeel:`."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from qkeel.errors import AlarmWarning, QkeelWarning
from qkeel.handle import Handle
from qkeel.monitor import Alarm, RunDirectorySink, Sample, Severity, Sink, sample_table


@final
class MessageSink(Sink):
    """Prints the directory of the run, each alarm, and at the end the last numbers."""

    def __init__(self, run: RunDirectorySink, writer: MessageWriter) -> None:
        self.run, self.writer = run, writer
        self._sample: Sample | None = None
        self._alarms: list[Alarm] = []

    @property
    def last(self) -> int | None:
        """The step measured last."""
        return None if self._sample is None else self._sample.step

    @property
    def place(self) -> str:
        """The directory, as a relative path where that is shorter."""
        path = Path(os.path.relpath(self.run.path or self.run.asked))
        return str(path.absolute() if ".." in path.parts else path)

    def open(self, about: Mapping[str, Any]) -> None:
        """One line: what is watched, and where it is written."""
        sites, missed = len(about.get("sites") or ()), len(about.get("missed") or ())
        number = f"{sites} of {sites + missed}" if missed else f"{sites}"
        what = f"{number} attention layers of {about['model']}" if sites else f"the attention of {about['model']}"
        self.writer(f"watching {what}, run {self.place}")

    def write(self, sample: Sample) -> None:
        """Nothing now."""
        if sample.phase == "train" or self._sample is None:
            self._sample = sample

    def alarm(self, alarm: Alarm) -> None:
        """One line."""
        self._alarms.append(alarm)
        self.writer(str(alarm))

    def event(self, event: Mapping[str, Any]) -> None:
        """One line, of an event that says something."""
        if "text" in event:
            self.writer(str(event["text"]))

    def close(self, complete: bool) -> None:
        """Nothing now: `summary()` may come later."""

    def summary(self) -> None:
        """The numbers measured last, layer by layer, and how many alarms there were."""
        if self._sample is not None:
            for line in sample_table(self._sample).splitlines():
                self.writer(line)
        counts = Counter(alarm.severity for alarm in self._alarms)
        alarms = ", ".join(f"{counts[severity]} {severity}" for severity in reversed(Severity) if counts[severity])
        self.writer(f"alarms: {alarms or 'none'}")


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
        print(f"qkeel: {line}", file=self._stream, flush=True)

    def _stop(self) -> None:
        warnings.showwarning = self._plain
