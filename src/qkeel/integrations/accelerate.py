"""Accelerate: summaries to every tracker of an Accelerator, by its own `log`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from qkeel.errors import InvalidTypeError
from qkeel.frames import Foreign
from qkeel.monitor import Alarm, Sample, Sink


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
