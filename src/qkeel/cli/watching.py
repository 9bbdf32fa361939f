"""`qkeel watch -- python train.py`: someone's training script, unchanged, under watch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn, final

from cyclopts import Parameter
from torch import nn
from torch.optim import Optimizer

from qkeel.cli.exits import OK
from qkeel.cli.narrator import Narrator, Voice
from qkeel.cli.program import EXAMPLE, Program, execute, parse, prepare, under_torchrun
from qkeel.cli.spotting import Spotter
from qkeel.errors import InvalidValueError
from qkeel.integrations import sinks
from qkeel.monitor import Adaptive, Cadence, Every, LogSpaced, RunDirectorySink, Sink
from qkeel.monitor.monitor import Monitor
from qkeel.monitor.watch import watch as attach
from qkeel.records import fresh_directory
from qkeel.report.live import serve

_SWITCH = Parameter(negative=(), negative_iterable=(), show_default=False)
_OPTIONAL = Parameter(show_default=False)
_EVERY = 10  # steps


def watch(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    every: Annotated[int | None, _OPTIONAL] = None,
    adaptive: Annotated[bool, _SWITCH] = False,
    log_spaced: Annotated[bool, _SWITCH] = False,
    out: Annotated[Path | None, _OPTIONAL] = None,
    sink: Annotated[list[str], _SWITCH] = [],  # noqa: B006 - read only
    live: Annotated[bool | int, _SWITCH] = False,
    query_mask: Annotated[str | None, _OPTIONAL] = None,
) -> int:
    """Run a training script unchanged and watch the attention of what it trains; the exit code is the script's.

    Everything before -- is for qkeel, everything after it is the command: python with a script or -m and a module, or
    torchrun with its options. What is trained in processes that the script starts itself is not seen.

    Args:
        command: The command that trains, after --.
        every: Measure every n-th optimizer step [default: 10].
        adaptive: Measure every 100 steps, and when the logits move up to every 5.
        log_spaced: Measure 20 steps per decade of steps: often at the start, then less and less.
        out: Directory of the run; where it holds something, -2, -3 ... is added [default: qkeel-runs/SCRIPT].
        sink: Where else the numbers of the first model go, as tensorboard or wandb:project=gpt; may be repeated.
        live: Serve the page of the run while it goes on, on this port of this machine or on a free one.
        query_mask: Keyword argument of the model's forward that says which rows count, like attention_mask.
    """
    if adaptive + log_spaced + (every is not None) > 1:
        raise InvalidValueError("expected one of --every, --adaptive, --log-spaced, got several; leave one")
    cadence = Adaptive() if adaptive else LogSpaced() if log_spaced else Every(_EVERY if every is None else every)
    others = [part for text in sink for part in sinks(text)]
    own = sys.argv[1 : len(sys.argv) - len(command)]
    if command and own[-1:] != ["--"]:
        raise InvalidValueError(f"expected -- before the command, so that its options are its own: {EXAMPLE}")
    program = parse(command)
    if not isinstance(program, Program):
        _become(under_torchrun(program, ["qkeel", *own]))
    source = prepare(program)
    place = (out or Path("qkeel-runs") / program.title).absolute()
    plan = Plan(cadence=cadence, out=place, sinks=tuple(others), query_mask=query_mask)
    with Voice(_rank()) as voice, _page(plan, live, voice) as plan:
        session = Session(plan, voice)
        code = execute(program, source)
        if voice.here:
            session.close(complete=code == OK)
    return code


@contextlib.contextmanager
def _page(plan: Plan, live: bool | int, voice: Voice) -> Iterator[Plan]:
    """The page of the first run, served until the script ends; its directory is made now, so that it can be shown."""
    if live is False or voice.rank:
        yield plan
        return
    new = not plan.out.parent.exists()
    place = fresh_directory(plan.out)
    try:
        with serve(place, 0 if live is True else live) as server:
            voice(f"live page {server.url}")
            yield dataclasses.replace(plan, out=place)
    finally:
        if voice.here and not any(place.iterdir()):
            place.rmdir()
            if new:
                place.parent.rmdir()


def _become(words: list[str]) -> NoReturn:
    """Hand this process over to another command."""
    sys.stdout.flush()
    os.execv(words[0], words)


def _rank() -> int:
    """Of this process among those that torchrun or another launcher started; known before the script says it."""
    return int(os.environ.get("RANK", "0"))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure and where to write it."""

    cadence: Cadence
    out: Path
    sinks: tuple[Sink, ...] = ()
    query_mask: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A model under watch and what is said of it; `done` closes its files if the script drops it before the end."""

    model: str
    narrator: Narrator
    monitor: weakref.ref[Monitor]
    done: weakref.finalize

    @property
    def used(self) -> bool:
        """Whether it has a run directory or may get one."""
        monitor = self.monitor()
        return self.narrator.run.path is not None or (monitor is not None and monitor.active)


@final
class Session:
    """Watches the models of the script that runs in this process, each in a run directory of its own."""

    def __init__(self, plan: Plan, voice: Voice) -> None:
        self.plan, self.voice = plan, voice
        self._runs: list[_Run] = []
        self._spotter = Spotter(self._start)

    def _start(self, model: nn.Module, optimizer: Optimizer) -> Monitor:
        name, plan = type(model).__name__, self.plan
        run = RunDirectorySink(self._place(name))
        narrator = Narrator(run, self.voice)
        others = () if any(run.used for run in self._runs) else plan.sinks
        monitor = attach(
            model,
            optimizer,
            every=plan.cadence,
            sinks=[run, narrator, *others] if self.voice.rank == 0 else [],
            query_mask=plan.query_mask,
        )
        done = weakref.finalize(optimizer, run.close, True)
        done.atexit = False
        self._runs.append(_Run(model=name, narrator=narrator, monitor=weakref.ref(monitor), done=done))
        return monitor

    def _place(self, model: str) -> Path:
        """That of the plan; of a model of another class than the first with its name behind."""
        first = next((run.model for run in self._runs if run.used), model)
        out = self.plan.out
        return out if first == model else out.with_name(f"{out.name}-{model}")

    def close(self, *, complete: bool) -> None:
        """Stop watching; say how it went and where the runs are. `complete`: whether the script ended well."""
        self._spotter.remove()
        seen = [monitor for run in self._runs if (monitor := run.monitor()) is not None]
        broken = any(monitor.passes and not monitor.active for monitor in seen)
        for monitor in seen:
            monitor.close(complete=complete)
        for run in self._runs:
            run.done.detach()
        written = [run.narrator for run in self._runs if run.narrator.run.path is not None]
        for narrator in written:
            narrator.summary()
        for narrator in written:
            self.voice(f"run {narrator.place}")
        if written:
            self.voice(f"for a page of it: {shlex.join(['qkeel', 'report', *(n.place for n in written)])}")
        else:
            self.voice(f"nothing was measured: {'see above' if broken else self._why_nothing(seen)}")

    def _why_nothing(self, monitors: list[Monitor]) -> str:
        if not self._spotter.optimizers:
            return (
                "the script made no torch.optim.Optimizer in this process. If it starts processes that train, start "
                "them with torchrun instead; elsewhere call qkeel.watch(model) in it"
            )
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
