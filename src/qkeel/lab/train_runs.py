"""The training loop for one run or a stack of runs, each with its own directory.

If a run is killed at any moment, it can be resumed and produces a bit-identical result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import final

from qkeel.errors import RunDirectoryError, caution
from qkeel.lab.build_run import check, resolve, threads
from qkeel.lab.config import RunConfig
from qkeel.lab.run_record import RunRecord, Watcher, claim, mark_failed
from qkeel.lab.tasks import load_task
from qkeel.lab.training import TrainingBackend, choose_arithmetic, train_step
from qkeel.records import RunDirectory, RunStatus


def run(
    config: RunConfig, directory: str | Path, *, command: str = "", watcher: Watcher | None = None, wait: float = 0.0
) -> RunDirectory:
    """Trains, evaluates and records one configuration; a finished run is not repeated.

    >>> import tempfile
    >>> place = run(RunConfig(steps=1, eval_sequences=1), tempfile.mkdtemp())
    >>> place.status.name
    'DONE'

    Args:
        config: the configuration.
        directory: a new or empty directory, or the directory of an earlier run of this configuration, which is then
            resumed.
        command: the user's command line, which is recorded.
        watcher: callbacks that follow the run.
        wait: the number of seconds to wait for another process that uses the directory.

    Raises:
        RunDirectoryError: the directory belongs to another run, is in use, is damaged or is not writable.
        DataError: the corpus cannot be read.
        InvalidValueError: the configuration cannot be run.
        UnknownNameError: the configuration contains an unknown name.
    """
    (error,) = train_runs([config], [directory], command=command, watcher=watcher, wait=wait)
    if error is not None:
        raise error
    return RunDirectory(Path(directory))


def train_runs(
    configs: Sequence[RunConfig],
    directories: Sequence[str | Path],
    *,
    command: str = "",
    watcher: Watcher | None = None,
    wait: float = 0.0,
) -> list[Exception | None]:
    """Trains runs as one stack, with the same results as `run`, and returns each run's error, or None.

    The runs may be at different steps, because each continues from its own checkpoint. A run that fails or diverges
    does not affect the other runs. If the stack itself cannot be built or fails, each run continues alone.

    Args:
        configs: configurations that differ only in seed, steps, rates and decay; see `plan_stacks`.
        directories: see `run`.
        command: see `run`.
        watcher: see `run`.
        wait: see `run`.

    Raises:
        QkeelError: the configuration cannot be run, as for `run`; no directory has been changed.
    """
    configs = [resolve(config) for config in configs]
    check(configs[0])
    load_task(configs[0])
    loop = _Loop(configs, [Path(directory) for directory in directories], watcher or Watcher())
    with ExitStack() as locks, threads(configs[0].threads):
        loop.open(locks, wait, command)
        left = loop.train()
    for i in left:
        own = train_runs([configs[i]], [directories[i]], command=command, watcher=watcher, wait=wait)
        loop.errors[i] = own[0]
    return loop.errors


@final
class _Loop:
    """Runs that train together: the records of started runs by index, and the indices of the runs with steps left."""

    def __init__(self, configs: Sequence[RunConfig], directories: Sequence[Path], watcher: Watcher) -> None:
        self.configs, self.watcher = configs, watcher
        self.places = [RunDirectory(directory) for directory in directories]
        self.errors: list[Exception | None] = [None] * len(configs)
        self.records: dict[int, RunRecord] = {}
        self.live: list[int] = []
        self._last: tuple[list[int], TrainingBackend] | None = None

    def open(self, locks: ExitStack, wait: float, command: str) -> None:
        """Locks the directories and restores the checkpoints."""
        for i, place in enumerate(self.places):
            with self._own(i, marked=False):
                locks.enter_context(place.lock(wait))
                claim(place, self.configs[i])
                self.live += [] if place.status is RunStatus.DONE else [i]
        for i in list(self.live):
            with self._own(i):
                self.records[i] = RunRecord(self.configs[i], self.places[i], self.watcher, len(self.places))
                self.records[i].prepare(command, stacked=len(self.places))

    def train(self) -> list[int]:
        """Takes all remaining steps and writes the summaries. If the stack fails, returns the unfinished runs."""
        try:
            self._write_start()
            while self.live:
                self._finish([i for i in self.live if self.records[i].over])
                now = list(self.live)
                for i in now:
                    self.records[i].share(len(now))
                while now and self.live == now and not any(self.records[i].over for i in now):
                    self._step(now)
        except Exception as fault:
            if len(self.configs) > 1:
                left = list(self.live)
                caution(
                    f"{len(left)} runs train one by one, because their stack failed with {type(fault).__name__}: "
                    f"{fault}"
                )
                return left
            self._fail(0, fault)
        return []

    def _write_start(self) -> None:
        """Records the models before their first step. Runs with the same seed have equal weights, measured once."""
        fresh = [i for i in self.live if self.records[i].step == 0]
        firsts = {(self.configs[i].seed, self.configs[i].nudge): i for i in reversed(fresh)}
        if not fresh:
            return
        arithmetic = self._arithmetic(sorted(firsts.values()))
        starts = sorted(firsts, key=lambda start: firsts[start])
        measured = dict(zip(starts, zip(arithmetic.probe(), arithmetic.evaluate())))
        for i in fresh:
            with self._own(i):
                self.records[i].write(None, *measured[self.configs[i].seed, self.configs[i].nudge])

    def _step(self, now: list[int]) -> None:
        """Takes one step of all runs, and records and saves the runs for which this is due."""
        records = [self.records[i] for i in now]
        arithmetic = self._arithmetic(now)
        if any(record.is_logged(record.step + 1) for record in records):
            arithmetic.remember()
        due = any(record.is_logged(record.step + 1) or record.is_saved(record.step + 1) for record in records)
        start = time.perf_counter()
        losses, norms = train_step(arithmetic, [record.step for record in records])
        # Reading values waits for the device, so they are read only when they are needed.
        numbers = list(zip(losses.tolist(), norms.tolist())) if due else []
        seconds = (time.perf_counter() - start) / len(now)
        for record in records:
            record.count(seconds)
        logged = {i: own for i, own in zip(now, numbers) if self.records[i].is_logged(self.records[i].step)}
        if logged:
            self._write(arithmetic, now, logged)
        stop = any(not self.records[i].over for i in self.live) and self.watcher.should_stop()
        for i in list(self.live):
            with self._own(i):
                record = self.records[i]
                if (stop or record.is_saved(record.step)) and not record.stopped:
                    record.save()
        if stop:
            raise KeyboardInterrupt

    def _write(self, arithmetic: TrainingBackend, now: Sequence[int], numbers: dict[int, tuple[float, float]]) -> None:
        """Records the step of the runs for which this is due; `numbers` are their losses and norms."""
        wanted = {i for i, own in numbers.items() if self.records[i].wants_held(*own)}
        probes = dict(zip(now, arithmetic.probe()))
        held = dict(zip(now, arithmetic.evaluate())) if wanted else {}
        for i, own in numbers.items():
            with self._own(i):
                self.records[i].write(own, probes[i], held[i] if i in wanted else {})

    def _finish(self, over: Sequence[int]) -> None:
        for i in over:
            with self._own(i):
                self.records[i].finish()
        self.live = [i for i in self.live if i not in over]

    def _arithmetic(self, numbers: list[int]) -> TrainingBackend:
        """Returns the backend for these runs, which is chosen again only when the set of runs changes."""
        if self._last is None or self._last[0] != numbers:
            self._last = numbers, choose_arithmetic([self.records[i].state for i in numbers])
        return self._last[1]

    @contextmanager
    def _own(self, i: int, *, marked: bool = True) -> Iterator[None]:
        """Confines an error raised inside to this run; `marked` also writes it to the run's directory."""
        try:
            yield
        except Exception as error:
            self._fail(i, error, marked=marked)

    def _fail(self, i: int, error: Exception, *, marked: bool = True) -> None:
        if marked and not isinstance(error, RunDirectoryError):
            mark_failed(self.places[i])
        self.errors[i] = error
        self.live = [j for j in self.live if j != i]
