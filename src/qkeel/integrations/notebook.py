"""A live view in a notebook: the sample measured last and the alarms, in one cell."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, final

from qkeel.errors import InvalidValueError, needed
from qkeel.frames import Foreign
from qkeel.monitor import Alarm, Sample, Sink
from qkeel.monitor.record.sample_table import sample_html, sample_line


@final
class NotebookSink(Sink):
    """Shows a table in the cell that runs, and puts each sample in its place, at most every `seconds`."""

    def __init__(self, seconds: str = "0.5") -> None:
        self.seconds = float(seconds)
        self._display: Foreign = None
        self._sample: Sample | None = None
        self._alarms: list[Alarm] = []
        self._shown = -math.inf

    def require(self) -> None:
        """The library is there."""
        self._library()

    def _library(self) -> Any:
        with needed("the notebook sink", "ipython"):
            from IPython import display  # pyright: ignore[reportMissingImports]
        return display

    def open(self, about: Mapping[str, object]) -> None:
        """Make the place in the cell's output."""
        self._display = self._library().display(self, display_id=True)
        if self._display is None:
            raise InvalidValueError('sinks="notebook" shows a table in a notebook\'s cell; outside of one use "log"')

    def write(self, sample: Sample) -> None:
        """Show it."""
        if sample.phase != "train":
            return
        self._sample = sample
        if time.monotonic() - self._shown >= self.seconds:
            self._update()

    def alarm(self, alarm: Alarm) -> None:
        """Show it below the table."""
        self._alarms.append(alarm)
        self._update()

    def close(self, complete: bool) -> None:
        """Show the last sample."""
        if self._display is not None:
            self._update()

    def _update(self) -> None:
        self._shown = time.monotonic()
        self._display.update(self)

    def __repr__(self) -> str:
        return "nothing measured yet" if self._sample is None else sample_line(self._sample)

    def _repr_html_(self) -> str:
        if self._sample is None:
            return "<p>nothing measured yet</p>"
        return sample_html(self._sample, self._alarms)
