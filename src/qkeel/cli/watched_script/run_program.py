"""A Python program run in this process as `python` would run it: arguments, paths, exit code, traceback."""

from __future__ import annotations

import builtins
import dataclasses
import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import final

from qkeel.cli.exits import FAILED, INTERRUPTED, OK
from qkeel.errors import DataError, InvalidValueError
from qkeel.records.regular_files import read_regular

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
        """A name for people and directories: train for train.py, package.train for -m package.train."""
        return self.name if self.module else Path(self.name).stem

    @property
    def words(self) -> list[str]:
        """The words that parse() reads again as this program."""
        return ["python", *["-u"] * self.unbuffered, *["-m"] * self.module, self.name, *self.arguments]


def parse(words: Sequence[str]) -> Program | list[str]:
    """The program that a command starts; for torchrun its words, since that starts the program, several times.

    Raises: InvalidValueError if it is not a command that runs Python here.
    """
    if not words:
        raise InvalidValueError(f"expected the command that trains, got none; for example: {EXAMPLE}")
    first, rest = words[0], list(words[1:])
    if Path(first).name == "torchrun":
        return rest
    if first.endswith(".py"):
        return Program(name=first, arguments=tuple(rest))
    if not _is_this_python(first):
        raise InvalidValueError(
            f"expected python, torchrun or a .py file, got {first!r}. A launcher can start the watcher instead: "
            f"{first} ... -m qkeel watch -- python train.py; a script with its own command is often a module too: "
            "qkeel watch -- python -m NAME"
        )
    return _behind_python(rest)


def _is_this_python(word: str) -> bool:
    name, own = Path(word).name, f"python{sys.version_info.major}.{sys.version_info.minor}"
    if name.removesuffix(".exe") not in ("python", "python3", own) and word != sys.executable:
        return False
    if os.sep in word and Path(word).absolute().parent != Path(sys.executable).absolute().parent:
        raise InvalidValueError(
            f"expected this interpreter, since the script runs inside the watcher: {sys.executable}, got {word}. "
            "Install qkeel where that one is, or write python"
        )
    return True


def _behind_python(rest: list[str]) -> Program | list[str]:
    unbuffered = False
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "-u":
            unbuffered = True
        elif option.startswith("-m"):
            name = option[2:] or (rest.pop(0) if rest else "")
            if not name:
                raise InvalidValueError(f"expected the name of a module after -m, got nothing; see {EXAMPLE}")
            if name in TORCHRUN:
                return rest
            return Program(name=name, arguments=tuple(rest), module=True, unbuffered=unbuffered)
        else:
            raise InvalidValueError(
                f"python's option {option} comes too late here: the script runs inside the watcher's own interpreter. "
                f"Give it to that one: python {option} -m qkeel watch -- python train.py"
            )
    if not rest:
        raise InvalidValueError(f"expected a script after python, got none; for example: {EXAMPLE}")
    return Program(name=rest[0], arguments=tuple(rest[1:]), unbuffered=unbuffered)


def under_torchrun(words: Sequence[str], watcher: Sequence[str]) -> list[str]:
    """The torchrun command in which every worker runs under `watcher`, the words `qkeel watch ...` with their --."""
    from torch.distributed.run import get_args_parser  # takes 0.2 s, which other programs need not wait for

    given = get_args_parser().parse_args(list(words))
    if given.no_python:
        raise InvalidValueError("torchrun's --no-python starts something that is not Python, which can't be watched")
    options = list(words[: len(words) - 1 - len(given.training_script_args)])
    if not given.module:
        options.append("-m")
    program = Program(
        name=given.training_script, arguments=tuple(given.training_script_args), module=given.module, unbuffered=True
    )
    return [sys.executable, "-m", "torch.distributed.run", *options, *watcher, *program.words]


def prepare(program: Program) -> bytes | None:
    """Make this process what the program expects to find, and read it; a module is read when it is run.

    Raises: DataError if there is no such file or module.
    """
    code = None if program.module else read_regular(Path(program.name), DataError)
    folder = Path.cwd() if program.module else Path(program.name).resolve().parent
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)
    if program.module and importlib.util.find_spec(program.name.partition(".")[0]) is None:
        raise DataError(f"expected a module that Python finds from {folder}, got {program.name!r}; is it installed?")
    if program.unbuffered:
        raw = open(sys.stdout.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115 - stdout until the end
        how = sys.stdout.encoding, sys.stdout.errors
        sys.stdout = io.TextIOWrapper(raw, *how, write_through=True)  # type: ignore[arg-type]
    sys.argv = [program.name, *program.arguments]
    return code


def execute(program: Program, source: bytes | None) -> int:
    """Run it as __main__; returns the exit code that python would have ended with (130 for an interruption)."""
    try:
        if source is None:
            runpy.run_module(program.name, run_name="__main__", alter_sys=True)
        else:
            _run_script(program.name, source)
    except SystemExit as leave:
        return _exit_code(leave)
    except BaseException as error:
        error.__traceback__ = _from_users_code(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    return OK


def _run_script(name: str, source: bytes) -> None:
    """As runpy.run_path, but sys.argv[0] stays as it was given, and __main__ stays for threads and pickles."""
    path = str(Path(name).absolute())
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__cached__ = None  # type: ignore[attr-defined]
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__builtins__ = builtins  # type: ignore[attr-defined]
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
