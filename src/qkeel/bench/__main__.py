"""The process that measures the kernels: one line for each call of the grid, or everything as one JSON object."""

from __future__ import annotations

from qkeel.bench.measure import settle

if __name__ == "__main__":
    settle()  # before torch: the allocator reads its settings when the process starts

import argparse
import dataclasses
import json
import os
import platform
import sys
import threading
from pathlib import Path

import torch

from qkeel.bench.kernels import SIZES, Cell, fastest_first, grid, measure
from qkeel.bench.measure import Row
from qkeel.version import VERSION


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m qkeel.bench", description=__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--end-with-input", action="store_true", help="end when the standard input is at its end")
    args = parser.parse_args(arguments)
    if args.end_with_input:
        threading.Thread(target=_end_with_input, daemon=True).start()
    torch.set_num_threads(1)
    about, calls = machine(args.device), []
    if not args.json:
        print("  ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    for cell in grid(SIZES[args.size], args.device):
        rows = measure(cell, SIZES[args.size])
        if args.json:
            times = [row.as_dict() for row in rows]
            calls.append({"cell": dataclasses.asdict(cell), "rows": times, "order": fastest_first(rows)})
        elif rows:
            print(call_line(cell, rows), flush=True)
    if args.json:
        print(json.dumps({"about": about, "calls": calls}))
    return 0


def call_line(cell: Cell, rows: list[Row]) -> str:
    """Returns one line: the call, the first kernel's time, the ratios of the others, and the fastest.

    >>> cell = Cell(device="cpu", dtype="float32", head_dim=64, form="folded", gradient=True, statistics="none",
    ...             tokens=128)
    >>> call_line(cell, [Row("sdpa", [1.0, 1.1, 1.4], [1.0, 1.0, 1.0])])
    'folded   float32  d 64  backward  statistics none  T 128   sdpa 1.10 ms  → sdpa'
    """
    base, *others = [(row.name, row.as_dict()) for row in rows]
    direction = "backward" if cell.gradient else "forward "
    what = f"{cell.form:<8} {cell.dtype:<8} d {cell.head_dim:<3} {direction}"
    what += f"  statistics {cell.statistics:<5} T {cell.tokens:<5}"
    ratios = "".join(f"  {name} " + " / ".join(f"{x:.2f}" for x in row["ratio"]) for name, row in others)
    return f"{what} {base[0]} {base[1]['cpu_ms'][1]:.2f} ms{ratios}  → {fastest_first(rows)[0]}"


def machine(device: str) -> dict[str, str]:
    """Returns the device, the versions and the processor that the times belong to."""
    about = {"device": device, "qkeel": VERSION, "torch": torch.__version__, "processor": _processor()}
    about["python"] = platform.python_version()
    about["vectors"] = torch.backends.cpu.get_cpu_capability()
    return about if device == "cpu" else {**about, "gpu": torch.cuda.get_device_name()}


def _end_with_input() -> None:
    os.read(0, 1)  # waits; not by sys.stdin, whose lock would be held when the interpreter ends
    os._exit(1)


def _processor() -> str:
    """Returns the processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "cpu part"))]
    return f"{platform.machine()} {names[0] if names else platform.processor()}".strip()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `qkeel bench | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
