"""Training loops of others under a monitor: what their callbacks share, and accelerate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, final

from torch import nn
from torch.optim import Optimizer

from qkeel.autopilot import Autopilot, Policy, policy
from qkeel.errors import InvalidTypeError
from qkeel.frames import Foreign
from qkeel.monitor import Adaptive, Alarm, Cadence, Rule, Sample, Sink
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.token_classes import MaskSource
from qkeel.monitor.watch import watch

# Accelerate: summaries to every tracker of an Accelerator, by its own `log`.


@final
class AccelerateSink(Sink):
    """Calls `accelerator.log(numbers, step)` for each sample: `watch(model, optimizer, sinks=AccelerateSink(acc))`.

    W&B drops a step that lies before the last one its run was given; where steps of another count go there,
    `sinks="wandb"` joins the tracker's run with an axis of its own.
    """

    def __init__(self, accelerator: Foreign) -> None:
        """Takes the `accelerate.Accelerator`, whose `init_trackers` has been called before the first sample."""
        if not callable(vars(type(accelerator)).get("log")):
            raise InvalidTypeError(f"expected an accelerate.Accelerator, got {type(accelerator).__name__}")
        self.accelerator = accelerator

    def open(self, about: Mapping[str, object]) -> None:
        """Nothing to open: trackers have been opened by `init_trackers`."""

    def write(self, sample: Sample) -> None:
        """One log call."""
        self.accelerator.log(sample.summaries(), step=sample.step)

    def alarm(self, alarm: Alarm) -> None:
        """A one at the alarm's step: trackers of Accelerate have no alerts in common."""
        self.accelerator.log({f"alarms/{alarm.rule}": 1.0}, step=alarm.step)

    def close(self, complete: bool) -> None:
        """Nothing to close: `end_training` is the owner's call."""


# The part that the callbacks of trainers share: a training under watch, and its samples not passed on yet.

CALLBACK_CADENCE = Adaptive(least=5, most=50, change=0.25, start=20)
Sinks = Sink | str | Path | Sequence[Sink | str | Path]


@final
class SampleQueue(Sink):
    """Keeps the training samples until they are taken, each with its step; only the first process has any."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def open(self, about: Mapping[str, object]) -> None:
        """Nothing to open."""

    def write(self, sample: Sample) -> None:
        """Keep it."""
        if sample.phase == "train":
            self._samples.append(sample)

    def alarm(self, alarm: Alarm) -> None:
        """The monitor has warned already."""

    def close(self, complete: bool) -> None:
        """Nothing to close."""

    def take(self) -> list[Sample]:
        """The samples since the last call, in the order of their steps."""
        taken, self._samples = self._samples, []
        return taken


class WatchedTraining:
    """The options of a callback, and the monitor and autopilot of the training that continues.

    For every, sinks, rules and query_mask see `qkeel.watch`. autopilot: true, or its policy.
    """

    def __init__(
        self,
        every: int | Cadence,
        sinks: Sinks,
        rules: Sequence[Rule] | None,
        query_mask: MaskSource | None,
        autopilot: bool | str | Policy,
    ) -> None:
        super().__init__()  # of the trainer's own callback
        self.monitor: Monitor | None = None
        self.pilot: Autopilot | None = None
        self._policy: str | Policy | Literal[False] = "ladder" if autopilot is True else autopilot
        if self._policy is not False:
            policy(self._policy, parameters=False)
        self._every, self._rules, self._query_mask = every, rules, query_mask
        self._sinks = [sinks] if isinstance(sinks, (Sink, str, Path)) else list(sinks)
        self._queue = SampleQueue()

    def _begin(self, model: nn.Module, optimizer: Optimizer | None, steps: int) -> Monitor:
        """Watches from here on, after so many steps."""
        self._queue = SampleQueue()
        sinks, mask = [*self._sinks, self._queue], self._query_mask
        monitor = watch(model, optimizer, every=self._every, sinks=sinks, rules=self._rules, query_mask=mask)
        monitor.steps = steps
        self.monitor = monitor
        return monitor

    def close(self, *, complete: bool) -> None:
        """Stop watching, if it was begun."""
        watching = self.monitor if self.pilot is None else self.pilot
        if watching is not None:
            watching.close(complete=complete)
