"""MLflow: summaries as metrics, alarms as tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from qkeel.errors import needed
from qkeel.frames import Foreign
from qkeel.monitor import Alarm, Sample, Sink


@final
class MLflowSink(Sink):
    """Logs to the run that is active, or starts one of its own and ends it; where to is MLflow's own setting."""

    def __init__(self, experiment: str | None = None, name: str | None = None) -> None:
        self.experiment, self.name = experiment, name
        self._mlflow: Any = None
        self._client: Any = None
        self._run_id = ""
        self._own = False

    def require(self) -> None:
        """The library is there."""
        self._library()

    def _library(self) -> Any:
        with needed("the MLflow sink", "mlflow"):
            import mlflow  # pyright: ignore[reportMissingImports]
        return mlflow

    def open(self, about: Mapping[str, object]) -> None:
        """Join the active run, or start one."""
        self._mlflow = self._library()
        self._own = self._mlflow.active_run() is None
        self._client = self._mlflow.MlflowClient()
        run = self._begun() if self._own else self._mlflow.active_run()
        self._run_id = run.info.run_id
        self._client.set_tag(self._run_id, "qkeel.model", str(about.get("model")))

    def _begun(self) -> Foreign:
        """A run in the experiment, which stays that of this run alone: others go where the program has them."""
        if not self.experiment:
            return self._mlflow.start_run(run_name=self.name)
        known = self._client.get_experiment_by_name(self.experiment)
        number = self._client.create_experiment(self.experiment) if known is None else known.experiment_id
        return self._mlflow.start_run(run_name=self.name, experiment_id=number)

    def write(self, sample: Sample) -> None:
        """All summaries of a sample in one call for each 1,000, which is MLflow's limit."""
        found = list(sample.summaries().items())
        for begin in range(0, len(found), 1000):
            some = dict(found[begin : begin + 1000])
            self._mlflow.log_metrics(some, step=sample.step, run_id=self._run_id)

    def alarm(self, alarm: Alarm) -> None:
        """One tag, named by its rule."""
        self._client.set_tag(self._run_id, f"qkeel.alarm.{alarm.rule.replace(' ', '_')}", str(alarm))

    def close(self, complete: bool) -> None:
        """End the run if it is the sink's own."""
        if self._own and self._client is not None:
            self._mlflow.end_run("FINISHED" if complete else "KILLED")
