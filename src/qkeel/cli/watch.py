"""`qkeel watch -- python train.py`: a training script, unchanged, run under watch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import Parameter

from qkeel.cli.exits import OK
from qkeel.cli.watched_script.messages import MessageWriter
from qkeel.cli.watched_script.run_program import EXAMPLE, Program, execute, parse, prepare, under_torchrun
from qkeel.cli.watched_script.watch_session import WatchPlan, WatchSession
from qkeel.errors import InvalidValueError
from qkeel.integrations import sinks
from qkeel.monitor import Adaptive, Every, LogSpaced
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
    plan = WatchPlan(cadence=cadence, out=place, sinks=tuple(others), query_mask=query_mask)
    with MessageWriter(_rank()) as writer, _page(plan, live, writer) as plan:
        session = WatchSession(plan, writer)
        code = execute(program, source)
        if writer.here:
            session.close(complete=code == OK)
    return code


@contextlib.contextmanager
def _page(plan: WatchPlan, live: bool | int, writer: MessageWriter) -> Iterator[WatchPlan]:
    """The page of the first run, served until the script ends; its directory is made now, so that it can be shown."""
    if live is False or writer.rank:
        yield plan
        return
    new = not plan.out.parent.exists()
    place = fresh_directory(plan.out)
    try:
        with serve(place, 0 if live is True else live) as server:
            writer(f"live page {server.url}")
            yield dataclasses.replace(plan, out=place)
    finally:
        if writer.here and not any(place.iterdir()):
            place.rmdir()
            if new:
                place.parent.rmdir()


def _become(words: list[str]) -> NoReturn:
    """Replaces this process by another command."""
    sys.stdout.flush()
    os.execv(words[0], words)


def _rank() -> int:
    """The rank of this process among those that torchrun or another launcher started, before the script sets it up."""
    return int(os.environ.get("RANK", "0"))
