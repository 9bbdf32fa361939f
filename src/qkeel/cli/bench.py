"""`qkeel bench`: the attention kernels timed side by side on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated, Literal

import torch
from cyclopts import Parameter

from qkeel.bench.measure import steady
from qkeel.cli.exits import FAILED, OK
from qkeel.errors import InvalidValueError


def bench(
    *,
    size: Literal["quick", "full", "toy"] = "quick",
    device: Annotated[Literal["cpu", "cuda"] | None, Parameter(show_default=False)] = None,
    json_: Annotated[bool, Parameter(name="--json", negative=(), show_default=False)] = False,
) -> int:
    """Time every attention kernel on this machine, side by side.

    Prints the median time of the first kernel and, for every other one, the ratio to it: least / median / greatest of
    the rounds. One thread; on a CPU process time, on a GPU the time of its stream. `impl=` in code pins a kernel.

    Args:
        size: quick takes one or two minutes (float32, heads of 64); full about ten; toy only shows that it runs.
        device: Where to measure [default: cuda if there is one].
        json_: Print one JSON object with everything.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise InvalidValueError("expected a CUDA device for --device cuda, but torch sees none; use --device cpu")
    words = ["--size", size, "--device", device or ("cuda" if available else "cpu"), *["--json"] * json_]
    # A process of its own, whose allocator and threads are set at its start; a session of its own, so that Ctrl-C
    # reaches this process alone, which ends the other.
    # Its standard input ends with this process, whatever ends that, and so does it.
    command, environment = [sys.executable, "-m", "qkeel.bench", "--end-with-input", *words], {**os.environ, **steady()}
    with subprocess.Popen(command, env=environment, start_new_session=True, stdin=subprocess.PIPE) as process:
        try:
            code = process.wait()
        finally:
            process.kill()  # does nothing to a process that has ended
    if code:
        text = f"error: the process that measures ended with exit code {code}; its last words are above"
        print(text, file=sys.stderr)
    return FAILED if code else OK
