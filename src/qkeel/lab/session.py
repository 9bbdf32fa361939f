"""One run and its directory: what is there already, what each step adds, and when it is over."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, final

from qkeel.errors import RunDirectoryError
from qkeel.lab.checkpoint import Progress, load, save
from qkeel.lab.config import RunConfig
from qkeel.lab.environment import environment
from qkeel.lab.evaluate import PROBE_FIELDS, Probe
from qkeel.lab.schedule import learning_rate
from qkeel.lab.summary import summarize
from qkeel.lab.throughput import peak, speed
from qkeel.lab.trainer import Trainer
from qkeel.records import HeadRecorder, RunDirectory, RunStatus, append_line, write_json, write_text


def _nothing(record: Mapping[str, Any]) -> None:
    return


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Who follows a run while it trains."""

    on_record: Callable[[Mapping[str, Any]], None] = _nothing
    """Called with every line of metrics.jsonl as it is written."""
    should_stop: Callable[[], bool] = lambda: False
    """Asked after every step; when true a checkpoint is written and KeyboardInterrupt raised."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What is told of the model beside the step's own numbers: the probe, and held-out numbers where they are due."""

    seen: Probe
    held: Mapping[str, float]


def claim(place: RunDirectory, config: RunConfig) -> None:
    """Make the directory this run's, or check that it is."""
    if place.status is RunStatus.MISSING or RunConfig.from_dict(place.config()).run_id != config.run_id:
        place.open(config.to_dict())
    (place.path / "FAILED").unlink(missing_ok=True)


def mark_failed(place: RunDirectory) -> None:
    """Leave the traceback of the error under way in the directory."""
    with contextlib.suppress(RunDirectoryError):  # a full disk is often why it failed; the error is on its way up
        write_text(place.path / "FAILED", traceback.format_exc())


@final
class Session:
    """A trainer and the directory it records into. `step` counts the optimizer's steps that are done.

    Several may train at once in one process, and share its time: each counts its part of it (`share`).
    """

    def __init__(self, config: RunConfig, place: RunDirectory, watcher: Watcher) -> None:
        self.config = config
        self.place = place
        self.watcher = watcher
        self._clock, self._spent, self._sharing = time.process_time(), 0.0, 1
        self.trainer = Trainer(config)
        self.heads = HeadRecorder(place.path, PROBE_FIELDS, config.model.n_layers, config.model.n_heads)
        self.step = 0
        self.stopped = False  # by a loss or gradient that is not finite
        self._trained, self._seconds = 0, 0.0  # steps and wall time since the last record

    def prepare(self, command: str, stacked: int = 1) -> bool:
        """Bring directory and weights to the same step, the checkpoint's or the beginning; whether there is one.

        Without a checkpoint the first record is to be written yet. `stacked` is how many runs train as one model.
        """
        about = environment(self.config, self.trainer.corpus, self.trainer.trained.model, command)
        if (self.place.path / "env.json").exists():
            self._same_corpus(about)
        else:
            write_json(self.place.path / "env.json", {**about, **({"stacked": stacked} if stacked > 1 else {})})
        if self.place.checkpoint.exists():
            self._resume()
            return True
        self.place.cut_back(-1)
        return False

    def share(self, sharing: int) -> None:
        """From now on the time of this process belongs to so many runs."""
        now = time.process_time()
        self._spent, self._clock = self._spent + (now - self._clock) / self._sharing, now
        self._sharing = sharing

    @property
    def over(self) -> bool:
        """Whether no step is left."""
        return self.stopped or self.step >= self.config.steps

    @property
    def is_logged(self) -> bool:
        """Whether the step that is done is recorded."""
        return self._is_logged(self.step)

    @property
    def is_saved(self) -> bool:
        """Whether a checkpoint of the step that is done is due."""
        every = self.config.checkpoint_every
        return self.step == self.config.steps or bool(every and self.step % every == 0)

    def wants_held(self, *numbers: float) -> bool:
        """Whether held-out numbers are part of the record of the step that is done; `numbers` are its others."""
        every = self.config.eval_every
        due = self.step in (0, self.config.steps) or bool(every and self.step % every == 0)
        return due or not _finite(*numbers)

    def took(self, seconds: float) -> None:
        """The step took so many seconds."""
        self._trained, self._seconds = self._trained + 1, self._seconds + seconds

    def record(self, loss: float | None, norm: float | None, measured: Measured) -> None:
        """Write the line and the heads of the step that is done; training stops at what is not finite.

        Args:
            loss, norm: of the step; None before the first.
        """
        self._write(loss, norm, measured)
        if not _finite(*(x for x in (loss, norm) if x is not None)):
            # No checkpoint of this: a run that is killed here stops here again.
            self._event("stopped: the loss or the gradient is not finite")
            self.stopped = True

    def save(self) -> None:
        """Replace the checkpoint."""
        save(self.place, self.trainer.trained, Progress(self.step, self._cpu_seconds()))

    def finish(self) -> None:
        """Write the summary: the run is done."""
        summary = summarize(self.config, self.place.metrics(), self._cpu_seconds())
        write_json(self.place.path / "summary.json", summary)
        write_text(self.place.path / "DONE", "")

    def _same_corpus(self, about: dict[str, Any]) -> None:
        before, now = (env["corpus"]["sha256"][:12] for env in (self.place.env(), about))
        if before != now:
            raise RunDirectoryError(
                f"{self.place.path} was begun on another text of {self.config.data.source}: its SHA-256 was {before}… "
                f"and is {now}…. Restore the text, or choose another directory; nothing was changed."
            )

    def _resume(self) -> None:
        done = load(self.place, self.trainer.trained)
        wanted = [step for step in range(done.step + 1) if self._is_logged(step)]
        for name, steps in (
            ("metrics.jsonl", [record["step"] for record in self.place.metrics()]),
            ("heads.f32", self.place.heads().steps.tolist()),
        ):
            if [step for step in steps if step <= done.step] != wanted:
                raise RunDirectoryError(
                    f"{self.place.path / name} lacks records from before the checkpoint of step {done.step}: the file "
                    f"was damaged. Delete {self.place.path} to run again, or restore the file."
                )
        self.place.cut_back(done.step)
        self.step, self._spent = done.step, self._spent + done.cpu_seconds
        self._event("resumed")

    def _is_logged(self, step: int) -> bool:
        return step % self.config.log_every == 0 or step == self.config.steps

    def _write(self, loss: float | None, norm: float | None, measured: Measured) -> None:
        config, step, held = self.config, self.step, dict(measured.held)
        record = {
            "step": step,
            "tokens": step * config.data.batch * config.data.context,
            "lr": learning_rate(config.optim, max(0, step - 1), config.steps),
            "train_loss": loss,
            "val_loss": held.pop("val_loss", None),
            "grad_norm": norm,
            **measured.seen.record,
            **held,
            "cpu_seconds": round(self._cpu_seconds(), 3),
            **self._speed(),
        }
        self.heads.append(step, measured.seen.heads)
        append_line(self.place.path / "metrics.jsonl", record)
        self.watcher.on_record(record)

    def _speed(self) -> dict[str, Any]:
        config, trainer = self.config, self.trainer
        tokens, seconds = self._trained * config.data.batch * config.data.context, self._seconds
        self._trained, self._seconds = 0, 0.0
        return speed(tokens, seconds, trainer.flops_per_token, peak(trainer.device, config.dtype))

    def _event(self, text: str) -> None:
        append_line(self.place.path / "events.jsonl", {"step": self.step, "event": text})

    def _cpu_seconds(self) -> float:
        return self._spent + (time.process_time() - self._clock) / self._sharing


def _finite(*numbers: float) -> bool:
    return all(map(math.isfinite, numbers))
