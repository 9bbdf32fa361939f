"""The Trainer of transformers: watch while it trains, and give the numbers to its reporters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import final

import safetensors.torch
import torch
from torch import nn
from torch.optim import Optimizer

from qkeel.autopilot import Policy, attach
from qkeel.capture.example import same_random_streams
from qkeel.errors import caution, needed
from qkeel.frames import Foreign
from qkeel.integrations.watched_training import CALLBACK_CADENCE, Sinks, WatchedTraining
from qkeel.monitor import Cadence, Rule
from qkeel.monitor.measure.query_mask import Given
from qkeel.patching.compiler_state import running_frames
from qkeel.records import layer_fields, write_bytes

with needed("qkeel.integrations.huggingface", "'qkeel[hf]'"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

_NO_TRAINER = (
    "no transformers.Trainer calls this callback, so no reporter gets its numbers; they are in state.log_history and "
    "in its own sinks"
)


@final
class QkeelCallback(WatchedTraining, TrainerCallback):
    """Watches from the first to the last step of `trainer.train()`; training is bit for bit what it is without.

    `Trainer(callbacks=[QkeelCallback()])` is all. What is measured at optimizer step s goes to every reporter of the
    Trainer (TensorBoard, W&B, MLflow, …) as a log of its own with global step s, however often the Trainer itself
    logs, and into `trainer.state.log_history`. The last step of the training is always measured.

    With `autopilot` the callback also holds the logits of the heads that need it (`qkeel.autopilot`), and is bit for
    bit the training without it until its first action. Its state is saved next to each checkpoint and taken up again
    where the training is resumed from one.

    For every, sinks, rules and query_mask see `qkeel.watch`; by default every 50th step is measured, every 5th of the
    first 20 and while logits are changing. per_layer: log a series for each layer (attn/layer_07/max_logit) besides
    those of the model (attn/max_logit); W&B shows both under train/. autopilot: true, or its policy.
    """

    def __init__(
        self,
        *,
        every: int | Cadence = CALLBACK_CADENCE,
        sinks: Sinks = (),
        rules: Sequence[Rule] | None = None,
        query_mask: Given | None = "attention_mask",
        per_layer: bool = True,
        autopilot: bool | str | Policy = False,
    ) -> None:
        super().__init__(every, sinks, rules, query_mask, autopilot)
        self._per_layer = per_layer
        self._handler: CallbackHandler | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Foreign
    ) -> None:
        """Start watching; a training that is resumed goes on counting where it was."""
        self.close(complete=False)  # of a training that was stopped by an error
        model: nn.Module = kwargs["model"]
        optimizer: Optimizer = kwargs["optimizer"]
        self._handler = _calling_handler(self)
        if self._handler is None:
            caution(_NO_TRAINER)
        monitor = self._begin(model, optimizer, state.global_step)
        if self._policy is not False:
            saved = _saved(args, state) if state.global_step else None
            example = None if saved is None else _example(kwargs.get("train_dataloader"), model)
            self.pilot = attach(monitor, optimizer, policy=self._policy, example=example)
            if saved is not None and saved.exists():
                self.pilot.load_state_dict(safetensors.torch.load_file(saved))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Save the state of the autopilot with the checkpoint."""
        place = _saved(args, state)
        if self.pilot is not None and state.is_world_process_zero and place.parent.is_dir():
            write_bytes(place, safetensors.torch.save(self.pilot.state_dict()))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Count as the Trainer does, steps that a GradScaler skips included, and measure the last step."""
        if self.monitor is not None:
            self.monitor.steps = max(self.monitor.steps, state.global_step)
            if state.global_step + 1 == state.max_steps:
                self.monitor.measure_next()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Give the reporters what has arrived from the device by now; where training ends early, measure its end."""
        if self.monitor is not None and control.should_training_stop:
            self.monitor.training_over()
        self._send(args, state, control)

    on_epoch_end = on_step_end

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Give the reporters all that was measured: the Trainer logs for the last time before they close."""
        if self.monitor is not None and self.monitor.sample is not None:  # asking for the sample waits for all of them
            self._send(args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Stop watching."""
        self.close(complete=True)

    def _send(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        for sample in self._queue.take():
            found = sample.summaries(None if self._per_layer else ())
            if not self._per_layer:
                found = {key: v for key, v in found.items() if key.rpartition("/")[2] in layer_fields()}
            then = copy.copy(state)
            then.global_step = sample.step
            state.log_history.append({**found, "step": sample.step})
            if self._handler is not None:
                # A log resets what the control asks for; the Trainer has not acted on its own yet.
                self._handler.on_log(args, then, copy.copy(control), found)


def _saved(args: TrainingArguments, state: TrainerState) -> Path:
    """The file of the autopilot in the checkpoint of this step, whose name the Trainer gives."""
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / "qkeel_autopilot.safetensors"


def _example(loader: Foreign, model: nn.Module) -> object:
    """Two examples of the training data as the model takes them, drawn without moving a random stream."""
    try:
        with same_random_streams():
            found = loader.collate_fn([loader.dataset[0], loader.dataset[1]])
    except (AttributeError, IndexError, TypeError):  # no dataset with numbers
        return None
    device = next(model.parameters()).device
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in found.items()}


def _calling_handler(callback: TrainerCallback) -> CallbackHandler | None:
    """The handler that is calling this callback: the Trainer gives its callbacks no other way to each other."""
    for frame in running_frames():
        owner = frame.f_locals.get("self")
        if isinstance(owner, CallbackHandler) and any(one is callback for one in owner.callbacks):
            return owner
    return None
