"""TensorBoard: summaries as scalars, the heads as histograms, alarms as texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from qkeel.errors import needed
from qkeel.monitor import Alarm, Sample, Sink


@final
class TensorBoardSink(Sink):
    """Writes event files under `directory`, in TensorBoard's own habit of one file per run."""

    def __init__(self, directory: str | Path = "runs/qkeel") -> None:
        self.directory = Path(directory)
        self._writer: Any = None

    def require(self) -> None:
        """The library is there."""
        self._library()

    def _library(self) -> Any:
        with needed("the TensorBoard sink", "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        return SummaryWriter

    def open(self, about: Mapping[str, object]) -> None:
        """Start the event file and describe what is watched."""
        self._writer = self._library()(str(self.directory))
        self._writer.add_text("qkeel/about", f"```\n{json.dumps(dict(about), indent=2, default=str)}\n```", 0)

    def write(self, sample: Sample) -> None:
        """All summaries of a sample in one event: a call per number costs 50 times as much. A histogram is one more."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-not-found]

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in sample.summaries().items()]
        self._writer.file_writer.add_summary(Summary(value=values), sample.step)
        for tag, heads in sample.head_values().items():
            self._writer.add_histogram(tag, heads, sample.step)

    def alarm(self, alarm: Alarm) -> None:
        """A text at its step."""
        self._writer.add_text(f"alarms/{alarm.rule}", str(alarm), alarm.step)
        self._writer.flush()

    def close(self, complete: bool) -> None:
        """Write out what is held back."""
        if self._writer is not None:
            self._writer.close()
