"""Sinks for W&B, TensorBoard, MLflow, Trackio and CSV. Each library is imported when its sink is first used.

The names of `--sink` stand in `monitor.sinks`, with the sinks for run directories and the log.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np

from qkeel.errors import caution, needed
from qkeel.frames import Foreign, Frame, heads_frame, steps_frame
from qkeel.monitor import Alarm, Sample, Severity, Sink
from qkeel.records import HEAD_FIELDS, fresh_directory
from qkeel.records.disk import append


class _LibrarySink(Sink):
    """A sink that uses an external library, which is imported when it is first needed."""

    def require(self) -> None:
        """Checks that the library is installed."""
        self._library()

    @abc.abstractmethod
    def _library(self) -> Any:
        """Imports the library, or raises MissingLibraryError."""


# CSV: all values of every head, as tables for pandas, R or a spreadsheet.


@final
class CSVSink(Sink):
    """Writes steps.csv, heads.csv and alarms.csv to a folder, and eval_steps.csv and eval_heads.csv for evaluation.

    Existing files are not overwritten, as with a run directory. The files can be read while training continues. The
    columns of a file are those of its first rows; columns that appear later are left out, with one warning.
    """

    def __init__(self, path: str | Path = "qkeel-runs/tables") -> None:
        self.asked = Path(path)
        self.path: Path | None = None
        self._columns: dict[str, tuple[str, ...]] = {}
        self._left_out: set[str] = set()

    def require(self) -> None:
        """Makes the path absolute: the program may change its folder later."""
        self.asked = self.asked.absolute()

    def open(self, about: Mapping[str, object]) -> None:
        """Creates the folder."""
        fields = about.get("fields")
        fields = fields if isinstance(fields, (list, tuple)) else HEAD_FIELDS
        names = ("step", "layer", "type", "head", *fields)
        self._columns = dict.fromkeys(("heads", "eval_heads"), names)
        self.path = fresh_directory(self.asked)

    def write(self, sample: Sample) -> None:
        """Writes one row of steps and one row per head."""
        before = "eval_" if sample.phase == "eval" else ""
        step = np.array([sample.step])
        numbers = {name: np.array([float(x)]) for name, x in sample.numbers.items()}
        self._append(f"{before}steps", steps_frame(step, numbers))
        heads = {name: values[None] for name, values in sample.heads.items()}
        types = {layer: sample.types.get(layer, "") for layer in sample.layers}
        frame = heads_frame(step, sample.layers, heads, types)
        self._append(f"{before}heads", frame)

    def alarm(self, alarm: Alarm) -> None:
        """Writes one row."""
        row = {
            "step": alarm.step,
            "severity": str(alarm.severity),
            "rule": alarm.rule,
            "layer": alarm.layer or "",
            "head": -1 if alarm.head is None else alarm.head,
            "value": alarm.value,
            "text": str(alarm),
        }
        frame = Frame({name: np.array([value]) for name, value in row.items()})
        self._append("alarms", frame)

    def close(self, complete: bool) -> None:
        """Does nothing, because every row has been written."""

    def _append(self, name: str, frame: Frame) -> None:
        if self.path is None:
            return
        names = self._columns.setdefault(name, tuple(frame.columns))
        late = frame.columns.keys() - set(names) - self._left_out
        if late:
            self._left_out |= late
            caution(
                f"{name}.csv has no column for {', '.join(sorted(late))}: it was first measured after the first row"
            )
        unmeasured = np.full(len(frame), np.nan)
        columns = {column: frame.columns.get(column, unmeasured) for column in names}
        path = self.path / f"{name}.csv"
        append(path, Frame(columns).to_csv(head=not path.exists()).encode())


# TensorBoard: summaries as scalars, heads as histograms, alarms as text.


@final
class TensorBoardSink(_LibrarySink):
    """Writes event files under `directory`, one file per run, as is usual for TensorBoard."""

    def __init__(self, directory: str | Path = "runs/qkeel") -> None:
        self.directory = Path(directory)
        self._writer: Any = None

    def _library(self) -> Any:
        with needed("the TensorBoard sink", "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        return SummaryWriter

    def open(self, about: Mapping[str, object]) -> None:
        """Starts the event file and describes the watched model."""
        self._writer = self._library()(str(self.directory))
        self._writer.add_text(
            "qkeel/about",
            f"```\n{json.dumps(dict(about), indent=2, default=str)}\n```",
            0,
        )

    def write(self, sample: Sample) -> None:
        """Writes all summaries in one event, because one call per number costs 50 times as much, and then the
        histograms."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-not-found]

        values = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in sample.summaries().items()
        ]
        self._writer.file_writer.add_summary(Summary(value=values), sample.step)
        for tag, heads in sample.head_values().items():
            self._writer.add_histogram(tag, heads, sample.step)

    def alarm(self, alarm: Alarm) -> None:
        """Writes a text summary at the alarm's step."""
        self._writer.add_text(
            f"alarms/{alarm.rule}",
            str(alarm),
            alarm.step,
        )
        self._writer.flush()

    def close(self, complete: bool) -> None:
        """Flushes and closes the event file."""
        if self._writer is not None:
            self._writer.close()


# Weights & Biases: summaries and head histograms over `qkeel/step`, alarms as alerts and tags.

STEP = "qkeel/step"
# AlertLevel names.
_ALERT_LEVELS = {
    Severity.NOTICE: "INFO",
    Severity.ALARM: "WARN",
    Severity.CRITICAL: "ERROR",
}
# The number of waiting samples at which a warning is raised.
_MANY = 100
_LATE = (
    f"{_MANY} samples are waiting for the owner of the active W&B run to log: one is sent with each of its logs, and "
    "the rest when watching ends. To write each at once (this advances the run's own step counter), use "
    "wandb:commit=true"
)


@final
class WandbSink(_LibrarySink):
    """Logs to the active run, or to a new run that it also finishes.

    In a run that other code started, each sample is merged into the owner's next log call, so that the run's step
    counter stays under the owner's control. Samples that remain are logged when watching ends. Each sample contains its
    step as `qkeel/step`. commit="true" writes every sample immediately.
    """

    def __init__(
        self,
        project: str = "qkeel",
        name: str | None = None,
        mode: str | None = None,
        commit: str = "false",
    ) -> None:
        self.project, self.name, self.mode, self.commit = (
            project,
            name,
            mode,
            commit.lower() == "true",
        )
        self._run: Any = None
        self._own = False
        self._waiting: list[dict[str, object]] = []
        self._histogram: Foreign = None
        # The run's step counter when a sample was last merged.
        self._place = -1

    def _library(self) -> Any:
        with needed("the W&B sink", "wandb"):
            import wandb  # pyright: ignore[reportMissingImports]
        return wandb

    def open(self, about: Mapping[str, object]) -> None:
        """Joins the active run, or starts one."""
        module = self._library()
        self._histogram = module.Histogram
        self._own = module.run is None
        self._run = (
            module.init(project=self.project, name=self.name, mode=self.mode)
            if self._own
            else module.run
        )
        self._run.config.update({"qkeel": dict(about)}, allow_val_change=True)
        for keys in ("attn/*", "hidden/*", "eval/attn/*", "eval/hidden/*"):
            self._run.define_metric(keys, step_metric=STEP)

    def write(self, sample: Sample) -> None:
        """Logs the sample, or queues it for the run owner's next log call."""
        heads = {
            key: self._histogram(values.tolist())
            for key, values in sample.head_values().items()
        }
        self._waiting.append({**sample.summaries(), **heads, STEP: sample.step})
        if self._own or self.commit:
            self._write_waiting()
        elif (
            self._run.step != self._place
        ):  # otherwise the row holds a sample that this one would replace
            self._run.log(self._waiting.pop(0), commit=False)
            self._place = self._run.step
        elif len(self._waiting) == _MANY:
            caution(_LATE)

    def alarm(self, alarm: Alarm) -> None:
        """Sends an alert and tags the run."""
        from wandb import AlertLevel  # type: ignore[import-not-found]

        self._run.alert(
            title=f"qkeel: {alarm.rule}",
            text=str(alarm),
            level=AlertLevel[_ALERT_LEVELS[alarm.severity]],
        )
        # W&B's limit.
        self._run.tags = (
            *(self._run.tags or ()),
            f"qkeel {alarm.severity}: {alarm.rule}"[:64],
        )

    def close(self, complete: bool) -> None:
        """Writes queued samples, and finishes the run if the sink started it."""
        if self._run is not None:
            self._write_waiting()
            if self._own:
                self._run.finish(exit_code=0 if complete else 1)

    def _write_waiting(self) -> None:
        if self._waiting and not self._own and not self.commit:
            # Completes the row that may hold a sample.
            self._run.log({}, commit=True)
        for row in self._waiting:
            self._run.log(row, commit=True)
        self._waiting = []


# MLflow: summaries as metrics, alarms as tags.


@final
class MLflowSink(_LibrarySink):
    """Logs to the active run, or to a new run that it also ends. MLflow's settings determine where runs are stored."""

    def __init__(self, experiment: str | None = None, name: str | None = None) -> None:
        self.experiment, self.name = experiment, name
        self._mlflow: Any = None
        self._client: Any = None
        self._run_id = ""
        self._own = False

    def _library(self) -> Any:
        with needed("the MLflow sink", "mlflow"):
            import mlflow  # pyright: ignore[reportMissingImports]
        return mlflow

    def open(self, about: Mapping[str, object]) -> None:
        """Joins the active run, or starts one."""
        self._mlflow = self._library()
        self._own = self._mlflow.active_run() is None
        self._client = self._mlflow.MlflowClient()
        run = self._begun() if self._own else self._mlflow.active_run()
        self._run_id = run.info.run_id
        self._client.set_tag(self._run_id, "qkeel.model", str(about.get("model")))

    def _begun(self) -> Foreign:
        """Starts a run in the requested experiment without changing the program's active experiment."""
        if not self.experiment:
            return self._mlflow.start_run(run_name=self.name)
        experiment = self._client.get_experiment_by_name(self.experiment)
        number = (
            self._client.create_experiment(self.experiment)
            if experiment is None
            else experiment.experiment_id
        )
        return self._mlflow.start_run(run_name=self.name, experiment_id=number)

    def write(self, sample: Sample) -> None:
        """Logs all summaries, 1,000 per call, which is MLflow's limit."""
        metrics = list(sample.summaries().items())
        for begin in range(0, len(metrics), 1000):
            chunk = dict(metrics[begin : begin + 1000])
            self._mlflow.log_metrics(chunk, step=sample.step, run_id=self._run_id)

    def alarm(self, alarm: Alarm) -> None:
        """Sets a tag named after the rule."""
        self._client.set_tag(
            self._run_id,
            f"qkeel.alarm.{alarm.rule.replace(' ', '_')}",
            str(alarm),
        )

    def close(self, complete: bool) -> None:
        """Ends the run if the sink started it."""
        if self._own and self._client is not None:
            self._mlflow.end_run("FINISHED" if complete else "KILLED")


# Trackio: the interface of W&B with a local database.


@final
class TrackioSink(_LibrarySink):
    """Logs to the active run, or to a new run in `project` that it also finishes.

    The data stays on this machine unless trackio is configured otherwise.
    """

    def __init__(self, project: str = "qkeel", name: str | None = None) -> None:
        self.project, self.name = project, name
        self._run: Any = None
        self._own = False
        self._histogram: Foreign = None

    def _library(self) -> Any:
        with needed("the trackio sink", "trackio"):
            import trackio  # pyright: ignore[reportMissingImports]
        return trackio

    def open(self, about: Mapping[str, object]) -> None:
        """Joins the active run, or starts one."""
        module = self._library()
        from trackio.context_vars import current_run  # pyright: ignore[reportMissingImports]

        self._histogram = module.Histogram
        self._run = current_run.get()
        # The flag is private: in a version without it, the run counts as active.
        stopped: Foreign = (
            None if self._run is None else vars(self._run).get("_stop_flag")
        )
        # run.finish() leaves it in context.
        self._own = self._run is None or (stopped is not None and stopped.is_set())
        if self._own:
            self._run = module.init(
                project=self.project,
                name=self.name,
                config={"qkeel": dict(about)},
                embed=False,
            )

    def write(self, sample: Sample) -> None:
        """Logs the sample in one call and restores the step counter of a joined run."""
        # trackio counts the steps of a run by its logs; the owner's next one must follow the owner's last.
        owners = vars(self._run).get("_next_step")
        heads = {
            key: self._histogram(values.tolist())
            for key, values in sample.head_values().items()
        }
        self._run.log({**sample.summaries(), **heads}, step=sample.step)
        if not self._own and owners is not None:
            self._run._next_step = owners

    def alarm(self, alarm: Alarm) -> None:
        """Sends an alert."""
        from trackio import AlertLevel  # type: ignore[import-not-found]

        level = AlertLevel[_ALERT_LEVELS[alarm.severity]]
        self._run.alert(
            title=f"qkeel: {alarm.rule}",
            text=str(alarm),
            level=level,
            step=alarm.step,
        )

    def close(self, complete: bool) -> None:
        """Finishes the run if the sink started it."""
        if self._own and self._run is not None:
            self._run.finish()
