"""The models of a training script, each watched and recorded in a run directory of its own."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from qkeel.autopilot import Autopilot
from qkeel.autopilot import attach as attach_autopilot
from qkeel.cli.commands import USAGE
from qkeel.cli.model_finder import ModelFinder
from qkeel.cli.run_messages import Fix, MessageSink, MessageWriter
from qkeel.errors import NoAttentionError, QkeelError
from qkeel.monitor import Cadence, RunDirectorySink, Sink
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.watch import watch as attach
from qkeel.options import parse as parse_terms
from qkeel.patching.forward import unwrapped
from qkeel.remedies.apply import AtNextPass
from qkeel.remedies.apply import parse as parse_remedies

# Variables that torch reads when it is imported, which is before the script begins.
READ_AT_IMPORT = re.compile(
    r"(OMP|MKL)_NUM_THREADS|TORCHINDUCTOR_(?!CACHE_DIR)\w+|TORCHDYNAMO_\w+|TORCH_COMPILE_DISABLE|TORCH_LOGS|"
    r"PYTORCH_ENABLE_MPS_FALLBACK"
)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WatchPlan:
    """The quantities to measure and where to write them."""

    cadence: Cadence
    out: Path
    # `out` as it is printed, in the form in which the user gave it.
    shown: Path
    fix: Fix
    sinks: tuple[Sink, ...] = ()
    query_mask: str | None = None
    # Policy of an autopilot.
    policy: str | None = None
    # Whether to name the origin of the first NaN.
    nan: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _WatchedModel:
    """A watched model and its messages; `done` closes its files if the script deletes its optimizer before the end."""

    model: str
    message_sink: MessageSink
    monitor: weakref.ref[Monitor]
    pilot: weakref.ref[Autopilot] | None
    done: weakref.finalize

    @property
    def used(self) -> bool:
        """Returns whether the session has a run directory or may get one."""
        monitor = self.monitor()
        return self.message_sink.run.path is not None or (
            monitor is not None and monitor.active
        )


@final
class _Remedied:
    """The remedies of --apply on one model, and later on a model around it or inside it. Remedies that change its forward
    pass stay for the lifetime of the model; remedies on optimizer steps are applied anew to the optimizer that begins a
    new phase of training.
    """

    def __init__(
        self,
        spec: str,
        model: nn.Module,
        optimizer: Optimizer,
        refused: Callable[[QkeelError], None],
    ) -> None:
        terms = [
            (str(term), parsed)
            for term in parse_terms(spec)
            for parsed in parse_remedies(str(term))
        ]
        on_pass, self._on_steps = (
            "+".join(text for text, remedy in terms if remedy.on_steps is on_steps)
            for on_steps in (False, True)
        )
        self._on_pass = on_pass
        self._before = {name for name, _ in model.named_parameters()}
        self._model, self._optimizers = weakref.ref(model), [weakref.ref(optimizer)]
        # The hook registered last runs first, so that remedies on steps find the model as the other remedies leave it.
        self._steps = self._at_next_pass(self._on_steps, optimizer, refused)
        self._pass = self._at_next_pass(on_pass, optimizer, refused)

    @property
    def waits(self) -> bool:
        """Whether the model was not called since."""
        return any(x is not None and x.waits for x in (self._pass, self._steps))

    def or_with(self, optimizer: Optimizer) -> None:
        """Adds another optimizer of the model in the same phase; see `AtNextPass.or_with`."""
        self._optimizers.append(weakref.ref(optimizer))
        for waiting in (self._pass, self._steps):
            if waiting is not None:
                waiting.or_with(optimizer)

    def begin_phase(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        refused: Callable[[QkeelError], None],
        write: Callable[[str], None],
    ) -> None:
        """Applies the remedies on steps anew to the optimizer of the next phase; `write` receives a line about their
        state, and one about parameters that the remedies added and this optimizer does not train, or about attention
        that has none of the others."""
        earlier = self._model()
        is_same = model is earlier
        self._model = weakref.ref(model)
        if self._steps is not None:
            had_state = bool(self._steps.state())
            self._steps.remove()
            self._steps = steps = self._at_next_pass(self._on_steps, optimizer, refused)
            if steps is not None:
                for earlier in disjoint(self._optimizers, optimizer):
                    steps.or_with(earlier)
            if had_state:
                write(
                    f"{self._on_steps} starts again from its initial state on the new {type(optimizer).__name__}"
                )
        self._optimizers.append(weakref.ref(optimizer))
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not is_same and self._on_pass:
            write(
                f"{self._on_pass} stays where it was put into {type(earlier).__name__}; other attention of "
                f"{type(model).__name__} has none"
            )
        names = dict(model.named_parameters()) if is_same else {}
        left = [
            name
            for name, p in names.items()
            if name not in self._before and id(p) not in stepped
        ]
        if left:
            write(
                f"the new {type(optimizer).__name__} does not train {', '.join(left)}, which --apply added: these "
                "parameters stay unchanged"
            )

    def _at_next_pass(
        self, spec: str, optimizer: Optimizer, refused: Callable[[QkeelError], None]
    ) -> AtNextPass | None:
        model = self._model()
        if not spec or model is None:
            return None
        return AtNextPass(
            model, parse_remedies(spec), optimizer, partial=True, refused=refused
        )


def disjoint(
    earlier: Sequence[weakref.ref[Optimizer]], new: Optimizer
) -> list[Optimizer]:
    """The earlier optimizers that still exist and share no parameter with a new one, so that they may continue."""
    parameters = {id(p) for group in new.param_groups for p in group["params"]}
    apart = []
    for ref in earlier:
        old = ref()
        if old is not None and old is not new:
            groups = [group["params"] for group in old.param_groups]
            if parameters.isdisjoint({id(p) for group in groups for p in group}):
                apart.append(old)
    return apart


@final
class WatchSession:
    """Watches the models of the script that runs in this process and records each in a separate run directory."""

    def __init__(self, plan: WatchPlan, writer: MessageWriter) -> None:
        self.plan, self.writer = plan, writer
        self._runs: list[_WatchedModel] = []
        # Kept until the process ends.
        self._applied: dict[nn.Module, _Remedied] = {}
        self._optimizers: weakref.WeakKeyDictionary[
            nn.Module, list[weakref.ref[Optimizer]]
        ] = weakref.WeakKeyDictionary()
        # Found after the autopilot of their model had begun.
        self._late: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # The script watches a model itself.
        self._by_script = False
        self._environment = dict(os.environ)
        self._finder = ModelFinder(
            self._start, self._of_script, self._another, self._end
        )

    def _start(self, model: nn.Module, optimizer: Optimizer) -> Monitor:
        name, plan = type(model).__name__, self.plan
        self._tell_of_variables()
        run = RunDirectorySink(self._place(name), watcher=plan.fix.watcher)
        message_sink = MessageSink(run, self.writer, shown=plan.shown, fix=plan.fix)
        # A tracker's run takes the numbers of one model.
        sinks = () if any(run.used for run in self._runs) else plan.sinks
        monitor = attach(
            model,
            optimizer,
            every=plan.cadence,
            sinks=[run, message_sink, *sinks] if self.writer.rank == 0 else [],
            query_mask=plan.query_mask,
            nan=plan.nan,
        )
        if plan.fix.applied:
            self._apply(model, optimizer)
        pilot = None
        if plan.policy is not None:
            optimizers = [
                optimizer,
                *disjoint(self._optimizers.get(model, ()), optimizer),
            ]
            pilot = weakref.ref(
                attach_autopilot(monitor, optimizers, policy=plan.policy)
            )
        self._optimizers.setdefault(model, []).append(weakref.ref(optimizer))
        # A script may drop model and optimizer long before it ends; the run's files are closed then.
        done = weakref.finalize(optimizer, self._end_of, run)
        done.atexit = False
        self._runs.append(
            _WatchedModel(
                model=name,
                message_sink=message_sink,
                monitor=weakref.ref(monitor),
                pilot=pilot,
                done=done,
            )
        )
        return monitor

    def _tell_of_variables(self) -> None:
        """Tells of variables that the script has set too late."""
        before, self._environment = self._environment, dict(os.environ)
        late = {
            name: value
            for name, value in self._environment.items()
            if READ_AT_IMPORT.fullmatch(name) and before.get(name) != value
            # The script may have set the number of threads in another way.
            if "NUM_THREADS" not in name or value != str(torch.get_num_threads())
        }
        if late:
            words = " ".join(f"{k}={shlex.quote(v)}" for k, v in late.items())
            self.writer(
                f"{', '.join(late)}, which the script sets, is without effect, as torch was imported before. Set it in "
                f"the command: {words} {self.plan.fix.watcher}"
            )

    def _end_of(self, run: RunDirectorySink) -> None:
        # A forked process has a copy of everything but the files.
        if self.writer.here:
            run.close(True)

    def _of_script(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Applies the remedies of --apply to a model that the script watches itself, but adds no second monitor."""
        self._by_script = True
        self.writer(
            f"{type(model).__name__} is watched by the script itself, so this command does not measure it"
        )
        if self.plan.fix.applied:
            self._apply(model, optimizer)

    def _another(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizers.setdefault(model, []).append(weakref.ref(optimizer))
        if model in self._applied:
            self._applied[model].or_with(optimizer)
        for pilot in self._pilots():
            if pilot.active and pilot.monitor.model is unwrapped(model):
                try:
                    pilot.add_optimizer(optimizer)
                except QkeelError:
                    if optimizer in self._late:
                        continue
                    self._late.add(optimizer)
                    name = type(optimizer).__name__
                    self.writer(
                        f"the autopilot does not act on the weights of a later {name}: it had already begun"
                    )

    def _end(self, monitor: Monitor) -> None:
        """Closes the autopilot of a monitor, which removes its remedies for optimizer steps, or the monitor alone."""
        pilot = next((x for x in self._pilots() if x.monitor is monitor), None)
        (monitor if pilot is None else pilot).close()

    def _pilots(self) -> list[Autopilot]:
        return [
            pilot
            for run in self._runs
            if run.pilot is not None and (pilot := run.pilot()) is not None
        ]

    def _apply(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Applies the remedies of --apply when the model is first called. If they cannot be applied, the script is
        ended, so that nobody mistakes its run for one with these remedies."""
        spec, name = self.plan.fix.applied, type(model).__name__

        def refused(error: QkeelError) -> None:
            if isinstance(error, NoAttentionError):
                self.writer(f"{name} has no attention: {spec} is not applied to it")
                return
            self.writer(
                f"error: {spec} cannot be applied to {name}: {' '.join(str(error).split())}"
            )
            # Nobody may mistake the run for one with the remedies, so it does not begin.
            raise SystemExit(USAGE)

        try:
            inside = {*map(id, model.modules())}
            earlier = [
                m
                for m in self._applied
                if id(m) in inside or any(model is x for x in m.modules())
            ]
            if earlier:
                remedied = self._applied[model] = self._applied.pop(earlier[-1])
                remedied.begin_phase(model, optimizer, refused, self.writer)
            else:
                self._applied[model] = _Remedied(spec, model, optimizer, refused)
        except QkeelError as error:
            refused(error)

    def _place(self, model: str) -> Path:
        """The plan's directory, with the class name appended for models of a different class than the first model."""
        first = next((run.model for run in self._runs if run.used), model)
        out = self.plan.out
        return out if first == model else out.with_name(f"{out.name}-{model}")

    def leave(self, program: str | None) -> None:
        """Ends because another program takes the place of the script: one that is watched, or, by its name, another."""
        if self._runs:
            self.close(complete=False)
        self.writer(
            "the script begins anew in its own place, and is watched there"
            if program is None
            else f"the script is replaced by {program}, which is not watched"
        )

    def close(self, *, complete: bool) -> None:
        """Stops watching, and reports the outcome and the run directories.

        Args:
            complete: whether the script ended without an error.
        """
        self._finder.remove()
        monitors = [
            monitor for run in self._runs if (monitor := run.monitor()) is not None
        ]
        broken = self._finder.failed or any(
            monitor.passes and not monitor.active for monitor in monitors
        )
        # An autopilot closes its monitor after it has seen the last record.
        for watcher in (*self._pilots(), *monitors):
            watcher.close(complete=complete)
        for run in self._runs:
            run.done.detach()
        written = [
            run.message_sink
            for run in self._runs
            if run.message_sink.run.path is not None
        ]
        for message_sink in written:
            message_sink.summary()
        for message_sink in written:
            self.writer(f"run {message_sink.place}")
            message_sink.write_page()
        if len(written) > 1:
            self.writer(
                f"to compare them: {shlex.join(['qkeel', 'report', *(n.place for n in written)])}"
            )
        if not written:
            # A run directory that was taken away during the first steps.
            is_measured = any(monitor.sample is not None for monitor in monitors)
            reason = (
                "see above" if broken or is_measured else self._why_nothing(monitors)
            )
            unmet = any(x.waits for x in self._applied.values()) or not self._applied
            applied = self.plan.fix.applied
            left = (
                f", and {applied} was applied to nothing in this process"
                if applied and unmet
                else ""
            )
            self.writer(
                f"nothing was {'written' if is_measured else 'measured'}{left}: {reason}"
            )

    def _why_nothing(self, monitors: list[Monitor]) -> str:
        if not self._finder.optimizers:
            return (
                "the script created no torch.optim.Optimizer in this process. If it starts processes that train, start "
                "them with torchrun instead; otherwise call qkeel.watch(model) in the script"
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
                f"{models} was called, but no step of its optimizer was seen. Either the script ended before the first "
                "step, or optimizer.step() is called in a compiled function, where steps can't be counted; in that "
                "case, compile only the model"
            )
        return (
            f"{models} was not called in this process. If the script starts processes that train, start them with "
            "torchrun instead"
        )
