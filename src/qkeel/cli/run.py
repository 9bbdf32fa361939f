"""`qkeel run`: one training run; `qkeel config`: its configuration."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

from cyclopts import Parameter

from qkeel.cli.console import RunView, make_console, number, print_line
from qkeel.cli.exits import COLLAPSED, FAILED, OK, command_line
from qkeel.cli.flags import as_toml, configure, starting, view
from qkeel.errors import QkeelError
from qkeel.lab import Watcher
from qkeel.lab import run as train
from qkeel.lab.model.build_model import resolve

RunFlags: Any = view()


def run(
    recipe: Path | None = None,
    *,
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    json_: Annotated[bool, Parameter(name="--json", negative=(), show_default=False)] = False,
    fail_on_collapse: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    flags: Annotated[RunFlags, Parameter(name="*")] = RunFlags(),  # type: ignore[valid-type]  # noqa: B008 - frozen
) -> int:
    """Train once, recording the logits of every head; the same command resumes it after an interruption.

    Args:
        recipe: TOML file of settings; flags go over it.
        out: Directory of the run [default: runs/RUN_ID].
        json_: Print the result as JSON, everything else to stderr.
        fail_on_collapse: Exit with code 3 if attention collapsed or the loss is NaN.
    """
    config = resolve(configure(flags, recipe, starting(flags))[0])
    place = out or Path("runs") / config.run_id
    console = make_console(stderr=json_)
    print_line(console, f"run {place}")
    watcher = Watcher(on_record=RunView(console, config.steps).on_record, should_stop=_stop_on_interrupt())
    try:
        directory = train(config, place, command=command_line(), watcher=watcher)
    except QkeelError:
        raise
    except Exception as error:
        print(f"error: the run failed: {type(error).__name__}: {error}; see {place / 'FAILED'}", file=sys.stderr)
        return FAILED
    row = directory.summary()
    if json_:
        print(json.dumps({k: v if v == v else None for k, v in row.items()}))
    state = "collapsed" if row["collapsed"] else "healthy"
    result = f"val_loss {row['val_loss']:.3f}, max logit {number(row['max_logit'])}, {row['cpu_seconds']:.1f} cpu-s"
    console.print(f"{state}: {result}", highlight=False)
    print_line(console, f"run {place}")
    return COLLAPSED if fail_on_collapse and row["collapsed"] else OK


def print_config(
    *,
    recipe: Path | None = None,
    flags: Annotated[RunFlags, Parameter(name="*")] = RunFlags(),  # type: ignore[valid-type]  # noqa: B008 - frozen
) -> int:
    """Print the configuration that a recipe and flags make, as a TOML recipe.

    Args:
        recipe: TOML file of settings; flags go over it.
    """
    print(as_toml(configure(flags, recipe, starting(flags))[0]))
    return OK


def _stop_on_interrupt() -> Callable[[], bool]:
    """First Ctrl-C: a checkpoint at the next step. Second: at once. Started with it ignored (`qkeel run &`): never."""
    asked: list[bool] = []

    def handler(number: int, frame: FrameType | None) -> None:
        asked.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)
    return lambda: bool(asked)
