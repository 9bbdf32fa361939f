"""The process that measures: one JSON line per call of the grid, {"cell": …, "rows": […], "order": […]}, on stdout."""

from __future__ import annotations

from qkeel.bench.measure import settle

if __name__ == "__main__":
    settle()  # before torch: the allocator reads its settings when the process starts

import argparse
import dataclasses
import json
import sys

import torch

from qkeel.bench.kernels import SIZES, fastest_first, grid, measure


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints one line per call; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m qkeel.bench", description=__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size = SIZES[args.size]
    cells = list(grid(size, args.device))
    for done, cell in enumerate(cells, start=1):
        rows = measure(cell, size)
        line = {"done": done, "of": len(cells), "cell": dataclasses.asdict(cell), "order": fastest_first(rows)}
        print(json.dumps({**line, "rows": [row.as_dict() for row in rows]}), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
