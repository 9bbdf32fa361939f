"""MLflow: summaries as metrics, alarms as tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from qkeel.errors import missing
from qkeel.monitor import Alarm, Sample, Sink


@final
class MLflowSink(Sink):
    """Logs to the run that is active, or starts one of its own and ends it; where to is MLflow's own setting."""

    def __init__(self, experiment: str | None = None, name: str | None = None) -> None:
        self.experiment, self.name = experiment, name
        self._client: Any = None
        self._run_id = ""
        self._own = False

    def open(self, about: Mapping[str, Any]) -> None:
        """Join the active run, or start one."""
        try:
            import mlflow  # type: ignore[import-not-found]
        except ImportError as error:
            raise missing("the MLflow sink", "mlflow") from error
        self._own = mlflow.active_run() is None
        if self._own and self.experiment:
            mlflow.set_experiment(self.experiment)
        run = mlflow.start_run(run_name=self.name) if self._own else mlflow.active_run()
        self._client, self._run_id = mlflow.MlflowClient(), run.info.run_id
        self._client.set_tag(self._run_id, "qkeel.model", str(about.get("model")))

    def write(self, sample: Sample) -> None:
        """All summaries of a sample in one call for each 1,000, which is MLflow's limit."""
        import mlflow  # type: ignore[import-not-found]

        found = list(sample.summaries().items())
        for begin in range(0, len(found), 1000):
            some = dict(found[begin : begin + 1000])
            mlflow.log_metrics(some, step=sample.step, run_id=self._run_id)

    def alarm(self, alarm: Alarm) -> None:
        """One tag, named by its rule."""
        self._client.set_tag(self._run_id, f"qkeel.alarm.{alarm.rule.replace(' ', '_')}", str(alarm))

    def close(self, complete: bool) -> None:
        """End the run if it is the sink's own."""
        if self._own and self._client is not None:
            import mlflow  # type: ignore[import-not-found]

            mlflow.end_run("FINISHED" if complete else "KILLED")
