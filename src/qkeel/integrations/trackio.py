"""Trackio: W&B's calls on a local database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from qkeel.errors import needed
from qkeel.frames import Foreign
from qkeel.monitor import Alarm, Sample, Severity, Sink

_LEVELS = {Severity.NOTICE: "INFO", Severity.ALARM: "WARN", Severity.CRITICAL: "ERROR"}  # names of an AlertLevel


@final
class TrackioSink(Sink):
    """Logs to the run that is active, or to one of its own in `project`, which it ends; nothing leaves the machine
    unless trackio is set up so.
    """

    def __init__(self, project: str = "qkeel", name: str | None = None) -> None:
        self.project, self.name = project, name
        self._run: Any = None
        self._own = False
        self._histogram: Foreign = None

    def require(self) -> None:
        """The library is there."""
        self._library()

    def _library(self) -> Any:
        with needed("the trackio sink", "trackio"):
            import trackio  # pyright: ignore[reportMissingImports]
        return trackio

    def open(self, about: Mapping[str, object]) -> None:
        """Join the active run, or start one."""
        module = self._library()
        from trackio.context_vars import current_run  # pyright: ignore[reportMissingImports]

        self._histogram = module.Histogram
        self._run = current_run.get()
        stopped: Foreign = None if self._run is None else vars(self._run).get("_stop_flag")
        self._own = self._run is None or (stopped is not None and stopped.is_set())  # run.finish() leaves it active
        if self._own:
            self._run = module.init(project=self.project, name=self.name, config={"qkeel": dict(about)}, embed=False)

    def write(self, sample: Sample) -> None:
        """One log call; the owner of a joined run goes on counting its own."""
        owners = vars(self._run).get("_next_step")
        heads = {key: self._histogram(values.tolist()) for key, values in sample.head_values().items()}
        self._run.log({**sample.summaries(), **heads}, step=sample.step)
        if not self._own and owners is not None:
            self._run._next_step = owners

    def alarm(self, alarm: Alarm) -> None:
        """One alert."""
        from trackio import AlertLevel  # type: ignore[import-not-found]

        level = AlertLevel[_LEVELS[alarm.severity]]
        self._run.alert(title=f"qkeel: {alarm.rule}", text=str(alarm), level=level, step=alarm.step)

    def close(self, complete: bool) -> None:
        """End the run if it is the sink's own."""
        if self._own and self._run is not None:
            self._run.finish()
