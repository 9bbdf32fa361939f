"""The Trainer of transformers: watch while it trains, and put the numbers into its logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, final

from torch import nn
from torch.optim import Optimizer

from qkeel.errors import InvalidTypeError, missing
from qkeel.monitor import DEFAULT, Alarm, Cadence, Rule, Sample, Sink
from qkeel.monitor.measure.query_mask import Given
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.watch import watch
from qkeel.records import layer_fields

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
    """

    def __init__(
        self,
        *,
        every: int | Cadence = 50,
        sinks: Sink | str | Path | Sequence[Sink | str | Path] = (),
        rules: Sequence[Rule] = DEFAULT,
        query_mask: Given | None = "attention_mask",
        per_layer: bool = False,
    ) -> None:
        """See `qkeel.watch` for every, sinks, rules and query_mask; per_layer: log each layer too."""
        self.monitor: Monitor | None = None
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
        if self.monitor is not None:
            self.monitor.close(complete=complete)


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
