"""Weights & Biases: summaries and histograms of the heads over `qkeel/step`, alarms as alerts and as tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from qkeel.errors import caution, needed
from qkeel.frames import Foreign
from qkeel.monitor import Alarm, Sample, Severity, Sink

STEP = "qkeel/step"
_LEVELS = {Severity.NOTICE: "INFO", Severity.ALARM: "WARN", Severity.CRITICAL: "ERROR"}  # names of an AlertLevel
_MANY = 100  # samples
_LATE = (
    f"{_MANY} samples wait for the owner of the active W&B run to log: one goes out with each of its logs, the rest "
    "when watching ends. To write each at once, which advances the run's own step counter: wandb:commit=true"
)


@final
class WandbSink(Sink):
    """Logs to the run that is active, or starts one of its own and ends it.

    In a run of someone else each sample goes out with a log call of the owner, so that the run's step counter stays
    the owner's; those that no call took go out at the end, and each has its step as `qkeel/step`. With commit="true"
    each is written at once.
    """

    def __init__(
        self, project: str = "qkeel", name: str | None = None, mode: str | None = None, commit: str = "false"
    ) -> None:
        self.project, self.name, self.mode, self.commit = project, name, mode, commit.lower() == "true"
        self._run: Any = None
        self._own = False
        self._waiting: list[dict[str, object]] = []
        self._histogram: Foreign = None
        self._place = -1  # the run's step counter when a sample was last put into its row

    def require(self) -> None:
        """The library is there."""
        self._library()

    def _library(self) -> Any:
        with needed("the W&B sink", "wandb"):
            import wandb  # pyright: ignore[reportMissingImports]
        return wandb

    def open(self, about: Mapping[str, object]) -> None:
        """Join the active run, or start one."""
        module = self._library()
        self._histogram = module.Histogram
        self._own = module.run is None
        self._run = module.init(project=self.project, name=self.name, mode=self.mode) if self._own else module.run
        self._run.config.update({"qkeel": dict(about)}, allow_val_change=True)
        for keys in ("attn/*", "hidden/*", "eval/attn/*", "eval/hidden/*"):
            self._run.define_metric(keys, step_metric=STEP)

    def write(self, sample: Sample) -> None:
        """One log call, or one of several that wait for the owner's."""
        heads = {key: self._histogram(values.tolist()) for key, values in sample.head_values().items()}
        self._waiting.append({**sample.summaries(), **heads, STEP: sample.step})
        if self._own or self.commit:
            self._write_waiting()
        elif self._run.step != self._place:  # else the row already holds a sample that this one would replace
            self._run.log(self._waiting.pop(0), commit=False)
            self._place = self._run.step
        elif len(self._waiting) == _MANY:
            caution(_LATE)

    def alarm(self, alarm: Alarm) -> None:
        """One alert, and a tag of the run."""
        from wandb import AlertLevel  # type: ignore[import-not-found]

        self._run.alert(title=f"qkeel: {alarm.rule}", text=str(alarm), level=AlertLevel[_LEVELS[alarm.severity]])
        self._run.tags = (*(self._run.tags or ()), f"qkeel {alarm.severity}: {alarm.rule}"[:64])  # W&B's longest tag

    def close(self, complete: bool) -> None:
        """Write what waits, and end the run if it is the sink's own."""
        if self._run is not None:
            self._write_waiting()
            if self._own:
                self._run.finish(exit_code=0 if complete else 1)

    def _write_waiting(self) -> None:
        if self._waiting and not self._own and not self.commit:
            self._run.log({}, commit=True)  # the row that may hold a sample
        for row in self._waiting:
            self._run.log(row, commit=True)
        self._waiting = []
