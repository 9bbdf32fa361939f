"""Weights & Biases: summaries over `qkeel/step`, alarms as alerts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from qkeel.errors import missing
from qkeel.monitor import Alarm, Sample, Severity, Sink

STEP = "qkeel/step"


@final
class WandbSink(Sink):
    """Logs to the run that is active, or starts one of its own and ends it. In a run of someone else's the numbers
    go out with the owner's next log call, so that its step counter stays his.
    """

    def __init__(self, project: str = "qkeel", name: str | None = None, mode: str | None = None) -> None:
        self.project, self.name, self.mode = project, name, mode
        self._run: Any = None
        self._own = False

    def open(self, about: Mapping[str, object]) -> None:
        """Join the active run, or start one."""
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise missing("the W&B sink", "wandb") from error
        module: Any = wandb
        self._own = module.run is None
        self._run = module.init(project=self.project, name=self.name, mode=self.mode) if self._own else module.run
        self._run.config.update({"qkeel": dict(about)}, allow_val_change=True)
        for keys in ("attn/*", "hidden/*", "eval/attn/*", "eval/hidden/*"):
            self._run.define_metric(keys, step_metric=STEP)

    def write(self, sample: Sample) -> None:
        """One log call."""
        self._run.log({**sample.summaries(), STEP: sample.step}, commit=self._own)

    def alarm(self, alarm: Alarm) -> None:
        """One alert."""
        from wandb import AlertLevel  # type: ignore[import-not-found]

        levels = {
            Severity.NOTICE: AlertLevel.INFO,
            Severity.ALARM: AlertLevel.WARN,
            Severity.CRITICAL: AlertLevel.ERROR,
        }
        self._run.alert(title=f"qkeel: {alarm.rule}", text=str(alarm), level=levels[alarm.severity])

    def close(self, complete: bool) -> None:
        """End the run if it is the sink's own."""
        if self._own and self._run is not None:
            self._run.finish(exit_code=0 if complete else 1)
