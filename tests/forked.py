"""Processes that start in milliseconds: forked from a server that imported torch, models and qkeel once."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_IMPORTED_ONCE = (
    "qkeel.lab.execution.execute",
    "qkeel.remedies",
    "qkeel.monitor.monitor",
    "pytest",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
)


def forkserver() -> Any:
    """The context that starts them; a test session has one server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED_ONCE))
    return context


class Forked:
    """`python -m module words…` as far as a test can tell, but for the time of the imports; used as a Popen."""

    def __init__(self, module: str, *words: str) -> None:
        said, self._said = tempfile.mkstemp()
        os.close(said)
        self._process = forkserver().Process(target=_main, args=(module, words, self._said), daemon=True)
        self._process.start()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Waits for its end; what it said on both streams."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._said, timeout or 0.0)
        return Path(self._said).read_text(encoding="utf-8", errors="replace"), None

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        """Ends it, if it has not ended; its output is gone."""
        self._process.kill()
        self._process.join()
        Path(self._said).unlink(missing_ok=True)


def python(
    words: Sequence[str], folder: Path, *, environment: Mapping[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """`python words…` in a folder, without input; not for what starts processes of multiprocessing itself.

    Args:
        words: a script and its arguments, or -m, a module and its arguments.
        folder: where it runs.
        environment: what it finds in its environment besides what the server has.
        timeout: seconds after which it is killed.

    Raises: TimeoutExpired then.
    """
    with tempfile.TemporaryDirectory() as said:
        given = tuple(words), str(folder), dict(environment or {}), said
        process = forkserver().Process(target=_python, args=given, daemon=True)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(list(words), timeout)
        out, err = ((Path(said) / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
        return subprocess.CompletedProcess(list(words), process.exitcode, out, err)


def _main(module: str, words: tuple[str, ...], said: str) -> None:
    _run(("-m", module, *words), (said, said))


def _python(words: tuple[str, ...], folder: str, environment: dict[str, str], said: str) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    _run(words, (f"{said}/out", f"{said}/err"))


def _run(words: tuple[str, ...], said: tuple[str, str]) -> None:
    for stream, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
