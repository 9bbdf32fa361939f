"""`qkeel bench`: the kernels of attention timed side by side on this machine, and the table that "auto" chooses by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from qkeel.cli.exits import FAILED, OK
from qkeel.errors import InvalidValueError, RunDirectoryError

_SWITCH = Parameter(negative=(), show_default=False)


def bench(
    *,
    size: Literal["quick", "full", "toy"] = "quick",
    use: Annotated[bool, _SWITCH] = False,
    device: Annotated[Literal["cpu", "cuda"] | None, Parameter(show_default=False)] = None,
    json_: Annotated[bool, Parameter(name="--json", negative=(), show_default=False)] = False,
) -> int:
    """Time every attention kernel on this machine, side by side; with --use, let "auto" choose by what was found.

    Prints the median time of the first kernel and, for every other one, the ratio to it: least / median / most of the
    rounds. One thread; on a CPU process time, on a GPU the time of its stream. `impl=` in code pins a kernel.

    Args:
        size: quick takes one or two minutes (float32, heads of 64); full about ten; toy only shows that it runs.
        use: Store the table where "auto" reads it, over what was measured there before.
        device: Where to measure [default: cuda if there is one].
        json_: Print one JSON object with everything.
    """
    place = _place(size) if use else None
    about = _about(_device(device))
    if not json_:
        print("  ".join(f"{key} {value}" for key, value in about.items()))
    found = []
    try:
        for line in _measured(size, about["device"]):
            found.append(line)
            if not json_ and line["rows"]:
                print(shown(line), flush=True)
    except subprocess.CalledProcessError as error:
        print(
            f"error: the process that measures ended with {error.returncode}; its last words are above", file=sys.stderr
        )
        return FAILED
    if place is not None:
        _adopt(place, found)
    if json_:
        print(json.dumps({"about": about, "written": None if place is None else str(place), "calls": found}))
    else:
        print(f"written: {place}" if place else 'nothing was stored; --use lets "auto" choose by this')
    return OK


def _place(size: str) -> Path:
    """Where the table will stand. Whether it can is better known before minutes of measuring."""
    from qkeel.kernels.choice import stored

    if size == "toy":
        raise InvalidValueError("expected --size quick or full with --use, got toy, whose numbers mean nothing")
    if stored.switched_off():
        raise InvalidValueError(f"expected a place for the table, got {stored.VARIABLE}=0, which switches tables off")
    path = stored.table_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        reason = error.strerror or error
        raise RunDirectoryError(
            f"cannot write {path}: {reason}. Expected a writable folder; {stored.VARIABLE}=FILE names another place"
        ) from error


def _device(asked: str | None) -> str:
    import torch

    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise InvalidValueError("expected a CUDA device for --device cuda, but torch sees none; use --device cpu")
    return asked or ("cuda" if there else "cpu")


def _about(device: str) -> dict[str, str]:
    import torch

    from qkeel.kernels.choice.stored import versions

    about = {"device": device, **versions(), "python": ".".join(map(str, sys.version_info[:3]))}
    about["vectors"] = torch.backends.cpu.get_cpu_capability()
    return about if device == "cpu" else {**about, "gpu": torch.cuda.get_device_name()}


def _measured(size: str, device: str) -> Iterator[dict[str, Any]]:
    """What the measuring process says, line by line. It has an allocator and threads of its own, set at its start."""
    from qkeel.bench.measure import steady

    command = [sys.executable, "-m", "qkeel.bench", "--size", size, "--device", device]
    options: dict[str, Any] = {"text": True, "start_new_session": True, "env": {**os.environ, **steady()}}
    # A session of its own: Ctrl-C reaches this process alone, which ends the other.
    with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as process:
        assert process.stdout is not None
        try:
            yield from map(json.loads, process.stdout)
        except BaseException:  # Ctrl-C too
            process.terminate()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def shown(line: dict[str, Any]) -> str:
    """One call: what it is, the first kernel's time, the ratios of the others.

    >>> cell = {"form": "folded", "dtype": "float32", "head_dim": 64, "gradient": True, "statistics": "none"}
    >>> cell["tokens"] = 128
    >>> rows = [{"case": "sdpa", "cpu_ms": [1.0, 1.1, 1.4], "ratio": [1.0, 1.0, 1.0]}]
    >>> shown({"cell": cell, "order": ["sdpa"], "rows": rows})
    'folded   float32  d 64  backward  statistics none  T 128   sdpa 1.10 ms  → sdpa'
    """
    cell, (base, *others) = line["cell"], line["rows"]
    way = "backward" if cell["gradient"] else "forward "
    what = f"{cell['form']:<8} {cell['dtype']:<8} d {cell['head_dim']:<3} {way}"
    what += f"  statistics {cell['statistics']:<5} T {cell['tokens']:<5}"
    ratios = "".join(f"  {o['case']} " + " / ".join(f"{x:.2f}" for x in o["ratio"]) for o in others)
    return f"{what} {base['case']} {base['cpu_ms'][1]:.2f} ms{ratios}  → {line['order'][0]}"


def _adopt(place: Path, found: list[dict[str, Any]]) -> None:
    from qkeel.bench.kernels import Cell
    from qkeel.kernels.choice import stored
    from qkeel.records.files import write_json

    try:
        before = stored.read(place.read_text(encoding="utf-8"))
    except stored.UNUSABLE:  # there is none, or none that holds here
        before = {}
    fresh: stored.Orders = {}
    for line in found:
        if line["order"]:
            Cell(**line["cell"]).add(fresh, tuple(line["order"]))
    write_json(place, stored.written({**before, **fresh}))
