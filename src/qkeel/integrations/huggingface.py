"""The Trainer of transformers: watch while it trains, and put the numbers into its logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, final

import safetensors.torch
import torch
from torch import nn
from torch.optim import Optimizer

from qkeel.autopilot import Autopilot, Policy, attach, policy
from qkeel.errors import InvalidTypeError, missing
from qkeel.monitor import DEFAULT, Alarm, Cadence, Rule, Sample, Sink
from qkeel.monitor.measure.query_mask import Given
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.watch import watch
from qkeel.records import layer_fields, write_bytes

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise missing("qkeel.integrations.huggingface", "'qkeel[hf]'") from error


@final
class QkeelCallback(TrainerCallback):
    """Watches from the first to the last step of `trainer.train()`; training is bit for bit what it is without.

    `QkeelCallback(every=50).attach(trainer)` puts it before the reporters, so that they get the numbers in the
    Trainer's logs (attn/max_logit, attn/entropy, ...). Given as `callbacks=[QkeelCallback()]` it comes after them: then
    the numbers are in `trainer.state.log_history`, on the progress bar and in its own sinks, but not in the reporters.

    With `autopilot` the callback also holds the logits of the heads that need it (`qkeel.autopilot`), and is bit for
    bit the training without it until its first action. Its state is saved next to each checkpoint and taken up again
    where the training is resumed from one.
    """

    def __init__(
        self,
        *,
        every: int | Cadence = 50,
        sinks: Sink | str | Path | Sequence[Sink | str | Path] = (),
        rules: Sequence[Rule] = DEFAULT,
        query_mask: Given | None = "attention_mask",
        per_layer: bool = False,
        autopilot: bool | str | Policy = False,
    ) -> None:
        """See `qkeel.watch` for every, sinks, rules and query_mask; per_layer: log each layer too; autopilot: true, or
        its policy.
        """
        self.monitor: Monitor | None = None
        self.pilot: Autopilot | None = None
        self._policy: str | Policy | Literal[False] = "ladder" if autopilot is True else autopilot
        if self._policy is not False:
            policy(self._policy)
        self._every, self._rules, self._query_mask, self._per_layer = every, rules, query_mask, per_layer
        self._sinks = [sinks] if isinstance(sinks, (Sink, str, Path)) else list(sinks)
        self._latest = _Latest()

    def attach(self, trainer: Trainer) -> Self:
        """Take part in this trainer, before its reporters."""
        if not isinstance(trainer, Trainer):
            raise InvalidTypeError(f"expected a transformers.Trainer, got {type(trainer).__name__}")
        handler = trainer.callback_handler
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]
        return self

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start watching; a training that is resumed goes on counting where it stood."""
        self._stop(complete=False)  # of a training that was stopped by an error
        model: nn.Module = kwargs["model"]
        optimizer: Optimizer = kwargs["optimizer"]
        self._latest = _Latest()
        self.monitor = watch(
            model,
            optimizer,
            every=self._every,
            sinks=[*self._sinks, self._latest],
            rules=self._rules,
            query_mask=self._query_mask,
        )
        self.monitor.steps = state.global_step
        if self._policy is not False:
            saved = _saved(args, state) if state.global_step else None
            example = None if saved is None else _example(kwargs.get("train_dataloader"), model)
            self.pilot = attach(self.monitor, optimizer, policy=self._policy, example=example)
            if saved is not None and saved.exists():
                self.pilot.load_state_dict(safetensors.torch.load_file(saved))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Save the state of the autopilot with the checkpoint."""
        place = _saved(args, state)
        if self.pilot is not None and state.is_world_process_zero and place.parent.is_dir():
            write_bytes(place, safetensors.torch.save(self.pilot.state_dict()))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        """Add what was measured since the last log of training."""
        if self.monitor is None or logs is None or "loss" not in logs:
            return
        sample = self.monitor.sample and self._latest.take()
        if sample is None:
            return
        found = sample.summaries() if self._per_layer else sample.summaries(per_layer=())
        shown = found if self._per_layer else {k: v for k, v in found.items() if k.rpartition("/")[2] in layer_fields()}
        logs |= shown
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1] |= shown  # copied before the callbacks were asked

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Stop watching."""
        self._stop(complete=True)

    def _stop(self, *, complete: bool) -> None:
        watching = self.monitor if self.pilot is None else self.pilot
        if watching is not None:
            watching.close(complete=complete)


def _saved(args: TrainingArguments, state: TrainerState) -> Path:
    """The file of the autopilot in the checkpoint of this step, whose name the Trainer gives."""
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / "qkeel_autopilot.safetensors"


def _example(loader: Any, model: nn.Module) -> object:
    """Two examples of the training data as the model takes them, drawn without moving a random stream."""
    try:
        with torch.random.fork_rng():
            found = loader.collate_fn([loader.dataset[0], loader.dataset[1]])
    except (AttributeError, IndexError, TypeError):  # no dataset with numbers
        return None
    device = next(model.parameters()).device
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in found.items()}


@final
class _Latest(Sink):
    """Keeps the last sample of training until it is asked for."""

    def __init__(self) -> None:
        self._sample: Sample | None = None

    def open(self, about: Mapping[str, object]) -> None:
        """Nothing to open."""

    def write(self, sample: Sample) -> None:
        """Remember it."""
        if sample.phase == "train":
            self._sample = sample

    def alarm(self, alarm: Alarm) -> None:
        """The monitor has warned already."""

    def close(self, complete: bool) -> None:
        """Nothing to close."""

    def take(self) -> Sample | None:
        """The sample, once."""
        sample, self._sample = self._sample, None
        return sample
