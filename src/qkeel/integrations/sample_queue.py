"""The part that the callbacks of trainers share: the samples not passed on yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from qkeel.monitor import Alarm, Sample, Sink


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
