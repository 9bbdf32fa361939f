"""`qkeel watch -- python train.py` runs a training script unchanged and watches what it trains: `python_program` runs it,
`model_finder` finds its models, `watch_session` attaches to them."""

from __future__ import annotations

import atexit
import contextlib
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
    Program,
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
from qkeel.monitor import Every
from qkeel.monitor.cadence import WHILE_LOGITS_MOVE
from qkeel.records import disk
from qkeel.remedies.apply import canonical

_SWITCH = Parameter(negative=(), negative_iterable=(), show_default=False)


def watch(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    every: Unset[int] = None,
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
        every: Measure every n-th optimizer step [default: every 10th, and every 2nd while logits are changing].
        out: Directory of the run; if it is not empty, -2, -3 and so on is appended [default: qkeel-runs/SCRIPT].
        sink: Also send metrics to a tracker, like tensorboard or wandb:project=gpt; may be repeated.
        query_mask: Keyword argument of the model's forward that marks the query rows to include, like attention_mask.
        nan: Also name what made the first NaN or infinity, at the cost of waiting for the device before each step.
        apply: Remedies to train with, like lalr:tau=0.1+qk_clip or qk_norm; the script itself is not changed.
        autopilot: Apply the cheapest effective remedy automatically, only to the heads that need it.
        policy: The autopilot's policy, like ladder:threshold=50 [default: ladder].
    """
    trackers = [tracker for text in sink for tracker in sinks(text)]
    for tracker in trackers:
        tracker.require()
    # The words before -- are qkeel's, and are typed again in what an alarm proposes.
    words = sys.argv[1 : len(sys.argv) - len(command)]
    if command and words[-1:] != ["--"]:
        raise _misread(command)
    ladder = policy or ("ladder" if autopilot else None)
    if ladder is not None:
        named_policy(ladder)
        if apply is not None:
            raise InvalidValueError(
                "expected --apply or --autopilot, got both; the autopilot chooses the remedies"
            )
    applied = canonical(apply) if apply is not None else ""
    program = parse(command)
    if isinstance(program, Torchrun):
        _become_torchrun(program, words, command)
    # So that the script's environment is the same as without qkeel.
    typed = os.environ.pop(TYPED, None)
    # Read before anything is watched or written: a script that cannot be read ends here.
    source = prepare(program)
    shown = out or Path("qkeel-runs") / program.title
    if _rank() == 0:
        # Before the script runs: its first record would come after minutes of training.
        disk.check_writable(shown.absolute())
    plan = WatchPlan(
        cadence=WHILE_LOGITS_MOVE if every is None else Every(every),
        out=shown.absolute(),
        shown=shown,
        fix=Fix(
            watch_words=words,
            command=command if typed is None else shlex.split(typed),
            applied=applied,
            piloted=ladder is not None,
            launched=typed is None and int(os.environ.get("WORLD_SIZE", "1")) > 1,
        ),
        sinks=tuple(trackers),
        query_mask=query_mask,
        nan=nan,
        policy=ladder,
    )
    return _watched(plan, program, source)


def _watched(plan: WatchPlan, program: Program, source: bytes | None) -> int:
    """Runs the program, watches its models, and returns its exit code."""
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(MessageWriter(_rank()))
        session = WatchSession(plan, writer)
        with Successors(plan.fix.watch_words, session.leave):
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
    return InvalidValueError(
        f"unknown option {first} of qkeel watch: `qkeel watch --help` lists its options. Options of the script go after --"
    )


def _become_torchrun(
    program: Torchrun, words: Sequence[str], command: Sequence[str]
) -> NoReturn:
    """Replaces this process with torchrun, which starts the watcher in each of its workers."""
    launcher = program.command(["qkeel", *words])
    os.environ[TYPED] = shlex.join(command)
    # `execv` drops what is still in the buffers of this process.
    sys.stdout.flush()
    os.execv(launcher[0], launcher)


def _rank() -> int:
    """The rank that torchrun or another launcher gave this process, known before the script sets up distribution."""
    return int(os.environ.get("RANK", "0"))
