"""The messages about a watched run: lines on stderr that begin with `qkeel:`, and its page.

The line that fixes an alarm is chosen in `monitor.alarms`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from qkeel.audit.check import check, is_run
from qkeel.errors import AlarmWarning, QkeelWarning
from qkeel.handle import Handle
from qkeel.monitor import Alarm, RunDirectorySink, Sample, Severity, Sink, sample_table
from qkeel.monitor.sample import shown_samples
from qkeel.patching.roles import Phase
from qkeel.report import write


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """What the user can do about an alarm, given the typed command and the remedies that are already active."""

    # Words of `qkeel watch ...` before --.
    watch_words: Sequence[str]
    # The words after it.
    command: Sequence[str]
    # Remedies of --apply.
    applied: str = ""
    # --autopilot was given.
    piloted: bool = False
    # Started by a launcher, whose own command is not known.
    launched: bool = False

    @property
    def watcher(self) -> str:
        """The command that was typed."""
        return shlex.join(["qkeel", *self.watch_words, *self.command])

    def lines(self, remedy: str) -> list[str]:
        """What to do about an alarm that recommends `remedy`; empty if an autopilot handles the alarm."""
        proposed = _APPLY.search(remedy)
        if self.piloted:
            return []
        if proposed is None:
            return [f"what to do: {remedy}"]
        line, spec = proposed[0], proposed[1]
        # Rates alone are proposed if weights are frozen, as below adapters, where a norm would change the base.
        if re.search(r"\bqk_clip\b", spec):
            line += _WHY
        # A launcher's own command is not known here, so only its change can be said.
        command = f"restart it with --apply {spec} before the --"
        if not self.launched:
            applied = [*self.watch_words[:-1], "--apply", spec, "--", *self.command]
            command = shlex.join(["qkeel", *applied])
        return [
            f"to fix it: {command}",
            f"or in the script, after the optimizer is created: {line}",
        ]


# In the workers of torchrun, this variable holds the command that was typed after `qkeel watch --`.
TYPED = "QKEEL_TYPED_COMMAND"
_APPLY = re.compile(r'qkeel\.apply\(model, "([^"]+)", (?:optimizer|\[)[^)]*\)')
_WHY = "  (the forward pass stays as it is, so a checkpoint can be resumed; in a new run, try qk_norm first)"


PAGE = "report.html"
# Between two versions of the page during a run, at least.
PAGE_SECONDS = 30.0
# Of a run's time at most is spent on versions of its page.
PAGE_SHARE = 0.01


@final
class MessageSink(Sink):
    """Prints the directory of the run, the messages of alarms and, at the end, the last measured values, and keeps the
    run's page up to date.

    Alarms with the same cause are grouped: the first severe alarm says what to do, and later alarms are only reported.
    If there are several alarms with the same cause at one step, only the most severe is printed.
    """

    def __init__(
        self, run: RunDirectorySink, writer: MessageWriter, *, shown: Path, fix: Fix
    ) -> None:
        self.run, self.writer, self.fix = run, writer, fix
        self._shown = shown
        # The latest of each phase.
        self._samples: dict[Phase, Sample] = {}
        self._alarms: list[Alarm] = []
        self._fixed: set[str] = set()
        self._model = ""
        self._next_page = time.monotonic() + PAGE_SECONDS
        # Where the page is.
        self._page_told = False

    @property
    def last(self) -> int | None:
        """The last measured step."""
        sample, _ = shown_samples(self._samples)
        return None if sample is None else sample.step

    @property
    def place(self) -> str:
        """The directory, as the user wrote it."""
        return str(self._shown.with_name((self.run.path or self.run.asked).name))

    def open(self, about: Mapping[str, Any]) -> None:
        """Prints what is watched and where the records are written."""
        self._model = str(about["model"])
        sites, missed = len(about.get("sites") or ()), len(about.get("missed") or ())
        layers = f"the attention of {self._model}"
        if sites:
            number = f"{sites} of {sites + missed}" if missed else f"{sites}"
            noun = "layer" if sites + missed == 1 else "layers"
            layers = f"{number} attention {noun} of {self._model}"
        if self.fix.applied:
            layers += f" with {self.fix.applied} applied"
        elif about.get("remedies"):
            # Which the script has applied itself.
            layers += f" with {'+'.join(about['remedies'])} active"
        self.writer(f"watching {layers}, run {self.place}")

    def write(self, sample: Sample) -> None:
        """Prints nothing, but keeps the sample for `summary` and, from time to time, writes the page."""
        self._samples[sample.phase] = sample
        if time.monotonic() >= self._next_page:
            self.write_page(refresh=PAGE_SECONDS)

    def alarm(self, alarm: Alarm) -> None:
        """Prints one line and, for the first alarm that needs action, also what to do and what that would do to the head.
        The page says how the number has grown."""
        earlier = [x for x in self._alarms if x.cause == alarm.cause]
        self._alarms.append(alarm)
        # Of one step, the most severe alarm comes first, and the others say the same.
        if any(x.step == alarm.step for x in earlier):
            return
        self.writer(f"{alarm.heading}: {alarm.meaning}")
        if alarm.severity is not Severity.NOTICE and alarm.remedy not in self._fixed:
            self._fixed.add(alarm.remedy)
            for line in filter(None, [*self.fix.lines(alarm.remedy), alarm.effect]):
                self.writer(line)

    def event(self, event: Mapping[str, Any]) -> None:
        """Prints the text of an event, if it has one."""
        if "text" in event:
            self.writer(str(event["text"]))

    def close(self, complete: bool) -> None:
        """Does nothing, because `summary()` may still be called."""

    def write_page(self, *, refresh: float | None = None) -> None:
        """Writes the page of the run into its directory. If this fails, training goes on as it would otherwise.

        Args:
            refresh: seconds after which a browser loads the page again; None for the page of a run that has ended.
        """
        assert self.run.path is not None
        started = time.monotonic()
        try:
            write(self.run.path, self.run.path / PAGE, refresh=refresh)
        # Whatever goes wrong with a page must not end the training, nor be tried again after every record.
        except Exception as error:
            self.writer(f"no page could be written: {type(error).__name__}: {error}")
            self._next_page = math.inf
            return
        ended = time.monotonic()
        self._next_page = ended + max(PAGE_SECONDS, (ended - started) / PAGE_SHARE)
        if refresh is None or not self._page_told:
            self.writer(f"page {Path(self.place, PAGE)}")
            self._page_told = True

    def summary(self) -> None:
        """Prints the last measured values, layer by layer, the number of alarms, and the verdict of `qkeel check`."""
        sample, note = shown_samples(self._samples, self._model)
        if sample is not None:
            table = sample_table(sample, note=note, root=self._model)
            for line in table.splitlines():
                self.writer(line)
        counts = Counter(alarm.severity for alarm in self._alarms)
        alarms = [f"{counts[x]} {x}" for x in reversed(Severity) if counts[x]]
        self.writer(f"alarms: {', '.join(alarms) or 'none'}")
        if self.run.path is not None and is_run(self.run.path):
            self.writer(str(check(self.run.path)))


@final
class MessageWriter(Handle):
    """Writes lines, and qkeel's own warnings as one line each, to the original stderr of the process.

    With several processes only rank 0 prints messages, but all print warnings; forked processes print neither.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._stream, self._pid = sys.stderr, os.getpid()
        self._plain = warnings.showwarning
        warnings.showwarning = self._show
        super().__init__(self._stop)

    def _show(
        self, message: Warning | str, category: type[Warning], *location: Any
    ) -> None:
        if not issubclass(category, QkeelWarning):
            self._plain(message, category, *location)
        elif self.here and not issubclass(category, AlarmWarning):
            # Alarms are printed separately.
            rank = f" (rank {self.rank})" if self.rank else ""
            self._print(f"warning{rank}: {' '.join(str(message).split())}")

    @property
    def here(self) -> bool:
        """Returns whether this is the process in which the run began, not one that the script has forked."""
        return os.getpid() == self._pid

    def __call__(self, line: str) -> None:
        """Prints the line, on rank 0."""
        if self.rank == 0:
            self._print(line)

    def _print(self, line: str) -> None:
        """Prints at the beginning of a line, even if a progress bar has left the cursor in the middle of one."""
        # a script without bars need not wait for it.
        bars = sys.modules.get("tqdm.std")
        # tqdm keeps the bars that are on the screen in a private set, which has no public counterpart.
        is_shown = bars is not None and bool(vars(bars.tqdm).get("_instances"))
        text = f"qkeel: {line}"
        # The script may have closed the stream, or the reader of a pipe may be gone, which must not end the watch.
        with contextlib.suppress(OSError, ValueError):
            if bars is not None and is_shown and self._stream.isatty():
                # Clears the bars and redraws them below.
                bars.tqdm.write(text, file=self._stream)
            else:
                print(f"\n{text}" if is_shown else text, file=self._stream, flush=True)

    def _stop(self) -> None:
        warnings.showwarning = self._plain
