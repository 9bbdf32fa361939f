"""Code shared by the callbacks of trainers, and a sink for accelerate's trackers."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, final

from torch import nn
from torch.optim import Optimizer

from qkeel.autopilot import Autopilot, Ladder, named_policy
from qkeel.errors import InvalidTypeError, InvalidValueError, caution
from qkeel.frames import Foreign
from qkeel.handle import Handle
from qkeel.monitor import Adaptive, Alarm, Cadence, Rule, Sample, Sink
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.token_classes import MaskSource
from qkeel.monitor.watch import watch
from qkeel.remedies.apply import apply, parse
from qkeel.remedies.optimizer_trials import innermost
from qkeel.remedies.table import RemedySpec

# Accelerate: summaries go to every tracker of an Accelerator, through its own `log`.


@final
class AccelerateSink(Sink):
    """Calls `accelerator.log(numbers, step)` for each sample; use it as `watch(model, optimizer,
    sinks=AccelerateSink(acc))`.

    W&B drops a step below the last one logged to its run. If something else logs to that run with another step count,
    `sinks="wandb"` joins the run with its own step axis instead.
    """

    def __init__(self, accelerator: Foreign) -> None:
        """accelerator: an `accelerate.Accelerator`; call its `init_trackers` before the first sample."""
        if not callable(vars(type(accelerator)).get("log")):
            raise InvalidTypeError(
                f"expected an accelerate.Accelerator, got {type(accelerator).__name__}"
            )
        self.accelerator = accelerator

    def open(self, about: Mapping[str, object]) -> None:
        """Does nothing, because `init_trackers` has already opened the trackers."""

    def write(self, sample: Sample) -> None:
        """Logs the summaries in one call."""
        self.accelerator.log(sample.summaries(), step=sample.step)

    def alarm(self, alarm: Alarm) -> None:
        """Logs a 1 at the alarm's step, because Accelerate's trackers have no common alert function."""
        self.accelerator.log({f"alarms/{alarm.rule}": 1.0}, step=alarm.step)

    def close(self, complete: bool) -> None:
        """Does nothing, because the trackers are closed by their owner's call of `end_training`."""


# Code shared by the callbacks of trainers: a watched training, and the samples that have not been logged yet.

CALLBACK_CADENCE = Adaptive(least=5, most=50, change=0.25, start=20)
Sinks = Sink | str | Path | Sequence[Sink | str | Path]


@final
class SampleQueue(Sink):
    """Keeps samples with their steps until they are taken. Only the first process receives samples."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def open(self, about: Mapping[str, object]) -> None:
        """Does nothing."""

    def write(self, sample: Sample) -> None:
        """Keeps a sample."""
        self._samples.append(sample)

    def alarm(self, alarm: Alarm) -> None:
        """Does nothing, because the monitor issues its own warnings."""

    def close(self, complete: bool) -> None:
        """Does nothing."""

    def take(self, *phases: str) -> list[Sample]:
        """Returns the samples of these phases since the last call, ordered by step; without phases, all samples."""
        taken, self._samples = self._samples, []
        return [sample for sample in taken if not phases or sample.phase in phases]


class WatchedTraining:
    """The options of a trainer's callback, and the monitor and autopilot of the current training.

    For `every`, `sinks`, `rules` and `query_mask`, see `qkeel.watch`. autopilot: True for the default policy, or a
    policy. remedy: remedies on the trainer's own optimizer, for which it has its `handle`.
    """

    def __init__(
        self,
        every: int | Cadence,
        sinks: Sinks,
        rules: Sequence[Rule] | None,
        query_mask: MaskSource | None,
        autopilot: bool | str | Ladder,
        remedy: RemedySpec | None,
    ) -> None:
        # Initialises the trainer's callback class.
        super().__init__()
        self.monitor: Monitor | None = None
        self.pilot: Autopilot | None = None
        self._policy: str | Ladder | Literal[False] = (
            "ladder" if autopilot is True else autopilot
        )
        if self._policy is not False:
            named_policy(self._policy)
        if remedy is not None:
            _check_remedy(remedy)
            if autopilot:
                raise InvalidValueError(
                    "expected either remedy or autopilot, got both; an autopilot chooses its remedies itself"
                )
        self._remedy = remedy
        self.handle: Handle | None = None
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._every, self._rules, self._query_mask = every, rules, query_mask
        self._sinks = [sinks] if isinstance(sinks, (Sink, str, Path)) else list(sinks)
        self._queue = SampleQueue()

    def _begin(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        steps: int,
    ) -> Monitor:
        """Starts watching a model that has already made `steps` optimizer steps."""
        self._queue = SampleQueue()
        sinks, mask = [*self._sinks, self._queue], self._query_mask
        monitor = watch(
            model,
            optimizer,
            every=self._every,
            sinks=sinks,
            rules=self._rules,
            query_mask=mask,
        )
        monitor.steps = steps
        self.monitor = monitor
        return monitor

    def _apply(self, model: nn.Module, optimizers: Sequence[object]) -> None:
        """Applies the remedy to the optimizers that the trainer has made, unless an earlier training has done so."""
        if self._remedy is None:
            return
        inner = [innermost(x) for x in optimizers if isinstance(x, Optimizer)]
        if self.handle is not None:
            # The same optimizers have the remedy already; those that a second training makes do not.
            if [reference() for reference in self._optimizers] == inner:
                return
            self.handle.remove()
        self.handle = apply(model, self._remedy, inner or None)
        self._optimizers = [weakref.ref(optimizer) for optimizer in inner]

    def _leave_out(self, reported: Collection[str]) -> None:
        """Leaves out the sinks of trackers to which the trainer reports itself, which would show every series twice."""
        sinks = []
        for sink in self._sinks:
            kind = (
                sink
                if isinstance(sink, str)
                else type(sink).__name__.removesuffix("Sink").lower()
            )
            name = kind.partition(":")[0]
            if name in reported and not isinstance(sink, Path):
                caution(
                    f"the trainer reports to {name} itself (report_to), so the sink {name} is left out"
                )
            else:
                sinks.append(sink)
        self._sinks = sinks

    def close(self, *, complete: bool) -> None:
        """Stops watching, if it was started."""
        watching = self.monitor if self.pilot is None else self.pilot
        if watching is not None:
            watching.close(complete=complete)


def _check_remedy(remedy: RemedySpec) -> None:
    """Raises InvalidValueError for a remedy that changes the model.

    A trainer loads a checkpoint into the model before it calls its callbacks, so parameters that these add stay new."""
    for parsed in parse(remedy):
        if not parsed.on_steps:
            raise InvalidValueError(
                f"expected remedies that act on optimizer steps, such as qk_clip or lalr, got {parsed.name}, which "
                "changes the model. Apply it before the Trainer is made, whose optimizer then has its parameters: "
                f'qkeel.apply(model, "{parsed.name}", batch=batch)'
            )
