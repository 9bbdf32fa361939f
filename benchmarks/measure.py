"""How everything here is timed: the package's own interleaved rounds, which `qkeel bench` uses too.

Nothing here imports torch before it is called: the allocator reads its settings when the process starts.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

from qkeel.bench.measure import Row, interleave, settle, show

__all__ = ["Row", "Wanted", "about", "interleave", "settle", "show", "wanted"]


class Wanted(NamedTuple):
    """What the command line asks of a benchmark of compiled kernels."""

    toy: bool
    rounds: int
    compiled: bool

    @property
    def module(self) -> dict[str, int]:
        """Size of an attention module and of what it takes."""
        if self.toy:
            return {"dim": 64, "heads": 1, "batch": 1, "length": 16}
        return {"dim": 512, "heads": 8, "batch": 4, "length": 512}


def wanted(
    name: str, doc: str | None, arguments: list[str] | None, *, rounds: int, ready: Callable[[], bool], peer: str
) -> Wanted:
    """Parse, one thread, compiled kernels on; or end, saying why, where they can't be compiled."""
    import torch

    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--no-compile", action="store_true", help=f"leave {peer} out (saves a minute)")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, two rounds: only to see that it runs")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["QKEEL_NATIVE"] = "1"
    if not ready():
        raise SystemExit("the kernels could not be compiled; the warning above says why")
    return Wanted(args.toy, 2 if args.toy else args.rounds, not (args.toy or args.no_compile))


def about(command: str, rounds: int) -> dict[str, Any]:
    """Versions, machine and day of a results file."""
    import torch

    import qkeel

    return {
        "qkeel": qkeel.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, 1 thread, {torch.backends.cpu.get_cpu_capability()}",
        "date": datetime.date.today().isoformat(),
        "rounds": rounds,
        "command": command,
    }
