"""The parts that the callbacks of trainers share: the samples not passed on yet, and the end of a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from qkeel.errors import RefusedError, caution
from qkeel.monitor import Alarm, Sample, Sink
from qkeel.monitor.monitor import Monitor


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


def measure_end(monitor: Monitor) -> None:
    """Measures the model as the last step left it, unless that step was measured; warns where it can't."""
    try:
        monitor.measure_end()
    except RefusedError as error:
        caution(f"the last step is not measured: {error}")
