"""Runs a Python program in this process as `python` would: arguments, paths, exit code, traceback.

`watch` puts `model_finder` and `watch_session` around it.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import Any, final

from qkeel.cli.commands import FAILED, INTERRUPTED, OK
from qkeel.errors import DataError, InvalidValueError
from qkeel.handle import Handle
from qkeel.records.disk import read_file

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


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Torchrun:
    """The part of a command after `torchrun`, which starts the program itself: its options, then the program."""

    words: tuple[str, ...]

    def command(self, watcher: Sequence[str]) -> list[str]:
        """The command in which every worker runs under `watcher`, the words `qkeel watch ...` with their --."""
        # Takes 0.2 s, which other programs need not wait for.
        from torch.distributed.run import get_args_parser

        parsed = get_args_parser().parse_args(list(self.words))
        if parsed.no_python:
            raise InvalidValueError(
                "torchrun's --no-python starts a program that is not Python, which can't be watched"
            )
        # The worker is a module, `qkeel`, whatever the script is.
        n_options = len(self.words) - 1 - len(parsed.training_script_args)
        options = [*self.words[:n_options], *["-m"] * (not parsed.module)]
        program = Program(
            name=parsed.training_script,
            arguments=tuple(parsed.training_script_args),
            module=parsed.module,
            unbuffered=True,
        )
        launcher = [sys.executable, "-m", TORCHRUN[0]]
        return [*launcher, *options, *watcher, *program.words]


def parse(words: Sequence[str]) -> Program | Torchrun:
    """Returns the program that a command starts, or torchrun with what it starts.

    Raises: InvalidValueError if the command does not run Python, or runs it with another interpreter.
    """
    if not words:
        raise InvalidValueError(
            f"expected a training command after --, got none; for example: {EXAMPLE}"
        )
    first, arguments = words[0], list(words[1:])
    if Path(first).name == "torchrun":
        return Torchrun(tuple(arguments))
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


def _behind_python(words: list[str]) -> Program | Torchrun:
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
                return Torchrun(tuple(words))
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


@final
class Successors(Handle):
    """Lets the Python program by which a script replaces itself (`os.execv` and its like) be watched as the script is.

    Scripts do so to begin anew with other environment variables, such as PYTHONHASHSEED, or under torchrun. Processes
    that the script forks are left alone.
    """

    def __init__(
        self, watcher: Sequence[str], leave: Callable[[str | None], None]
    ) -> None:
        """Takes the words of `qkeel watch ... --`, and what to call before the other program begins, with its name if
        it is not watched."""
        self._watcher, self._leave, self._pid = watcher, leave, os.getpid()
        execv: Any = os.execv
        execve: Any = os.execve

        def restore() -> None:
            os.execv, os.execve = execv, execve

        # All functions of their kind call these two.
        os.execv = lambda path, args: execv(*self._watched(path, args))
        os.execve = lambda path, args, env: execve(*self._watched(path, args), env)
        super().__init__(restore)

    def _watched(self, path: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Returns the file and the words with which the other program is watched, or those given if it cannot be."""
        # `execvp` tries one folder after the other.
        if os.getpid() != self._pid or not os.access(path, os.X_OK):
            return path, args
        name = os.fsdecode(args[0] if isinstance(path, int) else path)
        words = [name, *map(os.fsdecode, args[1:])]
        try:
            program = parse(words)
            if isinstance(program, Torchrun):
                watched = program.command(["qkeel", *self._watcher])
            elif program.title == "qkeel":
                # The whole command again, of which the watcher is a part.
                watched = words
            else:
                watcher = ["-m", "qkeel", *self._watcher]
                watched = [sys.executable, *watcher, *program.words]
        except InvalidValueError:
            self._leave(None if Path(name).name == "qkeel" else name)
            return path, args
        self._leave(None)
        return watched[0], watched


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
