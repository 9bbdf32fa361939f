"""The models of a training script, each watched into a run directory of its own."""

from __future__ import annotations

import dataclasses
import shlex
import weakref
from pathlib import Path
from typing import final

from torch import nn
from torch.optim import Optimizer

from qkeel.autopilot import Autopilot
from qkeel.autopilot import attach as attach_autopilot
from qkeel.cli.exits import USAGE
from qkeel.cli.watched_script.find_models import ModelFinder
from qkeel.cli.watched_script.messages import Fix, MessageSink, MessageWriter
from qkeel.errors import NoAttentionError, QkeelError
from qkeel.monitor import Cadence, RunDirectorySink, Sink
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.watch import watch as attach
from qkeel.remedies.apply import Asked, AtNextPass
from qkeel.report import write

PAGE = "report.html"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WatchPlan:
    """The quantities to measure and where to write them."""

    cadence: Cadence
    out: Path
    shown: Path  # `out` as it is printed: in the words in which it was asked for
    fix: Fix
    sinks: tuple[Sink, ...] = ()
    query_mask: str | None = None
    policy: str | None = None  # of an autopilot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A model under watch and its messages; `done` closes its files if the script drops it before the end."""

    model: str
    message_sink: MessageSink
    monitor: weakref.ref[Monitor]
    pilot: weakref.ref[Autopilot] | None
    done: weakref.finalize

    @property
    def used(self) -> bool:
        """Returns whether it has a run directory or may get one."""
        monitor = self.monitor()
        return self.message_sink.run.path is not None or (monitor is not None and monitor.active)


@final
class WatchSession:
    """Watches the models of the script that runs in this process, each in a run directory of its own."""

    def __init__(self, plan: WatchPlan, writer: MessageWriter) -> None:
        self.plan, self.writer = plan, writer
        self._runs: list[_Run] = []
        self._applied: list[AtNextPass] = []  # kept until the process ends
        self._by_script = False  # the script watches a model itself
        self._finder = ModelFinder(self._start, self._of_script)

    def _start(self, model: nn.Module, optimizer: Optimizer) -> Monitor:
        name, plan = type(model).__name__, self.plan
        run = RunDirectorySink(self._place(name), watcher=plan.fix.watcher)
        message_sink = MessageSink(run, self.writer, shown=plan.shown, fix=plan.fix)
        others = () if any(run.used for run in self._runs) else plan.sinks
        monitor = attach(
            model,
            optimizer,
            every=plan.cadence,
            sinks=[run, message_sink, *others] if self.writer.rank == 0 else [],
            query_mask=plan.query_mask,
        )
        if plan.fix.applied:
            self._apply(model, optimizer)
        pilot = None if plan.policy is None else weakref.ref(attach_autopilot(monitor, optimizer, policy=plan.policy))
        done = weakref.finalize(optimizer, run.close, True)
        done.atexit = False
        self._runs.append(
            _Run(model=name, message_sink=message_sink, monitor=weakref.ref(monitor), pilot=pilot, done=done)
        )
        return monitor

    def _of_script(self, model: nn.Module, optimizer: Optimizer) -> None:
        """A model that the script watches itself gets no second monitor, and the remedies of --apply all the same."""
        self._by_script = True
        self.writer(f"{type(model).__name__} is watched by the script itself, so this command does not measure it")
        if self.plan.fix.applied:
            self._apply(model, optimizer)

    def _apply(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Applies the remedies of --apply when the model is first called; a script that they cannot be applied to ends,
        so that nobody takes it for one that they were applied to."""
        spec, name = self.plan.fix.applied, type(model).__name__

        def refused(error: QkeelError) -> None:
            if isinstance(error, NoAttentionError):
                self.writer(f"{name} has no attention: {spec} is not applied to it")
                return
            self.writer(f"error: {spec} cannot be applied to {name}: {' '.join(str(error).split())}")
            raise SystemExit(USAGE)

        try:
            self._applied.append(AtNextPass(spec, model, optimizer, Asked(partial=True), refused=refused))
        except QkeelError as error:
            refused(error)

    def _place(self, model: str) -> Path:
        """The plan's directory; with the class name appended for models of another class than the first."""
        first = next((run.model for run in self._runs if run.used), model)
        out = self.plan.out
        return out if first == model else out.with_name(f"{out.name}-{model}")

    def close(self, *, complete: bool) -> None:
        """Stops watching and reports how it went and where the runs are. `complete`: whether the script ended well."""
        self._finder.remove()
        seen = [monitor for run in self._runs if (monitor := run.monitor()) is not None]
        for run in self._runs if complete else ():
            if (monitor := run.monitor()) is not None:
                monitor.training_over(self.writer)
            elif (last := run.message_sink.last) is not None:
                self.writer(f"{run.model} is measured up to step {last:,}: the script dropped it before it ended")
        broken = any(monitor.passes and not monitor.active for monitor in seen)
        pilots = [pilot for run in self._runs if run.pilot is not None and (pilot := run.pilot()) is not None]
        for one in (*pilots, *seen):  # an autopilot closes its monitor, after it has seen the last record
            one.close(complete=complete)
        for run in self._runs:
            run.done.detach()
        written = [run.message_sink for run in self._runs if run.message_sink.run.path is not None]
        for message_sink in written:
            message_sink.summary()
        for message_sink in written:
            self.writer(f"run {message_sink.place}")
            self._write_page(message_sink)
        if len(written) > 1:
            self.writer(f"to compare them: {shlex.join(['qkeel', 'report', *(n.place for n in written)])}")
        if not written:
            self.writer(f"nothing was measured: {'see above' if broken else self._why_nothing(seen)}")

    def _write_page(self, sink: MessageSink) -> None:
        """The page of a run, in its directory. Where it can't be written the script ends as it would all the same."""
        assert sink.run.path is not None
        try:
            write(sink.run.path, sink.run.path / PAGE)
        except Exception as error:
            self.writer(f"no page could be written: {type(error).__name__}: {error}")
        else:
            self.writer(f"page {Path(sink.place, PAGE)}")

    def _why_nothing(self, monitors: list[Monitor]) -> str:
        if not self._finder.optimizers:
            return (
                "the script made no torch.optim.Optimizer in this process. If it starts processes that train, start "
                "them with torchrun instead; elsewhere call qkeel.watch(model) in it"
            )
        if not self._runs and self._by_script:
            return "the script watches its models itself"
        if not self._runs:
            return "no nn.Module was found that holds the parameters of the script's optimizers"
        models = ", ".join(dict.fromkeys(run.model for run in self._runs))
        if any(monitor.steps for monitor in monitors):
            return f"no attention was seen in the passes of {models}"
        if any(monitor.passes for monitor in monitors):
            return (
                f"{models} was called, but no step of its optimizer was seen. It ended before the first one, or a "
                "compiled function calls optimizer.step(), where steps can't be counted: compile the model instead"
            )
        return f"the script ended before {models} was called"
