"""Ratios to peers, side by side in one run: `python -m benchmarks` and `python -m benchmarks.NAME`."""

import sys

from benchmarks.timing import settle

# Python's argument 0 is "-m" only while it looks for the module to run. The allocator reads its settings when the
# process starts, so a process without them starts again.
if sys.argv[0] == "-m":
    settle()
