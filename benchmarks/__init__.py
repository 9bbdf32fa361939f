"""Ratios to peers, side by side in one run: `python -m benchmarks` and `python -m benchmarks.NAME`."""

import sys

from qkeel.bench.measure import settle

# Python's argument 0 is "-m" only while it looks for the module to run: before torch, whose allocator reads its
# settings when the process starts.
if sys.argv[0] == "-m":
    settle()
