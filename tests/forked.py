"""Processes that start in milliseconds: forked from a server that imported torch, models and qkeel once."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
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


def _main(module: str, words: tuple[str, ...], said: str) -> None:
    output = os.open(said, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
