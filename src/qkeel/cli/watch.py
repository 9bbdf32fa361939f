"""`qkeel watch -- python train.py` runs a training script unchanged and watches what it trains: `python_program` runs it,
`model_finder` finds its models, `watch_session` attaches to them."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import difflib
import inspect
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import Parameter

from qkeel.autopilot import named_policy
from qkeel.cli.commands import OK
from qkeel.cli.parameters import Switch, Unset
from qkeel.cli.python_program import (
    EXAMPLE,
    Successors,
    Torchrun,
    execute,
    parse,
    prepare,
)
from qkeel.cli.run_messages import TYPED, Fix, MessageWriter
from qkeel.cli.watch_session import WatchPlan, WatchSession
from qkeel.errors import InvalidValueError
from qkeel.integrations import sinks
from qkeel.monitor import Adaptive, Cadence, Every, LogSpaced
from qkeel.monitor.cadence import WHILE_LOGITS_MOVE
from qkeel.records import disk
from qkeel.remedies.apply import canonical

_SWITCH = Parameter(negative=(), negative_iterable=(), show_default=False)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """The steps at which to measure."""

    every: Unset[int] = None
    """Measure every n-th optimizer step [default: every 10th, and every 2nd while logits are changing]."""
    adaptive: Switch = False
    """Measure every 100 steps, or as often as every 5 while logits are changing."""
    log_spaced: Switch = False
    """Measure 20 steps per decade of steps: often at the start, then less and less often."""

    def cadence(self) -> Cadence:
        """The cadence that the options specify.

        Raises: InvalidValueError if more than one option is given.
        """
        if self.adaptive + self.log_spaced + (self.every is not None) > 1:
            raise InvalidValueError(
                "expected one of --every, --adaptive, --log-spaced, got several; give one"
            )
        if self.adaptive or self.log_spaced:
            return Adaptive() if self.adaptive else LogSpaced()
        return WHILE_LOGITS_MOVE if self.every is None else Every(self.every)


def watch(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    when: Annotated[When, _SWITCH] = When(),
    out: Unset[Path] = None,
    sink: Annotated[list[str], _SWITCH] = [],  # noqa: B006 - read only
    query_mask: Unset[str] = None,
    nan: Switch = False,
    apply: Unset[str] = None,
    autopilot: Switch = False,
    policy: Unset[str] = None,
) -> int:
    """Run a training script unchanged and watch the attention of the models it trains, with the script's exit code.

    Options before -- are for qkeel, and everything after -- is the command: python with a script or with -m and a
    module, or torchrun with its options. Training in processes that the script itself starts is not watched.

    Args:
        command: The training command, after --.
        when: The steps at which to measure.
        out: Directory of the run; if it is not empty, -2, -3 and so on is appended [default: qkeel-runs/SCRIPT].
        sink: Also send metrics to a tracker, like tensorboard or wandb:project=gpt; may be repeated.
        query_mask: Keyword argument of the model's forward that marks the query rows to include, like attention_mask.
        nan: Also name what made the first NaN or infinity, at the cost of waiting for the device before each step.
        apply: Remedies to train with, like lalr:tau=0.1+qk_clip or qk_norm; the script itself is not changed.
        autopilot: Apply the cheapest effective remedy automatically, only to the heads that need it.
        policy: The autopilot's policy, like ladder:threshold=50 [default: ladder].
    """
    cadence = when.cadence()
    trackers = [tracker for text in sink for tracker in sinks(text)]
    for tracker in trackers:
        tracker.require()
    # The words before -- are qkeel's, and are typed again in what an alarm proposes.
    words = sys.argv[1 : len(sys.argv) - len(command)]
    if command and words[-1:] != ["--"]:
        raise _misread(command)
    if apply is not None:
        if autopilot or policy is not None:
            raise InvalidValueError(
                "expected --apply or --autopilot, got both; the autopilot chooses the remedies"
            )
        apply = canonical(apply)
    program = parse(command)
    if isinstance(program, Torchrun):
        launcher = program.command(["qkeel", *words])
        os.environ[TYPED] = shlex.join(command)
        _become(launcher)
    # So that the script's environment is the same as without qkeel.
    typed = os.environ.pop(TYPED, None)
    # Read before anything is watched or written: a script that cannot be read ends here.
    source = prepare(program)
    directory = out or Path("qkeel-runs") / program.title
    if _rank() == 0:
        # Before the script runs: its first record would come after minutes of training.
        disk.check_writable(directory.absolute())
    named = policy or ("ladder" if autopilot else None)
    if named is not None:
        named_policy(named)
    plan = WatchPlan(
        cadence=cadence,
        out=directory.absolute(),
        shown=directory,
        fix=Fix(
            watch_words=words,
            command=command if typed is None else shlex.split(typed),
            applied=apply or "",
            piloted=named is not None,
            launched=typed is None and int(os.environ.get("WORLD_SIZE", "1")) > 1,
        ),
        sinks=tuple(trackers),
        query_mask=query_mask,
        nan=nan,
        policy=named,
    )
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(MessageWriter(_rank()))
        session = WatchSession(plan, writer)
        with Successors(words, session.leave):
            code = execute(program, source)
        if writer.here:
            stack.callback(session.close, complete=code == OK)
            if any(not thread.daemon for thread in _other_threads()):
                # They may train, and Python waits for them before it calls this.
                atexit.register(stack.pop_all().close)
    return code


def _other_threads() -> list[threading.Thread]:
    return [x for x in threading.enumerate() if x is not threading.current_thread()]


def _misread(command: Sequence[str]) -> InvalidValueError:
    """Returns the error for a command line whose qkeel part is not understood; `command` is the part not parsed."""
    first = command[0]
    if not first.startswith("-"):
        return InvalidValueError(
            f"expected -- before the command, to separate its options from qkeel's: {EXAMPLE}"
        )
    options = [
        f"--{name.replace('_', '-')}"
        for name in (
            *When.__dataclass_fields__,
            *list(inspect.signature(watch).parameters)[2:],
        )
    ]
    near = difflib.get_close_matches(first.partition("=")[0], options, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]}?" if near else f"expected {', '.join(options)}."
    return InvalidValueError(
        f"unknown option {first} of qkeel watch: {meant} Options of the script go after --"
    )


def _become(words: list[str]) -> NoReturn:
    """Replaces this process with another command."""
    # `execv` drops what is still in the buffers of this process.
    sys.stdout.flush()
    os.execv(words[0], words)


def _rank() -> int:
    """The rank that torchrun or another launcher gave this process, known before the script sets up distribution."""
    return int(os.environ.get("RANK", "0"))
