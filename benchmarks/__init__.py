"""Ratios to peers, side by side in one run: `python -m benchmarks` and `python -m benchmarks.NAME`."""

import os
import sys

from qkeel.cli.inspect import steady


def settle(threads: int = 1) -> None:
    """Restarts this process once by its own command, with steady allocator settings and `threads` threads."""
    wanted = steady(threads)
    if any(os.environ.get(k) != v for k, v in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


# Python's argument 0 is "-m" only while it looks for the module to run. The allocator reads its settings when the
# process starts, so a process without them starts again.
if sys.argv[0] == "-m":
    settle()
