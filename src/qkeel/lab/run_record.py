"""The measurements of a run, and the directory into which they are recorded.

Shapes: b sequences, t tokens, h heads; [layer, head] and [field, layer, head] for recorded statistics.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkeel import metrics
from qkeel.capture.calls import Seen, statistics
from qkeel.errors import DamagedFileError, RefusedError, RunDirectoryError
from qkeel.functional.bounds import repeat_groups
from qkeel.functional.class_statistics import ClassStats, TokenClasses
from qkeel.functional.norms import widest
from qkeel.functional.statistics import LogitStats
from qkeel.lab.build_run import learning_rate
from qkeel.lab.checkpoint import (
    RunCheckpoint,
    RunProgress,
    RunState,
    check_alike,
    environment,
    read_checkpoint,
    restore,
    save,
)
from qkeel.lab.config import RunConfig
from qkeel.lab.run_claims import Claim
from qkeel.lab.tasks import Examples, Task
from qkeel.monitor.logit_changes import change_between, frozen
from qkeel.options import Json
from qkeel.patching.torch_state import is_compiled
from qkeel.records import (
    STEP_FIELDS,
    HeadRecorder,
    RunDirectory,
    append_line,
    write_json,
    write_text,
)
from qkeel.sites import Tap
from qkeel.sites.observed_pass import MeasureCall

# Measurements on held-out text: the loss, and the attention statistics of the probe.

# The statistics that the lab records per head, which are a subset of records.HEAD_FIELDS.
PROBE_FIELDS = (
    "max_logit",
    "min_logit",
    "logit_spread",
    "entropy",
    "query_norm",
    "key_norm",
)


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeStatistics:
    """Statistics of the probe: values with names from records.STEP_FIELDS, and PROBE_FIELDS as [field, layer, head]."""

    record: dict[str, float]
    heads: np.ndarray


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Switches to evaluation mode without gradients or compiled graphs, and restores the training mode afterwards."""
    was_training = model.training
    compiled = is_compiled(model)
    eager = (
        torch.compiler.set_stance("force_eager")
        if compiled
        else contextlib.nullcontext()
    )
    # A compiled model would be compiled once more for evaluation mode, which takes longer than the measurement.
    model.eval()
    try:
        with torch.no_grad(), eager:
            yield
    finally:
        model.train(was_training)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross entropy in nats per target, for logits [... vocab] and targets [...]."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def heldout_numbers(
    model: nn.Module, examples: Examples, count: int, task: Task
) -> dict[str, float]:
    """Evaluates held-out examples, `count` at a time, and returns values with names from records.TASK_FIELDS.

    The result has val_loss, and the loss by kind of target and the accuracy if the task has them.
    """
    losses, hits, kinds = [], [], []
    with measuring(model):
        for chunk in examples.split(count):
            logits = model(chunk.inputs)
            kind = widest(logits.device)
            # The last chunk may be shorter, so means count by their length.
            losses.append(
                token_loss(logits, chunk.targets).to(kind) * len(chunk.inputs)
            )
            hits.append(
                (logits.argmax(-1) == chunk.targets).to(kind).mean() * len(chunk.inputs)
            )
            if chunk.kinds is not None:
                losses_of_targets = F.cross_entropy(
                    logits.flatten(0, -2).float(),
                    chunk.targets.flatten(),
                    reduction="none",
                )
                kinds.append(
                    torch.stack(
                        [chunk.kinds.flatten().to(kind), losses_of_targets.to(kind)]
                    )
                )
    loss, accuracy = (
        float(torch.stack(values).sum() / len(examples.inputs))
        for values in (losses, hits)
    )
    by_kind = _by_kind(torch.cat(kinds, 1).cpu(), task) if kinds else {"val_loss": loss}
    return {**by_kind, **({"val_accuracy": accuracy} if task.classifies else {})}


def _by_kind(kinds_and_losses: Tensor, task: Task) -> dict[str, float]:
    """Returns val_loss/KIND for each kind, computed from kinds and losses [2 n].

    val_loss is the mean over the kinds used in training.
    """
    kinds = kinds_and_losses[0].long()
    sums, counts = (
        torch.bincount(kinds, weights=kinds_and_losses[1]).tolist(),
        torch.bincount(kinds).tolist(),
    )
    present = {name: (loss, n) for name, loss, n in zip(task.kinds, sums, counts) if n}
    total, count = (
        sum(present[name][i] for name in task.trained if name in present)
        for i in (0, 1)
    )
    means = {f"val_loss/{name}": loss / n for name, (loss, n) in present.items()}
    return {"val_loss": total / count if count else math.nan, **means}


def remembered(model: nn.Module, inputs: Tensor) -> list[Seen]:
    """Returns the attention calls of one forward pass over the probe, for `logit_change` after a step."""
    kept: list[Seen] = []
    with measuring(model), _tapped(model, lambda call: kept.append(frozen(call))):
        model(inputs)
    return kept


def logit_change(before: Sequence[Seen], after: Sequence[Seen]) -> dict[str, float]:
    """Returns the root mean square change of the logits over all heads and layers, as {name: value}; {} if unknown."""
    try:
        changes = [change_between(*pair) for pair in zip(before, after)]
    except RefusedError:  # a position encoding that cannot be folded into q and k
        return {}
    return mean_change([change.rms for change in changes if change is not None])


def mean_change(by_layer: Sequence[Tensor]) -> dict[str, float]:
    """Returns the root mean square, over layers and heads, of the changes [h] of each layer; {} if there are none."""
    if not by_layer:
        return {}
    changes = torch.cat(list(by_layer))
    return {
        "logit_change": float(changes.to(widest(changes.device)).square().mean().sqrt())
    }


def probe(
    model: nn.Module,
    inputs: Tensor,
    classes: TokenClasses | None = None,
    before: Sequence[Seen] = (),
) -> ProbeStatistics:
    """Returns the attention statistics of one forward pass over the probe.

    Args:
        model: the model in training.
        inputs: the probe, which is the same for every step.
        classes: the token classes of the inputs, if statistics are also split by class.
        before: the calls `remembered` before the last step, if the change of the logits is recorded.
    """
    norms: list[Tensor] = []
    calls: list[Seen] = []

    def measure(call: Seen) -> LogitStats | None:
        calls.extend([call] if before else ())
        return statistics(
            call if classes is None else dataclasses.replace(call, classes=classes)
        )

    last_block = model.get_submodule("blocks")[-1]  # type: ignore[index]
    hook = last_block.register_forward_hook(
        lambda _, __, x: norms.append(x.float().norm(dim=-1))
    )
    try:
        with measuring(model), _tapped(model, measure) as tap:
            model(inputs)
            stats = list(tap.read().values())
    finally:
        hook.remove()
    summary = summed_up(stats)
    split = (
        {}
        if classes is None
        else by_class([s.classes for s in stats if s.classes], classes, norms[-1])
    )
    return ProbeStatistics(
        {**summary.record, **split, **logit_change(before, calls)}, summary.heads
    )


def summed_up(stats: Sequence[LogitStats]) -> ProbeStatistics:
    """Reduces the statistics of all layers to the recorded fields."""
    n_heads = len(stats[0].max_logit)
    # The value of a key head is repeated for each query head of its group.
    fields = [
        torch.stack([repeat_groups(_named(s, name), n_heads) for s in stats])
        for name in PROBE_FIELDS
    ]
    heads = torch.stack(fields).float().cpu().numpy()
    top = {
        name: torch.stack([_named(s, name).amax() for s in stats]).amax()
        for name in _LARGEST
    }
    low = torch.stack([s.min_logit.amin() for s in stats]).amin()
    entropy = torch.stack([s.entropy.mean() for s in stats]).mean()
    record = {name: float(value) for name, value in top.items()}
    return ProbeStatistics(
        {**record, "min_logit": float(low), "entropy": float(entropy)}, heads
    )


def _tapped(model: nn.Module, measure: MeasureCall) -> Tap:
    """Returns a tap for the lab's models, which contain only qkeel's own attention modules."""
    tap = Tap(model, measure=measure)
    tap.own_alone = True
    return tap


def by_class(
    stats: Sequence[ClassStats], classes: TokenClasses, norms: Tensor
) -> dict[str, float]:
    """Returns values of records.TASK_FIELDS by class and by pair of classes: means or maxima over layers and heads.

    `norms` are the norms [b t] of the hidden states after the last block. Classes absent from the probe get no values.
    """

    def mean(field: str, *at: int) -> float:
        by_layer = [_named(s, field)[:, *at].mean() for s in stats]
        return float(torch.stack(by_layer).mean())

    values: dict[str, float] = {}
    for i, name in enumerate(classes.names):
        mine = classes.query == i
        if bool(mine.any()):
            values[f"query_norm/{name}"] = mean("query_norm", i)
            values[f"key_norm/{name}"] = mean("key_norm", i)
            values[f"last_block_norm/{name}"] = float(norms[mine].mean())
    pairs = itertools.product(enumerate(classes.names), repeat=2)
    for (i, query), (j, key) in pairs:
        if all(bool(s.n_pairs[:, i, j].any()) for s in stats):
            largest_logits = torch.stack([s.max_logit[:, i, j] for s in stats])
            values[f"max_logit/{query}>{key}"] = float(largest_logits.amax())
            values[f"attention_mass/{query}>{key}"] = mean("mass", i, j)
            values[f"uniform_mass/{query}>{key}"] = mean("uniform_mass", i, j)
    return values


_LARGEST = ("max_logit", "max_abs_logit", "capped_max_logit")


def _named(stats: LogitStats | ClassStats, name: str) -> Tensor:
    """Returns the statistic with this recorded name."""
    value = getattr(stats, name)
    assert isinstance(value, Tensor)
    return value


# A run and its directory.


def summarize(config: RunConfig, records: Sequence[Json], cpu_seconds: float) -> Json:
    """Returns one value for each of records.TABLE_COLUMNS, from all lines of metrics.jsonl from step 0 to the end.

    They are followed by the last values of additional task fields.
    """
    first, last = records[0], records[-1]
    return {
        "remedy": config.remedy,
        "lr": config.optim.lr,
        "seed": config.seed,
        "steps": last["step"],
        "val_loss": last["val_loss"],
        "max_logit": largest(record["max_logit"] for record in records),
        "end_max_logit": last["max_logit"],
        "end_entropy": last["entropy"],
        "alarm_step": metrics.alarm_step(records),
        "collapsed": metrics.collapsed(
            last["entropy"], last["val_loss"], first["val_loss"]
        ),
        "cpu_seconds": round(cpu_seconds, 3),
        "run_id": config.run_id,
        "capped_max_logit": largest(record["capped_max_logit"] for record in records),
        "max_abs_logit": largest(record["max_abs_logit"] for record in records),
        "init_loss": first["val_loss"],
        "block": config.model.block,
        "optimizer": config.optim.name,
        "status": "done",
        **{name: value for name, value in last.items() if name not in STEP_FIELDS},
    }


def largest(values: Iterable[float]) -> float:
    """Returns the largest value that is not NaN; NaN if there is none."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Callbacks that follow a run while it trains.

    >>> Watcher(should_stop=lambda: True).should_stop()
    True
    """

    #: called with every line of metrics.jsonl when it is written
    on_record: Callable[[Mapping[str, object]], None] = lambda record: None
    #: called after every step; if it returns True, a checkpoint is written and KeyboardInterrupt is raised
    should_stop: Callable[[], bool] = lambda: False


def mark_failed(directory: RunDirectory) -> None:
    """Writes the traceback of the current error into the directory."""
    # E.g. a full disk; the original error is reported anyway.
    with contextlib.suppress(RunDirectoryError):
        write_text(directory.path / "FAILED", traceback.format_exc())


@final
class RunRecord:
    """A run in memory and the directory into which it is recorded; `step` is the number of completed steps."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, watcher: Watcher, claim: Claim
    ) -> None:
        self.config, self.directory = config, directory
        self.watcher, self._claim = watcher, claim
        self._clock = time.process_time()
        self.state = RunState(config)
        self.step = 0
        # True after a loss or gradient that is not finite.
        self.stopped = False
        # Steps and wall time since the last record.
        self._trained, self._seconds = 0, 0.0
        # Number of skipped steps already reported.
        self._skipped = 0

    def prepare(self, command: str) -> None:
        """Sets the directory and the weights to the step of the checkpoint, or to step 0 if there is no record.

        Raises:
            RunDirectoryError: the checkpoint or a file on which it relies is damaged, which a kill cannot cause.
        """
        about = environment(
            self.config, self.state.task.corpus, self.state.model, command
        )
        try:
            checkpoint = self._checkpoint(about)
        except DamagedFileError as damage:
            raise RunDirectoryError(
                f"{str(damage).rstrip('.')}. Restore it, or delete {self.directory.path} to run again."
            ) from damage
        if checkpoint is None:
            self.directory.start_again()
            write_json(self.directory.path / "env.json", about)
        else:
            restore(self.directory, self.state, checkpoint)
        names, n_heads = self.state.attentions, self.config.model.n_heads
        # Named for an encoder with a decoder.
        layers = names if len(names) != self.config.model.n_layers else ()
        self.heads = HeadRecorder(
            self.directory.path, PROBE_FIELDS, len(names), n_heads, layers=layers
        )
        if checkpoint is not None:
            self.step = checkpoint.progress.step
            # Time goes on where the killed process was when it saved.
            self._clock -= checkpoint.progress.cpu_seconds
            self._skipped = self.state.skipped_steps
            self._event("resumed")

    @property
    def over(self) -> bool:
        """True if no steps are left or the training has stopped."""
        return self.stopped or self.step >= self.config.steps

    def is_logged(self, step: int) -> bool:
        """True if a step is recorded."""
        return step % self.config.log_every == 0 or step == self.config.steps

    def is_saved(self, step: int) -> bool:
        """True if a checkpoint is due at a step."""
        every = self.config.checkpoint_every
        return step == self.config.steps or bool(every and step % every == 0)

    def wants_held(self, *numbers: float) -> bool:
        """True if the record of this step includes held-out losses; `numbers` are its loss and gradient norm."""
        every = self.config.eval_every
        due = self.step in (0, self.config.steps) or bool(
            every and self.step % every == 0
        )
        return due or self._ends(numbers)

    def count(self, seconds: float) -> None:
        """Counts a completed step that took this many seconds."""
        self.step += 1
        if self.state.skipped_steps > self._skipped:
            self._skipped = self.state.skipped_steps
            # The scaler has backed off since; what is reported is the scale that overflowed.
            scale = (
                self.state.scaler.get_scale() / self.state.scaler.get_backoff_factor()
            )
            self._event(
                f"skipped: the loss or a gradient overflowed fp16 at loss scale {scale:g}"
            )
        self._trained, self._seconds = self._trained + 1, self._seconds + seconds

    def write(
        self,
        numbers: tuple[float, float] | None,
        probe: ProbeStatistics,
        held: Mapping[str, float],
    ) -> None:
        """Records the completed step; training stops if the loss or the gradient is not finite.

        Args:
            numbers: the loss of the batch and the norm of its gradient; None before the first step.
            probe: the statistics of the probe.
            held: the held-out losses; empty if they are not due.
        """
        # The bad step is recorded too, so that the page shows why training stopped.
        self._write(numbers, probe, held)
        if self._ends(numbers or ()):
            # No checkpoint is written, so a run that is killed here stops at the same step again.
            scale = " at any loss scale" if self.state.scaler.is_enabled() else ""
            self._event(f"stopped: the loss or the gradient is not finite{scale}")
            self.stopped = True

    def save(self) -> None:
        """Replaces the checkpoint after syncing all earlier records to the disk."""
        self._claim.check()
        # The checkpoint names the sizes of the files, so they must be on the disk before it is.
        self.directory.sync()
        save(
            self.directory,
            self.state,
            RunProgress(self.step, self._cpu_seconds(), self.directory.sizes()),
        )

    def finish(self) -> None:
        """Writes the summary and marks the run as done."""
        records = self.directory.metrics()
        self.directory.finish(summarize(self.config, records, self._cpu_seconds()))

    def _checkpoint(self, environment_here: Json) -> RunCheckpoint | None:
        """Reads the checkpoint, truncates the records to its step and checks them; None if there is no checkpoint.

        Raises:
            DamagedFileError: a file is damaged.
            RunDirectoryError: the run was computed differently.
        """
        directory = self.directory
        has_checkpoint = directory.checkpoint.exists()
        if has_checkpoint or (directory.path / "env.json").exists():
            check_alike(directory.path, directory.env(), environment_here)
        if not has_checkpoint:
            return None
        checkpoint = read_checkpoint(directory)
        step, sizes = checkpoint.progress.step, checkpoint.progress.sizes
        # What was written after the checkpoint is repeated bit for bit, so it is cut off first.
        directory.cut_to(sizes or {})
        directory.events()
        logged_steps = [step for step in range(step + 1) if self.is_logged(step)]
        for name, steps in (
            ("metrics.jsonl", [record["step"] for record in directory.metrics()]),
            ("heads.f32", directory.heads().steps.tolist()),
        ):
            if steps != logged_steps:
                raise DamagedFileError(
                    f"{directory.path / name} lacks records from before the checkpoint of step {step}, so it was "
                    "damaged."
                )
        return checkpoint

    def _ends(self, numbers: Sequence[float]) -> bool:
        """True if training must stop after these values. With a loss scale, individual steps may fail."""
        if self.state.scaler.is_enabled():
            return self.state.overflows
        return not all(map(math.isfinite, numbers))

    def _write(
        self,
        numbers: tuple[float, float] | None,
        probe: ProbeStatistics,
        held: Mapping[str, float],
    ) -> None:
        self._claim.check()
        config, state, step, held = self.config, self.state, self.step, dict(held)
        loss, norm = numbers or (None, None)
        trained = self._trained * config.data.batch * config.data.context
        scaling = {}
        if state.scaler.is_enabled():
            scaling = {
                "loss_scale": state.scaler.get_scale(),
                "skipped_steps": state.skipped_steps,
            }
        record = {
            "step": step,
            "tokens": step * config.data.batch * config.data.context,
            # `step` counts completed steps, and the rate is that of the last of them.
            "lr": learning_rate(config.optim, max(0, step - 1), config.steps),
            "train_loss": loss,
            "val_loss": held.pop("val_loss", None),
            "grad_norm": norm,
            "logit_change": None,
            **probe.record,
            **held,
            **scaling,
            "cpu_seconds": round(self._cpu_seconds(), 3),
            "tokens_per_second": trained / self._seconds
            if trained and self._seconds > 0
            else None,
        }
        self._trained, self._seconds = 0, 0.0
        self.heads.append(step, dict(zip(PROBE_FIELDS, probe.heads)))
        append_line(self.directory.path / "metrics.jsonl", record)
        self.watcher.on_record(record)

    def _event(self, text: str) -> None:
        append_line(
            self.directory.path / "events.jsonl", {"step": self.step, "event": text}
        )

    def _cpu_seconds(self) -> float:
        return time.process_time() - self._clock
