"""A live view in a notebook: the sample measured last, the alarms, and the course of the largest logit, in one cell."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, final

from qkeel.errors import InvalidValueError, needed
from qkeel.frames import Foreign
from qkeel.monitor import Alarm, Sample, Sink
from qkeel.monitor.record.sample_table import sample_html, sample_line

_WIDTH, _HEIGHT = 480, 80  # of the curve, in pixels
_LEAST = 0.1  # a logarithmic axis shows no zero


@final
class NotebookSink(Sink):
    """Shows a table in the cell that runs, and puts each sample in its place, at most every `seconds`."""

    def __init__(self, seconds: str = "0.5") -> None:
        self.seconds = float(seconds)
        self._display: Foreign = None
        self._sample: Sample | None = None
        self._alarms: list[Alarm] = []
        self._course: list[tuple[int, float]] = []
        self._shown = -math.inf

    def require(self) -> None:
        """The library is there."""
        self._library()

    def _library(self) -> Any:
        with needed("the notebook sink", "ipython"):
            import IPython.display  # pyright: ignore[reportMissingImports]
        return IPython.display

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
        self._course.append((sample.step, sample.overall("max_logit")))
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
        return sample_html(self._sample, self._alarms) + _curve(self._course)


def _curve(course: list[tuple[int, float]]) -> str:
    """The largest logit over the steps as a line on a logarithmic axis; "" of fewer than two numbers.

    >>> "polyline" in _curve([(0, 1.0), (10, 100.0)]), _curve([(0, 1.0)])
    (True, '')
    """
    points = [(step, math.log10(max(_LEAST, value))) for step, value in course if math.isfinite(value)]
    if len(points) < 2:
        return ""
    (first, *_, last), low, high = points, min(y for _, y in points), max(y for _, y in points)
    across, up = (last[0] - first[0]) or 1, (high - low) or 1
    line = " ".join(
        f"{_WIDTH * (x - first[0]) / across:.1f},{4 + (_HEIGHT - 8) * (high - y) / up:.1f}" for x, y in points
    )
    ends = f"largest logit, steps {first[0]:,} to {last[0]:,}: {10**low:.3g} to {10**high:.3g}, logarithmic"
    return (
        f'<figure style="margin:0.5em 0"><svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{ends}">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
        f"<figcaption>{ends}</figcaption></figure>"
    )
