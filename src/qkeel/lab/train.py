"""One training run in one run directory; killed at any instant, it goes on to the bit-identical result."""

from __future__ import annotations

import time
from pathlib import Path

from qkeel.errors import RunDirectoryError
from qkeel.lab.config import RunConfig
from qkeel.lab.model import check, resolve, threads
from qkeel.lab.session import Measured, Session, Watcher, claim, mark_failed
from qkeel.lab.stack import Single, fused
from qkeel.lab.tasks import load_task
from qkeel.lab.trainer import Trainer
from qkeel.records import RunDirectory, RunStatus


def run(
    config: RunConfig,
    directory: str | Path,
    *,
    command: str = "",
    watcher: Watcher | None = None,
    wait: float = 0.0,
) -> RunDirectory:
    """Train, evaluate and record one configuration; a finished run is not run again.

    Args:
        directory: new or empty, or one that this configuration was run in before; then it goes on from there.
        command: what the user typed, for the record.
        wait: seconds to wait for another process that holds the directory.

    Raises: RunDirectoryError if the directory is of another run, in use, damaged or not writable; DataError if
        the corpus cannot be read; InvalidValueError and UnknownNameError for a configuration that cannot be run.
    """
    config = resolve(config)
    check(config)
    load_task(config)
    place = RunDirectory(Path(directory))
    with place.lock(wait), threads(config.threads):
        claim(place, config)
        if place.status is not RunStatus.DONE:
            try:
                session = Session(config, place, watcher or Watcher())
                there = session.prepare(command)
                # Computed as in a stack, so that it has the numbers that it would have there.
                computing = Single(session.trainer) if fused(config) else session.trainer
                if not there:
                    session.record(None, None, _measured(session, computing))
                _train(session, computing)
            except RunDirectoryError:
                raise
            except Exception:
                mark_failed(place)
                raise
    return place


def _train(session: Session, computing: Trainer | Single) -> None:
    """The steps that are left, then the summary."""
    while not session.over:
        start = time.perf_counter()
        loss, norm = computing.step(session.step)
        session.step += 1
        if session.is_logged or session.is_saved:
            loss = float(loss)  # an accelerator may be steps behind
        session.took(time.perf_counter() - start)
        if session.is_logged:
            numbers = float(loss), float(norm)
            session.record(*numbers, _measured(session, computing, *numbers))
        stop = not session.over and session.watcher.should_stop()
        if stop or (session.is_saved and not session.stopped):
            session.save()
        if stop:
            raise KeyboardInterrupt
    session.finish()


def _measured(session: Session, computing: Trainer | Single, *numbers: float) -> Measured:
    """What a record of the step that is done holds beside these numbers."""
    return Measured(computing.probe(), computing.evaluate() if session.wants_held(*numbers) else {})
