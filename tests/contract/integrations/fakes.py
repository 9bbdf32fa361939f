"""Stand-ins for trackers, with the signatures of the real ones, so that the sinks run where those are not installed."""

from __future__ import annotations

import contextvars
import enum
import types
from typing import Any


class AlertLevel(enum.Enum):
    """As in wandb and trackio."""

    INFO = "INFO"
    WARN = "WARN"
    ERROR = "ERROR"


class WandbRun:
    """A run of wandb."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = _Config()
        self.logged: list[tuple[dict[str, Any], bool | None]] = []
        self.axes: dict[str, str] = {}
        self.alerts: list[tuple[str, str, AlertLevel]] = []
        self.tags: tuple[str, ...] | None = None
        self.finished: int | None = None
        self.step = 0
        self.rows: list[dict[str, Any]] = [
            {}
        ]  # the last is the one that is not committed yet

    def log(
        self, data: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        assert step is None
        self.logged.append((data, commit))
        self.rows[-1] |= data
        if commit is not False:
            self.step += 1
            self.rows.append({})

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        assert step_metric
        self.axes[name] = step_metric

    def alert(self, title: str, text: str, level: AlertLevel) -> None:
        self.alerts.append((title, text, level))

    def finish(self, exit_code: int | None = None) -> None:
        self.finished = exit_code


class _Config(dict[str, Any]):
    def update(self, d: dict[str, Any], allow_val_change: bool | None = None) -> None:  # type: ignore[override]
        super().update(d)


class Histogram:
    """As in wandb and trackio."""

    def __init__(self, sequence: list[float]) -> None:
        self.sequence = sequence


def wandb(active: WandbRun | None = None) -> types.ModuleType:
    """The module, with or without an active run."""
    module = types.ModuleType("wandb")

    def init(
        project: str, name: str | None = None, mode: str | None = None
    ) -> WandbRun:
        module.run = WandbRun()  # type: ignore[attr-defined]
        module.asked = (project, name, mode)  # type: ignore[attr-defined]
        return module.run  # type: ignore[attr-defined]

    module.run, module.init, module.AlertLevel = active, init, AlertLevel  # type: ignore[attr-defined]
    module.Histogram = Histogram  # type: ignore[attr-defined]
    return module


class TrackioRun:
    """A run of trackio."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int | None]] = []
        self.alerts: list[tuple[str, AlertLevel, int | None]] = []
        self.finished = False
        self._next_step = 0

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        step = self._next_step if step is None else step
        self._next_step = max(self._next_step, step + 1)
        self.logged.append((metrics, step))

    def alert(
        self,
        title: str,
        text: str | None = None,
        level: AlertLevel = AlertLevel.WARN,
        step: Any = None,
    ) -> None:
        self.alerts.append((title, level, step))

    def finish(self) -> None:
        self.finished = True


def trackio(active: TrackioRun | None = None) -> dict[str, types.ModuleType]:
    """The module and the one that knows the active run, by name."""
    module, variables = (
        types.ModuleType("trackio"),
        types.ModuleType("trackio.context_vars"),
    )
    variables.current_run = contextvars.ContextVar("run", default=active)  # type: ignore[attr-defined]

    def init(
        project: str, name: str | None = None, config: Any = None, embed: bool = True
    ) -> TrackioRun:
        assert not embed
        module.run = TrackioRun()  # type: ignore[attr-defined]
        return module.run  # type: ignore[attr-defined]

    module.init, module.AlertLevel, module.Histogram = init, AlertLevel, Histogram  # type: ignore[attr-defined]
    return {"trackio": module, "trackio.context_vars": variables}


def mlflow(active: bool = False) -> types.ModuleType:
    """The module, with or without an active run."""
    module = types.ModuleType("mlflow")
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    state = types.SimpleNamespace(
        run=run if active else None, metrics=[], tags={}, ended=None, experiment=None
    )

    class MlflowClient:
        def set_tag(self, run_id: str, key: str, value: Any) -> None:
            state.tags[run_id, key] = value

        def get_experiment_by_name(self, name: str) -> Any:
            return None

        def create_experiment(self, name: str) -> str:
            return f"number of {name}"

    def start_run(run_name: str | None = None, experiment_id: str | None = None) -> Any:
        state.run, state.experiment = run, experiment_id
        return run

    def log_metrics(
        metrics: dict[str, float], step: int | None = None, run_id: str | None = None
    ) -> None:
        assert len(metrics) <= 1000
        state.metrics.append((metrics, step, run_id))

    def end_run(status: str = "FINISHED") -> None:
        state.ended = status

    module.state = state  # type: ignore[attr-defined]
    module.MlflowClient = MlflowClient  # type: ignore[attr-defined]
    module.active_run = lambda: state.run  # type: ignore[attr-defined]
    module.start_run, module.log_metrics, module.end_run = (
        start_run,
        log_metrics,
        end_run,
    )  # type: ignore[attr-defined]
    return module
