"""The commands of `qkeel`: which module has each, and the exit code of a command line."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

import qkeel
from qkeel.cli.exits import FAILED, INTERRUPTED, OK, USAGE, command_line
from qkeel.errors import QkeelError
from qkeel.lab.studies import STUDIES

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of stdout: no command opens files bare
# Name, as typed -> where it is and its line in the list of commands. A module is imported when its command is called,
# so that `qkeel --help` waits for no torch.
COMMANDS = {
    "run": (
        "qkeel.cli.run:run",
        "Train once, recording the logits of every head; the same command goes on after an interruption.",
    ),
    "study precision": (
        "qkeel.cli.studies.study_precision:study_precision",
        "The same attention in float64, fp32, bf16, fp16 and with q and k in fp8, over logits of growing size.",
    ),
    "merge": (
        "qkeel.cli.studies.merge:merge",
        "Merge directories of one study, made apart on several machines, into a new one; they stay as they are.",
    ),
    "report": ("qkeel.cli.report:report", "Write one self-contained HTML page about studies, runs or watched models."),
    "watch": (
        "qkeel.cli.watch:watch",
        "Run a training script unchanged and watch the attention of what it trains; the exit code is the script's.",
    ),
    "scan": (
        "qkeel.cli.scan:scan",
        "Read a checkpoint without running it: per layer and head, norms of the q and k weights and the logits they "
        "allow.",
    ),
    "export": ("qkeel.cli.export:export", "Write the records of a run as tables, CSV or Parquet."),
    "convert": (
        "qkeel.cli.convert:convert",
        "Write a checkpoint whose queries and keys are normed as a Qwen3, OLMo 2 or Gemma 3, with the same outputs.",
    ),
    "explain": (
        "qkeel.cli.explain:explain_command",
        "Print the formula that a preset or remedy puts in force, and its source.",
    ),
    "presets": ("qkeel.cli.explain:list_presets", "List the published attention recipes."),
    "remedies": ("qkeel.cli.explain:list_remedies", "List the remedies."),
    "config": (
        "qkeel.cli.run:print_config",
        "Print the configuration that a recipe and flags make, as a TOML recipe.",
    ),
    "bench": ("qkeel.cli.bench:bench", "Time every attention kernel on this machine, side by side."),
}


def commands() -> dict[str, tuple[str, str]]:
    """Returns COMMANDS and a command for each study: `qkeel demo`, `qkeel study NAME` for the others."""
    studies = {"demo" if name == "demo" else f"study {name}": (name, line) for name, (_, line) in STUDIES.items()}
    return COMMANDS | {command: (f"qkeel.cli.studies.study:{name}", line) for command, (name, line) in studies.items()}


def make_app(words: Sequence[str]) -> App:
    """Returns the program for a command line.

    The commands that `words` name are described by their whole docstring, the others by their line of `commands`.
    """
    app = App(
        name="qkeel",
        help="Keeps attention logits on an even keel.",
        version=qkeel.__version__,
        suppress_keyboard_interrupt=False,
    )
    study = app.command(App(name="study", help="Many runs, one table and one report."))
    for command, (place, line) in commands().items():
        group, _, name = command.rpartition(" ")
        (study if group else app).command(place, name=name, help=None if name in words else line)
    return app


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns the exit code."""
    try:
        app = make_app(arguments)
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()  # here a full disk can still be reported; at the interpreter's end it cannot
    except (CycloptsError, QkeelError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"interrupted. Go on with: {command_line()}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `qkeel presets | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        if error.filename is not None or error.errno == errno.ENOENT:  # without a name: the current folder is gone
            what = "the current folder" if error.filename is None else repr(str(error.filename))
            print(f"error: cannot use {what}: {error.strerror}. Name another path.", file=sys.stderr)
            return USAGE
        if error.errno not in _FULL:
            raise
        print(f"error: cannot write the output: {error.strerror}; free some space", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code if isinstance(code, int) else OK
