"""`qkeel bench`: the attention kernels timed side by side on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import torch
from cyclopts import Parameter

from qkeel import __version__
from qkeel.bench.measure import steady
from qkeel.cli.exits import FAILED, OK
from qkeel.errors import InvalidValueError


class CellFields(TypedDict):
    """One call of the grid, as the measuring process prints it: the fields of bench.kernels.Cell."""

    device: str
    dtype: str
    head_dim: int
    form: str
    gradient: bool
    statistics: str
    tokens: int


class CaseTimes(TypedDict):
    """One kernel's least, median and greatest milliseconds, and ratios to the first kernel."""

    case: str
    cpu_ms: list[float]
    ratio: list[float]


class MeasuredCall(TypedDict):
    """A line of the measuring process: a call, its kernels' times, and their names with the fastest first."""

    cell: CellFields
    rows: list[CaseTimes]
    order: list[str]


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
    about = machine(_device(device))
    command = [sys.executable, "-m", "qkeel.bench", "--size", size, "--device", about["device"]]
    try:
        with contextlib.closing(measured_calls(command)) as calls:  # Ctrl-C ends the process before its pipe
            print_calls(about, calls, as_json=json_)
    except subprocess.CalledProcessError as error:
        text = f"error: the process that measures ended with exit code {error.returncode}; its last words are above"
        print(text, file=sys.stderr)
        return FAILED
    return OK


def print_calls(about: dict[str, str], calls: Iterable[MeasuredCall], as_json: bool) -> None:
    """Prints one line per call as it arrives, or everything as one JSON object."""
    if as_json:
        print(json.dumps({"about": about, "calls": [*calls]}))
        return
    print("  ".join(f"{key} {value}" for key, value in about.items()))
    for call in calls:
        if call["rows"]:
            print(call_line(call), flush=True)


def call_line(call: MeasuredCall) -> str:
    """Returns one line: the call, the first kernel's time, the ratios of the others, and the fastest.

    >>> call_line({
    ...     "cell": {"device": "cpu", "dtype": "float32", "head_dim": 64, "form": "folded", "gradient": True,
    ...              "statistics": "none", "tokens": 128},
    ...     "rows": [{"case": "sdpa", "cpu_ms": [1.0, 1.1, 1.4], "ratio": [1.0, 1.0, 1.0]}], "order": ["sdpa"]})
    'folded   float32  d 64  backward  statistics none  T 128   sdpa 1.10 ms  → sdpa'
    """
    cell, (base, *others) = call["cell"], call["rows"]
    direction = "backward" if cell["gradient"] else "forward "
    what = f"{cell['form']:<8} {cell['dtype']:<8} d {cell['head_dim']:<3} {direction}"
    what += f"  statistics {cell['statistics']:<5} T {cell['tokens']:<5}"
    ratios = "".join(f"  {o['case']} " + " / ".join(f"{x:.2f}" for x in o["ratio"]) for o in others)
    return f"{what} {base['case']} {base['cpu_ms'][1]:.2f} ms{ratios}  → {call['order'][0]}"


def measured_calls(command: list[str]) -> Generator[MeasuredCall, None, None]:
    """Yields what the measuring process prints; its allocator and threads are set at its start.

    Raises:
        subprocess.CalledProcessError: the process failed.
    """
    # A session of its own: Ctrl-C reaches this process alone, which ends the other.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, **steady()}
    ) as process:
        assert process.stdout is not None
        try:
            yield from map(json.loads, process.stdout)
        except BaseException:  # Ctrl-C too
            process.terminate()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def machine(device: str) -> dict[str, str]:
    """Returns the device, the versions and the processor that the times belong to."""
    about = {"device": device, "qkeel": __version__, "torch": torch.__version__, "processor": _processor()}
    about["python"] = platform.python_version()
    about["vectors"] = torch.backends.cpu.get_cpu_capability()
    return about if device == "cpu" else {**about, "gpu": torch.cuda.get_device_name()}


def _device(asked: str | None) -> str:
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise InvalidValueError("expected a CUDA device for --device cuda, but torch sees none; use --device cpu")
    return asked or ("cuda" if available else "cpu")


def _processor() -> str:
    """Returns the processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "cpu part"))]
    return f"{platform.machine()} {names[0] if names else platform.processor()}".strip()
