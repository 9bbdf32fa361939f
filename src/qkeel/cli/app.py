"""The program `qkeel`: its commands, their help, and the exit code of a command line."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Group, MissingArgumentError

import qkeel
from qkeel.cli.commands import (
    FAILED,
    GROUPS,
    HELP_ALL,
    INTERRUPTED,
    OK,
    USAGE,
    command_line,
    commands,
    example,
    group,
)
from qkeel.cli.output import printable
from qkeel.cli.retired import retired
from qkeel.errors import QkeelError

# Where cyclopts' own would mislead.
USAGES = {"watch": "Usage: qkeel watch [OPTIONS] -- COMMAND"}
ALL_OPTIONS = f"{HELP_ALL} shows every option.\n\n"
# Of stdout: no command opens files bare.
_FULL = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
)


def make_app(words: Sequence[str]) -> App:
    """Returns the program for a command line.

    Commands named in `words` are described by their full docstring, all others by their line in `commands`.
    """
    app = App(
        name="qkeel",
        help="Keeps attention logits on an even keel.",
        version=qkeel.__version__,
        suppress_keyboard_interrupt=False,
    )
    titles = {title: Group(title, sort_key=i) for i, title in enumerate(GROUPS)}
    example_of = {command: f"Example: {example(command)}" for command in commands()}
    study = app.command(
        App(
            name="study",
            group=titles["Compare"],
            help="Many runs, one table and one report.",
            help_epilogue=f"{ALL_OPTIONS}Example: {example('study')}",
        )
    )
    for command, (location, line) in commands().items():
        parent, _, name = command.rpartition(" ")
        has_more = parent or command in ("run", "demo")
        (study if parent else app).command(
            location,
            name=name,
            help=None if name in words else line,
            help_epilogue=(ALL_OPTIONS if has_more else "") + example_of[command],
            usage=USAGES.get(command),
            group=titles[group(command)],
        )
    return app


def _before_dashes(arguments: Sequence[str]) -> Sequence[str]:
    """The words that belong to qkeel itself; the words after -- are another command."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns the exit code."""
    if (instead := retired(_before_dashes(arguments))) is not None:
        print(f"error: {instead}", file=sys.stderr)
        return USAGE
    try:
        words = [
            "--help" if word == HELP_ALL else word for word in _before_dashes(arguments)
        ]
        app = make_app(words)
        # What stands behind -- belongs to another command and is never read as an option of ours.
        words += arguments[len(words) :]
        code = app(
            words, exit_on_error=False, print_error=False, result_action="return_value"
        )
        # Here a full disk can still be reported; at the interpreter's end it cannot. A watched program may have closed
        # stdout, or put something without a flush in its place.
        with contextlib.suppress(AttributeError, ValueError):
            sys.stdout.flush()
    except (CycloptsError, QkeelError) as error:
        text = str(error)
        if isinstance(error, MissingArgumentError) and error.argument is not None:
            command = " ".join(error.command_chain or ())
            text = f"qkeel {command} needs {error.argument.name}; for example: {example(command)}"
        print(f"error: {printable(' '.join(text.split()))}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"interrupted. Resume with: {command_line()}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `qkeel presets | head`
        # The interpreter flushes stdout once more at its end, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        # Without a name, the current folder is gone.
        if error.filename is not None or error.errno == errno.ENOENT:
            path = "the current folder"
            if error.filename is not None:
                path = repr(str(error.filename))
            print(
                f"error: cannot use {path}: {error.strerror}. Give a different path.",
                file=sys.stderr,
            )
            return USAGE
        if error.errno not in _FULL:
            raise
        print(
            f"error: cannot write the output: {error.strerror}; free some space",
            file=sys.stderr,
        )
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code if isinstance(code, int) else OK
