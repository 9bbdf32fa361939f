"""Trackio: W&B's calls on a local database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from qkeel.errors import missing
from qkeel.monitor import Alarm, Sample, Severity, Sink


@final
class TrackioSink(Sink):
    """Logs to a run of its own in `project`; nothing leaves the machine unless trackio is set up so."""

    def __init__(self, project: str = "qkeel", name: str | None = None) -> None:
        self.project, self.name = project, name
        self._run: Any = None

    def open(self, about: Mapping[str, object]) -> None:
        """Start the run."""
        try:
            import trackio  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise missing("the trackio sink", "trackio") from error
        module: Any = trackio
        self._run = module.init(project=self.project, name=self.name, config={"qkeel": dict(about)}, embed=False)

    def write(self, sample: Sample) -> None:
        """One log call."""
        self._run.log(sample.summaries(), step=sample.step)

    def alarm(self, alarm: Alarm) -> None:
        """One alert."""
        from trackio import AlertLevel  # type: ignore[import-not-found]

        levels = {
            Severity.NOTICE: AlertLevel.INFO,
            Severity.ALARM: AlertLevel.WARN,
            Severity.CRITICAL: AlertLevel.ERROR,
        }
        self._run.alert(title=f"qkeel: {alarm.rule}", text=str(alarm), level=levels[alarm.severity], step=alarm.step)

    def close(self, complete: bool) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()
