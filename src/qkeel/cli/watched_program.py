"""Runs a training script unchanged, finds the models to watch, and prints messages about them."""

from __future__ import annotations

import builtins
import dataclasses
import gc
import importlib.util
import io
import math
import os
import re
import runpy
import shlex
import sys
import time
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from qkeel.audit.check import check, is_run
from qkeel.autopilot import Autopilot
from qkeel.autopilot import attach as attach_autopilot
from qkeel.cli.commands import FAILED, INTERRUPTED, OK, USAGE
from qkeel.errors import (
    AlarmWarning,
    DataError,
    InvalidValueError,
    NoAttentionError,
    QkeelError,
    QkeelWarning,
    caution,
)
from qkeel.handle import Handle, compose
from qkeel.monitor import (
    Alarm,
    Cadence,
    RunDirectorySink,
    Sample,
    Severity,
    Sink,
    sample_table,
)
from qkeel.monitor.monitor import Monitor, watched
from qkeel.monitor.sample import shown_samples
from qkeel.monitor.watch import watch as attach
from qkeel.options import parse as parse_terms
from qkeel.patching.forward import in_extra_pass, unwrapped
from qkeel.patching.modes import is_made, submodules_of
from qkeel.patching.optimizers import StepHooks, steps_taken, when_made
from qkeel.patching.roles import Phase
from qkeel.records.disk import read_file
from qkeel.remedies.apply import AtNextPass
from qkeel.remedies.apply import parse as parse_remedies
from qkeel.report import write
from qkeel.sites.alone import COPY_MARK

# The messages about a watched run, as lines on stderr that begin with `qkeel:` to distinguish them from the script's.


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """What the user can do about an alarm, given the typed command and the remedies that are already active."""

    # Words of `qkeel watch ...` before --.
    own: Sequence[str]
    # The words after it.
    command: Sequence[str]
    # Remedies of --apply.
    applied: str = ""
    # --autopilot was given.
    piloted: bool = False
    # Started by a launcher, whose own command is not known.
    launched: bool = False

    @property
    def watcher(self) -> str:
        """The command that was typed."""
        return shlex.join(["qkeel", *self.own, *self.command])

    def lines(self, remedy: str) -> list[str]:
        """What to do about an alarm that recommends `remedy`; empty if an autopilot handles the alarm."""
        proposed = _APPLY.search(remedy)
        if self.piloted:
            return []
        if proposed is None:
            return [f"what to do: {remedy}"]
        line, spec = proposed[0], proposed[1]
        # Rates alone are proposed if weights are frozen, as below adapters, where a norm would change the base.
        if re.search(r"\bqk_clip\b", spec):
            line += _WHY
        # A launcher's own command is not known here, so only its change can be said.
        command = f"restart it with --apply {spec} before the --"
        if not self.launched:
            applied = [*self.own[:-1], "--apply", spec, "--", *self.command]
            command = shlex.join(["qkeel", *applied])
        return [
            f"to fix it: {command}",
            f"or in the script, after the optimizer is created: {line}",
        ]


# In the workers of torchrun, this variable holds the command that was typed after `qkeel watch --`.
TYPED = "QKEEL_TYPED_COMMAND"
_APPLY = re.compile(r'qkeel\.apply\(model, "([^"]+)", (?:optimizer|\[)[^)]*\)')
_WHY = "  (the forward pass stays as it is, so a checkpoint can be resumed; in a new run, try qk_norm first)"


PAGE = "report.html"
# Between two versions of the page during a run, at least.
PAGE_SECONDS = 30.0
# Of a run's time at most is spent on versions of its page.
PAGE_SHARE = 0.01


@final
class MessageSink(Sink):
    """Prints the directory of the run, the messages of alarms and, at the end, the last measured values, and keeps the
    run's page up to date.

    Alarms with the same cause are grouped: the first severe alarm says what to do, and later alarms are only reported.
    If there are several alarms with the same cause at one step, only the most severe is printed.
    """

    def __init__(
        self, run: RunDirectorySink, writer: MessageWriter, *, shown: Path, fix: Fix
    ) -> None:
        self.run, self.writer, self.fix = run, writer, fix
        self._shown = shown
        # The latest of each phase.
        self._samples: dict[Phase, Sample] = {}
        self._alarms: list[Alarm] = []
        self._fixed: set[str] = set()
        self._model = ""
        self._next_page = time.monotonic() + PAGE_SECONDS
        # Where the page is.
        self._page_told = False

    @property
    def last(self) -> int | None:
        """The last measured step."""
        sample, _ = shown_samples(self._samples)
        return None if sample is None else sample.step

    @property
    def place(self) -> str:
        """The directory, as the user wrote it."""
        return str(self._shown.with_name((self.run.path or self.run.asked).name))

    def open(self, about: Mapping[str, Any]) -> None:
        """Prints what is watched and where the records are written."""
        self._model = str(about["model"])
        sites, missed = len(about.get("sites") or ()), len(about.get("missed") or ())
        layers = f"the attention of {self._model}"
        if sites:
            number = f"{sites} of {sites + missed}" if missed else f"{sites}"
            noun = "layer" if sites + missed == 1 else "layers"
            layers = f"{number} attention {noun} of {self._model}"
        if self.fix.applied:
            layers += f" with {self.fix.applied} applied"
        elif about.get("remedies"):
            # Which the script has applied itself.
            layers += f" with {'+'.join(about['remedies'])} active"
        self.writer(f"watching {layers}, run {self.place}")

    def write(self, sample: Sample) -> None:
        """Prints nothing, but keeps the sample for `summary` and, from time to time, writes the page."""
        self._samples[sample.phase] = sample
        if time.monotonic() >= self._next_page:
            self.write_page(refresh=PAGE_SECONDS)

    def alarm(self, alarm: Alarm) -> None:
        """Prints one line and, for the first alarm that needs action, also what to do."""
        earlier = [x for x in self._alarms if x.cause == alarm.cause]
        self._alarms.append(alarm)
        # Of one step, the most severe alarm comes first, and the others say the same.
        if any(x.step == alarm.step for x in earlier):
            return
        self.writer(
            dataclasses.replace(alarm, trend="").line if earlier else alarm.line
        )
        if alarm.severity is not Severity.NOTICE and alarm.remedy not in self._fixed:
            self._fixed.add(alarm.remedy)
            for line in self.fix.lines(alarm.remedy):
                self.writer(line)

    def event(self, event: Mapping[str, Any]) -> None:
        """Prints the text of an event, if it has one."""
        if "text" in event:
            self.writer(str(event["text"]))

    def close(self, complete: bool) -> None:
        """Does nothing, because `summary()` may still be called."""

    def write_page(self, *, refresh: float | None = None) -> None:
        """Writes the page of the run into its directory. If this fails, training goes on as it would otherwise.

        Args:
            refresh: seconds after which a browser loads the page again; None for the page of a run that has ended.
        """
        assert self.run.path is not None
        started = time.monotonic()
        try:
            write(self.run.path, self.run.path / PAGE, refresh=refresh)
        # Whatever goes wrong with a page must not end the training, nor be tried again after every record.
        except Exception as error:
            self.writer(f"no page could be written: {type(error).__name__}: {error}")
            self._next_page = math.inf
            return
        ended = time.monotonic()
        self._next_page = ended + max(PAGE_SECONDS, (ended - started) / PAGE_SHARE)
        if refresh is None or not self._page_told:
            self.writer(f"page {Path(self.place, PAGE)}")
            self._page_told = True

    def summary(self) -> None:
        """Prints the last measured values, layer by layer, the number of alarms, and the verdict of `qkeel check`."""
        sample, note = shown_samples(self._samples, self._model)
        if sample is not None:
            table = sample_table(sample, note=note, root=self._model)
            for line in table.splitlines():
                self.writer(line)
        counts = Counter(alarm.severity for alarm in self._alarms)
        alarms = [f"{counts[x]} {x}" for x in reversed(Severity) if counts[x]]
        self.writer(f"alarms: {', '.join(alarms) or 'none'}")
        if self.run.path is not None and is_run(self.run.path):
            self.writer(str(check(self.run.path)))


@final
class MessageWriter(Handle):
    """Writes lines, and qkeel's own warnings as one line each, to the original stderr of the process.

    With several processes only rank 0 prints messages, but all print warnings; forked processes print neither.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._stream, self._pid = sys.stderr, os.getpid()
        self._plain = warnings.showwarning
        warnings.showwarning = self._show
        super().__init__(self._stop)

    def _show(
        self, message: Warning | str, category: type[Warning], *location: Any
    ) -> None:
        if not issubclass(category, QkeelWarning):
            self._plain(message, category, *location)
        elif self.here and not issubclass(category, AlarmWarning):
            # Alarms are printed separately.
            rank = f" (rank {self.rank})" if self.rank else ""
            self._print(f"warning{rank}: {' '.join(str(message).split())}")

    @property
    def here(self) -> bool:
        """Returns whether this is the process in which the run began, not one that the script has forked."""
        return os.getpid() == self._pid

    def __call__(self, line: str) -> None:
        """Prints the line, on rank 0."""
        if self.rank == 0:
            self._print(line)

    def _print(self, line: str) -> None:
        """Prints at the beginning of a line, even if a progress bar has left the cursor in the middle of one."""
        # a script without bars need not wait for it.
        bars = sys.modules.get("tqdm.std")
        # tqdm keeps the bars that are on the screen in a private set, which has no public counterpart.
        is_shown = bars is not None and bool(vars(bars.tqdm).get("_instances"))
        text = f"qkeel: {line}"
        if bars is not None and is_shown and self._stream.isatty():
            # Clears the bars and redraws them below.
            bars.tqdm.write(text, file=self._stream)
        else:
            print(f"\n{text}" if is_shown else text, file=self._stream, flush=True)

    def _stop(self) -> None:
        warnings.showwarning = self._plain


# Finds the models that a program trains, from the optimizers that appear in it.

# The share of an optimizer's parameters that a model must hold to be watched beside a
# larger model.
LEAST_SHARE = 0.1

# The number of an optimizer's first steps after which its model is searched for, if
# none was found before.
LOOKS = 3


@final
class ModelFinder(Handle):
    """Calls `start(model, optimizer)` for each model that an optimizer trains, when the optimizer is created.

    The models are those that hold its parameters, found among all live objects, so a weight-averaging copy is
    excluded. If no model holds the parameters yet, the search is repeated after each of the optimizer's first `LOOKS`
    steps. A module without an observed pass by the first step, such as a container whose forward is never called, is
    replaced by its submodule that holds the same parameters. Two optimizers of one model share a Monitor, which counts
    the steps of the first optimizer; an optimizer created after the first has stepped begins a new phase of training,
    with a new Monitor.

    Optimizers and models are held by weak references. Processes that the program starts are not searched.
    """

    def __init__(
        self,
        start: Callable[[nn.Module, Optimizer], Monitor],
        of_script: Callable[[nn.Module, Optimizer], None] = lambda model, optimizer: (
            None
        ),
        further: Callable[[nn.Module, Optimizer], None] = lambda model, optimizer: None,
        end: Callable[[Monitor], None] = Monitor.close,
    ) -> None:
        """Registers the hooks on optimizers.

        Args:
            start: called to start watching a model.
            of_script: called once for each model that the script watches itself.
            further: called for each further optimizer of a model that is already watched.
            end: called to stop watching a model before another watch of it begins.
        """
        # Number of optimizers created so far.
        self.optimizers = 0
        # Whether looking for models ended in an error, which was told.
        self.failed = False
        self._start, self._of_script = start, of_script
        self._further, self._end = further, end
        # Models that the script watches itself.
        self._theirs: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._pid = os.getpid()
        self._steps: weakref.WeakKeyDictionary[Optimizer, int]
        self._steps = weakref.WeakKeyDictionary()
        self._watches: list[_Watch] = []
        creation = when_made(lambda optimizer: self._safely(self._made, optimizer))
        steps = StepHooks(
            lambda optimizer: self._safely(self._before_step, optimizer),
            lambda optimizer: self._safely(self._after_step, optimizer),
        )
        super().__init__(compose([creation, steps]).remove)

    def _made(self, optimizer: Optimizer) -> None:
        self.optimizers += 1
        self._steps[optimizer] = 0
        self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        self._watches = [w for w in self._watches if w.monitor() is not None]
        # An optimizer may hold the weights of several models, as a loss of two networks does.
        for chain in chains(optimizer):
            watches = [w for w in self._watches if any(w.model is m for m in chain)]
            theirs = next(filter(watched, chain), None)
            if not watches:
                if theirs is None:
                    self._begin(chain, optimizer)
                elif theirs not in self._theirs:
                    self._theirs.add(theirs)
                    self._of_script(theirs, optimizer)
            elif not self._steps[optimizer] and self._has_stepped(watches[0]):
                # An optimizer that is made after steps of the first one begins a new phase of training.
                watches[0].end(self._end)
                self._watches.remove(watches[0])
                self._begin(chain, optimizer)
            elif watches[0].optimizer() is not optimizer:
                model, monitor = watches[0].model, watches[0].monitor()
                if model is not None:
                    self._further(model, optimizer)
                if monitor is not None:
                    monitor.add_optimizer(optimizer)

    def _has_stepped(self, watch: _Watch) -> bool:
        first = watch.optimizer()
        return first is None or self._steps[first] > 0

    def _begin(self, chain: list[nn.Module], optimizer: Optimizer) -> None:
        monitor = self._start(chain[0], optimizer)
        # An optimizer that keeps no count of its steps would make the monitor begin at 0.
        if self._steps[optimizer] and not steps_taken(optimizer):
            monitor.steps = self._steps[optimizer]
        self._watches.append(
            _Watch(
                chain=[weakref.ref(module) for module in chain],
                optimizer=weakref.ref(optimizer),
                monitor=weakref.ref(monitor),
            )
        )

    def _before_step(self, optimizer: Optimizer) -> None:
        for watch in self._watches:
            if watch.optimizer() is optimizer and watch.mistaken:
                # Before it warns that it saw nothing; the watch of the submodule begins with the next step.
                watch.end(self._end)

    def _after_step(self, optimizer: Optimizer) -> None:
        self._steps[optimizer] = steps = self._steps.get(optimizer, 0) + 1
        mine = [watch for watch in self._watches if watch.optimizer() is optimizer]
        for watch in mine:
            if watch.mistaken:
                self._watches.remove(watch)
                inner = [ref() for ref in watch.chain[1:]]
                self._begin([m for m in inner if m is not None], optimizer)
        if not mine and steps <= LOOKS:
            self._look(optimizer)

    def _safely(self, act: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        # Workers of a data loader are forked with these hooks and must stay silent.
        if os.getpid() != self._pid or not self.active:
            return
        # A retrofit fits its gains with an optimizer of its own.
        if in_extra_pass():
            return
        try:
            act(optimizer)
        except Exception as error:
            self.remove()
            self.failed = True
            caution(
                f"qkeel stopped looking for models to watch: {type(error).__name__}: {error}. The script continues"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    """A watched model: the modules that may be the one that is called, from the outermost inwards, with the optimizer
    whose steps are counted and the monitor."""

    chain: list[weakref.ref[nn.Module]]
    optimizer: weakref.ref[Optimizer]
    monitor: weakref.ref[Monitor]

    @property
    def model(self) -> nn.Module | None:
        """The module that is watched, if it still exists."""
        return self.chain[0]()

    @property
    def mistaken(self) -> bool:
        """True if no pass of the module was seen and it has a submodule that may be the one that is called."""
        monitor = self.monitor()
        return monitor is not None and not monitor.passes and len(self.chain) > 1

    def end(self, end: Callable[[Monitor], None]) -> None:
        """Stops watching the model."""
        if (monitor := self.monitor()) is not None:
            end(monitor)


def chains(optimizer: Optimizer) -> list[list[nn.Module]]:
    """The models that hold an optimizer's parameters, the model with the most of them first.

    Each is a list of modules that hold the same parameters: the outermost one, then its submodule that holds them all,
    and so on. Wrappers that only forward their call to a module are left out, because it is enough to watch that
    module.
    """
    left = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # Something that holds a few of the parameters, such as a head with a loss, is not the model.
    least = LEAST_SHARE * len(left)
    # The program's variables are not known, so models are sought among all objects. `type`, and not `isinstance`, which
    # asks the object for its class: proxies of other libraries answer by doing things.
    modules = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), nn.Module) and is_made(candidate)
    ]
    inner = {id(child) for module in modules for child in _children(module)}
    tops = [m for m in modules if id(m) not in inner and COPY_MARK not in vars(m)]
    roots = {id(root): root for root in map(_model, tops)}
    sizes = {key: sum(1 for _ in root.parameters()) for key, root in roots.items()}
    held = {
        key: left & {id(p) for p in root.parameters()} for key, root in roots.items()
    }

    def order(key: int) -> tuple[int, int, str]:
        # Of several that hold the same parameters, the one with the fewest others.
        return -len(held[key]), sizes[key], type(roots[key]).__qualname__

    models = []
    for key in sorted(roots, key=order):
        parameters = held[key] & left
        if parameters and len(parameters) >= least:
            left -= parameters
            models.append(_inwards(roots[key], parameters))
    return models


def _inwards(root: nn.Module, parameters: set[int]) -> list[nn.Module]:
    """The module and those inside it that hold these parameters too, from the outermost inwards."""
    chain = []
    module: nn.Module | None = root
    while module is not None:
        # Containers such as ModuleList can't be called.
        if type(module).forward is not nn.Module.forward:
            chain.append(module)
        children = [unwrapped(child) for child in _children(module)]
        holding = [c for c in children if parameters <= {id(p) for p in c.parameters()}]
        module = holding[0] if holding else None
    return chain or [root]


def _model(module: nn.Module) -> nn.Module:
    try:
        return unwrapped(module)
    except AttributeError:  # a wrapper that is still being made
        return module


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in submodules_of(module).values() if child is not None]


# The models of a training script, each recorded in a separate run directory.


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
    """A watched model and its messages; `done` closes its files if the script deletes its optimizer before the end.
    `over` is true once another phase of training has begun."""

    model: str
    message_sink: MessageSink
    monitor: weakref.ref[Monitor]
    pilot: weakref.ref[Autopilot] | None
    done: weakref.finalize
    over: bool = False

    @property
    def used(self) -> bool:
        """Returns whether the session has a run directory or may get one."""
        monitor = self.monitor()
        return self.message_sink.run.path is not None or (
            monitor is not None and monitor.active
        )


@final
class _Remedied:
    """The remedies of --apply on one model. Remedies that change its forward pass stay for the lifetime of the model;
    remedies on optimizer steps are applied anew to the optimizer that begins a new phase of training.
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
        self._before = {name for name, _ in model.named_parameters()}
        self._model, self._optimizers = weakref.ref(model), [weakref.ref(optimizer)]
        # The hook registered last runs first, so that remedies on steps find the model as the other remedies leave it.
        self._steps = self._at_next_pass(self._on_steps, optimizer, refused)
        self._pass = self._at_next_pass(on_pass, optimizer, refused)

    def or_with(self, optimizer: Optimizer) -> None:
        """Adds another optimizer of the model in the same phase; see `AtNextPass.or_with`."""
        self._optimizers.append(weakref.ref(optimizer))
        for waiting in (self._pass, self._steps):
            if waiting is not None:
                waiting.or_with(optimizer)

    def begin_phase(
        self,
        optimizer: Optimizer,
        refused: Callable[[QkeelError], None],
        write: Callable[[str], None],
    ) -> None:
        """Applies the remedies on steps anew to the optimizer of the next phase; `write` receives a line about their
        state, and one about parameters that the remedies added and this optimizer does not train."""
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
        model = self._model()
        names = {} if model is None else dict(model.named_parameters())
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
        self._finder = ModelFinder(
            self._start, self._of_script, self._another, self._end
        )

    def _start(self, model: nn.Module, optimizer: Optimizer) -> Monitor:
        name, plan = type(model).__name__, self.plan
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
        done = weakref.finalize(optimizer, run.close, True)
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
        self._runs = [
            dataclasses.replace(r, over=r.over or r.monitor() is monitor)
            for r in self._runs
        ]
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
            if model in self._applied:
                self._applied[model].begin_phase(optimizer, refused, self.writer)
            else:
                self._applied[model] = _Remedied(spec, model, optimizer, refused)
        except QkeelError as error:
            refused(error)

    def _place(self, model: str) -> Path:
        """The plan's directory, with the class name appended for models of a different class than the first model."""
        first = next((run.model for run in self._runs if run.used), model)
        out = self.plan.out
        return out if first == model else out.with_name(f"{out.name}-{model}")

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
                "see above"
                if broken or is_measured
                else self._why_nothing(monitors, complete)
            )
            self.writer(
                f"nothing was {'written' if is_measured else 'measured'}: {reason}"
            )

    def _why_nothing(self, monitors: list[Monitor], complete: bool) -> str:
        if not self._finder.optimizers and not complete:
            return "the script ended before it created a torch.optim.Optimizer"
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
        return f"the script ended before {models} was called"


# A Python program run in this process as `python` would run it: arguments, paths, exit code, traceback.

EXAMPLE = "qkeel watch -- python train.py"
TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The part of a command after `python`: a script or, with -m, a module, and its arguments."""

    name: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    unbuffered: bool = False

    @property
    def title(self) -> str:
        """A readable name, also used for directories: train for train.py, package.train for -m package.train."""
        return self.name if self.module else Path(self.name).stem

    @property
    def words(self) -> list[str]:
        """The words from which parse() can reconstruct this program."""
        return [
            "python",
            *["-u"] * self.unbuffered,
            *["-m"] * self.module,
            self.name,
            *self.arguments,
        ]


def parse(words: Sequence[str]) -> Program | list[str]:
    """Returns the program that a command starts. For torchrun, which starts the program itself, returns the words of
    its command line.

    Raises: InvalidValueError if the command does not run Python, or runs it with another interpreter.
    """
    if not words:
        raise InvalidValueError(
            f"expected a training command after --, got none; for example: {EXAMPLE}"
        )
    first, arguments = words[0], list(words[1:])
    if Path(first).name == "torchrun":
        return arguments
    if first.endswith(".py"):
        return Program(name=first, arguments=tuple(arguments))
    if not _is_this_python(first):
        raise InvalidValueError(
            f"expected python, torchrun or a .py file, got {first!r}. If it is a launcher, let it start the watcher: "
            f"{first} ... -m qkeel watch -- python train.py. If it is the command of a package, try running it as a "
            "module: qkeel watch -- python -m NAME"
        )
    return _behind_python(arguments)


def _is_this_python(word: str) -> bool:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    name = Path(word).name.removesuffix(".exe")
    if name not in ("python", "python3", version) and word != sys.executable:
        return False
    if (
        os.sep in word
        and Path(word).absolute().parent != Path(sys.executable).absolute().parent
    ):
        raise InvalidValueError(
            f"the script runs in the watcher's own interpreter, {sys.executable}, but the command names {word}. "
            "Install qkeel for the interpreter in the command, or use `python` in the command"
        )
    return True


def _behind_python(words: list[str]) -> Program | list[str]:
    unbuffered = False
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "-u":
            unbuffered = True
        elif option.startswith("-m"):
            name = option[2:] or (words.pop(0) if words else "")
            if not name:
                raise InvalidValueError(
                    f"expected the name of a module after -m, got nothing; see {EXAMPLE}"
                )
            if name in TORCHRUN:
                return words
            return Program(
                name=name, arguments=tuple(words), module=True, unbuffered=unbuffered
            )
        else:
            advice = f"Pass it to that interpreter: python {option} -m qkeel watch -- python train.py"
            if option in ("-c", "-"):
                advice = f"Save the program in a file: {EXAMPLE}"
            raise InvalidValueError(
                f"python's option {option} has no effect here, because the script runs in the watcher's own "
                f"interpreter. {advice}"
            )
    if not words:
        raise InvalidValueError(
            f"expected a script after python, got none; for example: {EXAMPLE}"
        )
    return Program(name=words[0], arguments=tuple(words[1:]), unbuffered=unbuffered)


def under_torchrun(words: Sequence[str], watcher: Sequence[str]) -> list[str]:
    """The torchrun command in which every worker runs under `watcher`, the words `qkeel watch ...` with their --."""
    # Takes 0.2 s, which other programs need not wait for.
    from torch.distributed.run import (
        get_args_parser,
    )

    parsed = get_args_parser().parse_args(list(words))
    if parsed.no_python:
        raise InvalidValueError(
            "torchrun's --no-python starts a program that is not Python, which can't be watched"
        )
    options = list(words[: len(words) - 1 - len(parsed.training_script_args)])
    if not parsed.module:
        # The worker is a module, `qkeel`, whatever the script is.
        options.append("-m")
    program = Program(
        name=parsed.training_script,
        arguments=tuple(parsed.training_script_args),
        module=parsed.module,
        unbuffered=True,
    )
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        *watcher,
        *program.words,
    ]


def prepare(program: Program) -> bytes | None:
    """Sets up this process as the program expects, and returns the source of a script or None for a module.

    Raises: DataError if there is no such file or module.
    """
    code = None if program.module else read_file(Path(program.name), DataError)
    folder = Path.cwd() if program.module else Path(program.name).resolve().parent
    if not sys.flags.safe_path:
        # As python does: the folder of the script, or the current one for -m.
        sys.path[0] = str(folder)
    if (
        program.module
        and importlib.util.find_spec(program.name.partition(".")[0]) is None
    ):
        raise DataError(
            f"expected a module that Python can find from {folder}, got {program.name!r}; is it installed?"
        )
    if program.unbuffered:
        raw = open(sys.stdout.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115 - stdout until the end
        encoding = sys.stdout.encoding, sys.stdout.errors
        sys.stdout = io.TextIOWrapper(raw, *encoding, write_through=True)  # type: ignore[arg-type]
    sys.argv = [program.name, *program.arguments]
    return code


def execute(program: Program, source: bytes | None) -> int:
    """Runs the program as __main__ and returns the exit code with which python would have ended (130 after Ctrl-C)."""
    try:
        if source is None:
            runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        else:
            _run_script(program.name, source)
    except SystemExit as leave:
        return _exit_code(leave)
    except BaseException as error:
        # The traceback is the script's alone, as if python had run it.
        error.__traceback__ = _from_users_code(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    return OK


def _run_script(name: str, source: bytes) -> None:
    """Like runpy.run_path, but sys.argv[0] stays as given, and __main__ remains available to threads and pickles."""
    path = str(Path(name).absolute())
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__cached__ = None  # type: ignore[attr-defined]
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    # Pickles and threads of the script find its classes here, also after it has ended.
    sys.modules["__main__"] = main
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _exit_code(leave: SystemExit) -> int:
    if leave.code is None:
        return OK
    if isinstance(leave.code, int):
        return leave.code
    print(leave.code, file=sys.stderr)
    return FAILED


def _from_users_code(trace: TracebackType | None) -> TracebackType | None:
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace
