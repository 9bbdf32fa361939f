"""Runs that train as one stack, each in its own run directory as if it were alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import final

from qkeel.errors import RunDirectoryError, caution
from qkeel.lab.config import RunConfig
from qkeel.lab.model import check, resolve, threads
from qkeel.lab.session import Measured, Session, Watcher, claim, mark_failed
from qkeel.lab.stack import Stack
from qkeel.lab.train import run
from qkeel.records import RunDirectory, RunStatus


def run_together(
    configs: Sequence[RunConfig],
    directories: Sequence[str | Path],
    *,
    command: str = "",
    watcher: Watcher | None = None,
    wait: float = 0.0,
) -> list[Exception | None]:
    """As `run` for each of these, trained as one model; what was raised for each, None where it is done.

    The runs may be at different steps: each goes on from its own checkpoint. One that fails or diverges leaves the
    others alone. Where the stack itself cannot be made, or fails, each run goes on alone.

    Args:
        configs: that differ in learning rate and seed only, see `plan_stacks`. directories, command, watcher, wait: see
            `run`.
    """
    watcher = watcher or Watcher()
    together = _Together([resolve(config) for config in configs], [Path(d) for d in directories], command, watcher)
    with ExitStack() as locks, threads(configs[0].threads):
        together.open(locks, wait)
        try:
            together.train()
        except Exception as fault:  # of the stack: those of a run are kept for it
            left = list(together.live)
            caution(f"{len(left)} runs train one by one: their stack failed with {type(fault).__name__}: {fault}")
        else:
            left = []
    for i in left:
        with together.keeping(i):
            run(configs[i], directories[i], command=command, watcher=watcher, wait=wait)
    return together.errors


@final
class _Together:
    """Sessions that share a stack. `live` are the numbers of those with steps left."""

    def __init__(self, configs: list[RunConfig], directories: list[Path], command: str, watcher: Watcher) -> None:
        self.configs, self.command, self.watcher = configs, command, watcher
        self.places = [RunDirectory(directory) for directory in directories]
        self.errors: list[Exception | None] = [None] * len(configs)
        self.sessions: dict[int, Session] = {}
        self.live: list[int] = []

    @contextmanager
    def keeping(self, i: int) -> Iterator[None]:
        """What is raised is this run's, and the end of it."""
        try:
            yield
        except Exception as error:
            self.errors[i] = error
            self.live = [j for j in self.live if j != i]

    def open(self, locks: ExitStack, wait: float) -> None:
        """Take the directories, bring weights to where they were."""
        check(self.configs[0])
        for i, place in enumerate(self.places):
            with self.keeping(i):
                locks.enter_context(place.lock(wait))
                claim(place, self.configs[i])
                if place.status is RunStatus.DONE:
                    continue
                with self._failing(i):
                    session = Session(self.configs[i], place, self.watcher)
                    session.share(len(self.places))
                    session.prepare(self.command, stacked=len(self.places))
                    self.sessions[i] = session
                    self.live.append(i)

    def train(self) -> None:
        """Every step that is left, then the summaries."""
        self._begin()
        while self.live:
            self._end([i for i in self.live if self.sessions[i].over])
            for i in self.live:
                self.sessions[i].share(len(self.live))
            if self.live:
                now = list(self.live)
                stack = Stack([self.sessions[i].trainer for i in now])
                while self.live == now and not any(self.sessions[i].over for i in now):
                    self._step(stack, now)

    def _begin(self) -> None:
        """Record the models before their first step: runs of one seed begin with the same weights, measured once."""
        fresh = [i for i in self.live if self.sessions[i].step == 0 and not self.places[i].checkpoint.exists()]
        firsts = {self.configs[i].seed: i for i in reversed(fresh)}
        if not fresh:
            return
        stack = Stack([self.sessions[i].trainer for i in firsts.values()])
        measured = dict(zip(firsts, map(Measured, stack.probe(), stack.evaluate())))
        for i in fresh:
            with self.keeping(i), self._failing(i):
                self.sessions[i].record(None, None, measured[self.configs[i].seed])

    def _step(self, stack: Stack, now: Sequence[int]) -> None:
        """One step of all, and what follows it in each."""
        sessions = [self.sessions[i] for i in now]
        start = time.perf_counter()
        losses, norms = stack.step([session.step for session in sessions])
        seconds = (time.perf_counter() - start) / len(now)
        for session in sessions:
            session.step += 1
            session.took(seconds)
        numbers = list(zip(losses, norms))
        measured = _measured(stack, sessions, numbers)
        stop = not all(session.over for session in sessions) and self.watcher.should_stop()
        for i, session, (loss, norm) in zip(now, sessions, numbers):
            with self.keeping(i), self._failing(i):
                if session.is_logged:
                    assert measured is not None
                    session.record(loss, norm, measured[session])
                if (stop or session.is_saved) and not session.stopped:
                    session.save()
        if stop:
            raise KeyboardInterrupt

    def _end(self, over: Sequence[int]) -> None:
        for i in over:
            with self.keeping(i), self._failing(i):
                self.sessions[i].finish()
        self.live = [i for i in self.live if i not in over]

    @contextmanager
    def _failing(self, i: int) -> Iterator[None]:
        """As alone: what is no fault of the directory is told in it."""
        try:
            yield
        except RunDirectoryError:
            raise
        except Exception:
            mark_failed(self.places[i])
            raise


def _measured(
    stack: Stack, sessions: Sequence[Session], numbers: Sequence[tuple[float, float]]
) -> dict[Session, Measured] | None:
    """What the records of a step that some sessions have done hold; None where none is due."""
    logged = [session.is_logged for session in sessions]
    if not any(logged):
        return None
    wanted = [due and session.wants_held(*own) for due, session, own in zip(logged, sessions, numbers)]
    held = stack.evaluate() if any(wanted) else [{}] * len(sessions)
    found = zip(sessions, stack.probe(), held, wanted)
    return {session: Measured(seen, own if want else {}) for session, seen, own, want in found}
