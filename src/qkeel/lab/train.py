"""One training run in one run directory; killed at any instant, it goes on to the bit-identical result."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from torch import Tensor

from qkeel.errors import RunDirectoryError
from qkeel.lab.checkpoint import Progress, load, save
from qkeel.lab.config import RunConfig
from qkeel.lab.environment import environment
from qkeel.lab.evaluate import PROBE_FIELDS
from qkeel.lab.model import check, resolve, threads
from qkeel.lab.schedule import learning_rate
from qkeel.lab.summary import summarize
from qkeel.lab.tasks import load_task
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
        _claim(place, config)
        if place.status is not RunStatus.DONE:
            try:
                session = _Session(config, place, watcher or Watcher())
                session.prepare(command)
                session.train()
            except RunDirectoryError:
                raise
            except Exception:
                _mark_failed(place)
                raise
    return place


def _claim(place: RunDirectory, config: RunConfig) -> None:
    """Make the directory this run's, or check that it is."""
    if place.status is RunStatus.MISSING or RunConfig.from_dict(place.config()).run_id != config.run_id:
        place.open(config.to_dict())
    (place.path / "FAILED").unlink(missing_ok=True)


def _mark_failed(place: RunDirectory) -> None:
    with contextlib.suppress(RunDirectoryError):  # a full disk is often why it failed; the error is on its way up
        write_text(place.path / "FAILED", traceback.format_exc())


@final
class _Session:
    """A trainer and the directory it records into."""

    def __init__(self, config: RunConfig, place: RunDirectory, watcher: Watcher) -> None:
        self.clock = time.process_time()
        self.config = config
        self.place = place
        self.watcher = watcher
        self.trainer = Trainer(config)
        self.heads = HeadRecorder(place.path, PROBE_FIELDS, config.model.n_layers, config.model.n_heads)
        self.done = Progress()
        self.trained, self.seconds = 0, 0.0  # steps and wall time since the last record

    def prepare(self, command: str) -> None:
        """Bring directory and weights to the same step: the checkpoint's, or the beginning."""
        about = environment(self.config, self.trainer.corpus, self.trainer.trained.model, command)
        if (self.place.path / "env.json").exists():
            self._same_corpus(about)
        else:
            write_json(self.place.path / "env.json", about)
        if self.place.checkpoint.exists():
            self._resume()
        else:
            self.place.cut_back(-1)
            self._record(0, None, None)

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
        self.done = done
        self._event(done.step, "resumed")

    def train(self) -> None:
        """The steps that are left, then the summary."""
        config = self.config
        for step in range(self.done.step, config.steps):
            start = time.perf_counter()
            loss, norm = self.trainer.step(step)
            done, due = step + 1, self._is_saved(step + 1)
            if due or self._is_logged(done):
                loss.item()  # an accelerator may be steps behind
            self.trained, self.seconds = self.trained + 1, self.seconds + time.perf_counter() - start
            if self._is_logged(done) and not self._record(done, loss, norm):
                # No checkpoint of this: a run that is killed here stops here again.
                self._event(done, "stopped: the loss or the gradient is not finite")
                break
            stop = done < config.steps and self.watcher.should_stop()
            if stop or due:
                save(self.place, self.trainer.trained, Progress(done, self._cpu_seconds()))
            if stop:
                raise KeyboardInterrupt
        summary = summarize(config, self.place.metrics(), self._cpu_seconds())
        write_json(self.place.path / "summary.json", summary)
        write_text(self.place.path / "DONE", "")

    def _is_saved(self, step: int) -> bool:
        every = self.config.checkpoint_every
        return step == self.config.steps or bool(every and step % every == 0)

    def _is_logged(self, step: int) -> bool:
        return step % self.config.log_every == 0 or step == self.config.steps

    def _record(self, step: int, loss: Tensor | None, norm: Tensor | None) -> bool:
        """Write the line and the heads of a step; False if training cannot go on."""
        config = self.config
        train_loss = None if loss is None else float(loss)
        grad_norm = None if norm is None else float(norm)
        fine = all(x is None or math.isfinite(x) for x in (train_loss, grad_norm))
        due = step in (0, config.steps) or bool(config.eval_every and step % config.eval_every == 0)
        seen = self.trainer.probe()
        held = self.trainer.evaluate() if due or not fine else {}
        record = {
            "step": step,
            "tokens": step * config.data.batch * config.data.context,
            "lr": learning_rate(config.optim, max(0, step - 1), config.steps),
            "train_loss": train_loss,
            "val_loss": held.pop("val_loss", None),
            "grad_norm": grad_norm,
            **seen.record,
            **held,
            "cpu_seconds": round(self._cpu_seconds(), 3),
            **self._speed(),
        }
        self.heads.append(step, seen.heads)
        append_line(self.place.path / "metrics.jsonl", record)
        self.watcher.on_record(record)
        return fine

    def _speed(self) -> dict[str, Any]:
        config, trainer = self.config, self.trainer
        tokens, seconds = self.trained * config.data.batch * config.data.context, self.seconds
        self.trained, self.seconds = 0, 0.0
        return speed(tokens, seconds, trainer.flops_per_token, peak(trainer.device, config.dtype))

    def _event(self, step: int, text: str) -> None:
        append_line(self.place.path / "events.jsonl", {"step": step, "event": text})

    def _cpu_seconds(self) -> float:
        return self.done.cpu_seconds + time.process_time() - self.clock
