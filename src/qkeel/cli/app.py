"""The program `qkeel`: its commands, their help, and the exit code of a command line."""

from __future__ import annotations

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
)
from qkeel.cli.commands import group as in_help
from qkeel.cli.output import printable
from qkeel.cli.retired import retired
from qkeel.errors import QkeelError

USAGES = {
    "watch": "Usage: qkeel watch [OPTIONS] -- COMMAND"
}  # where cyclopts' own would mislead
_FULL = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
)  # of stdout: no command opens files bare


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
    groups = {title: Group(title, sort_key=i) for i, title in enumerate(GROUPS)}
    about = "Many runs, one table and one report."
    study = app.command(
        App(
            name="study",
            group=groups["Compare"],
            help=about,
            help_epilogue=_example("study"),
        )
    )
    for command, (place, line) in commands().items():
        group, _, name = command.rpartition(" ")
        shown = None if name in words else line
        title = groups[in_help(command)]
        (study if group else app).command(
            place,
            name=name,
            help=shown,
            help_epilogue=_example(command),
            usage=USAGES.get(command),
            group=title,
        )
    return app


def _example(command: str) -> str:
    more = (
        f"{HELP_ALL} shows every option.\n\n"
        if command in ("run", "demo") or " " in command
        else ""
    )
    return f"{more}Example: {example(command)}"


def _before_dashes(arguments: Sequence[str]) -> Sequence[str]:
    """The words that belong to qkeel itself; the words after -- are another command."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def _about_commas(words: Sequence[str], error: str) -> str:
    """Returns the error, with a hint added if it quotes a value with commas, as several values may have been meant."""
    values = [
        word.partition("=")[2] if word.startswith("--") else word for word in words
    ]
    meant = next(
        (
            v.split(",")
            for v in values
            if "," in v and v in error and "=" not in v.partition(",")[2]
        ),
        [],
    )
    hint = f". If an option takes several values, separate them with spaces: {' '.join(meant)}"
    return error.rstrip(".") + hint if meant else error


def _in_words(error: CycloptsError) -> str:
    """What is wrong with a command line and what to type, reworded if the message of cyclopts is hard to understand."""
    command = " ".join(error.command_chain or ())
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.argument.name
        return f"qkeel {command} needs {name}; for example: {example(command)}"
    return str(error)


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
        words += arguments[len(words) :]
        code = app(
            words, exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()  # here a full disk can still be reported; at the interpreter's end it cannot
    except (CycloptsError, QkeelError) as error:
        said = _in_words(error) if isinstance(error, CycloptsError) else str(error)
        print(
            "error: "
            + printable(
                _about_commas(_before_dashes(arguments), " ".join(said.split()))
            ),
            file=sys.stderr,
        )
        return USAGE
    except KeyboardInterrupt:
        print(f"interrupted. Resume with: {command_line()}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `qkeel presets | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        if (
            error.filename is not None or error.errno == errno.ENOENT
        ):  # without a name: the current folder is gone
            what = (
                "the current folder"
                if error.filename is None
                else repr(str(error.filename))
            )
            print(
                f"error: cannot use {what}: {error.strerror}. Give a different path.",
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
