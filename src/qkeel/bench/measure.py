"""Interleaved timing: A B C, C B A, …; process CPU time; the ratio to a base taken round by round.

Wall time says little on a shared machine and absolute times belong to one machine, so a table here shows
min / median / max of CPU milliseconds and the median over rounds of case / base *in the same round*. On a GPU the
milliseconds are those between two events of its stream.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, final

# glibc maps and unmaps tensors over 32 MiB again each time, which makes eager code look up to 3x slower.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def steady(threads: int = 1) -> dict[str, str]:
    """Returns the environment variables that a process which measures needs from its start."""
    return {**MALLOC, "OMP_NUM_THREADS": str(threads)}


def settle(threads: int = 1) -> None:
    """Restarts this process once by its own command, with steady allocator settings and `threads` threads."""
    wanted = steady(threads)
    if any(os.environ.get(k) != v for k, v in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One case: its milliseconds per round, and its ratios to the base in the same round."""

    name: str
    times: list[float]
    ratios: list[float]

    @property
    def ratio(self) -> float:
        """The median over rounds of case / base in the same round."""
        return statistics.median(self.ratios)

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as results files have it."""
        return {
            "case": self.name,
            "cpu_ms": [round(f(self.times), 4) for f in (min, statistics.median, max)],
            "ratio": [round(f(self.ratios), 4) for f in (min, statistics.median, max)],
        }


def processor_ms(case: Callable[[], object], calls: int) -> float:
    """Returns milliseconds of process CPU time per call."""
    start = time.process_time()
    for _ in range(calls):
        case()
    return (time.process_time() - start) * 1e3 / calls


def gpu_ms(case: Callable[[], object], calls: int) -> float:
    """Returns milliseconds of the current CUDA stream per call."""
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        case()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / calls


def interleave(
    cases: Mapping[str, Callable[[], object]],
    base: str,
    rounds: int = 15,
    calls: int = 1,
    warmup: int = 2,
    clock: Callable[[Callable[[], object], int], float] = processor_ms,
) -> list[Row]:
    """Times every case once a round, the order reversed each round, and returns a row per case.

    Args:
        cases: name -> what to call. base: the case that ratios refer to. rounds: how often. warmup: calls of each
            before. calls: of a case in a row, per round. clock: milliseconds per call of so many calls.
    """
    for case in cases.values():
        for _ in range(warmup):
            case()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds):
        for name in cases if i % 2 == 0 else reversed(list(cases)):
            times[name].append(clock(cases[name], calls))
    return [Row(n, ts, [a / b for a, b in zip(ts, times[base])]) for n, ts in times.items()]


def show(title: str, rows: list[Row], base: str) -> None:
    """Prints a table."""
    print(f"\n{title}\n  (ms min / median / max; ratio to {base!r}, median of rounds)")
    width = max(len(r.name) for r in rows)
    for r in rows:
        low, mid, high = min(r.times), statistics.median(r.times), max(r.times)
        print(f"  {r.name:<{width}}  {low:9.2f} / {mid:9.2f} / {high:9.2f}   {statistics.median(r.ratios):6.3f}")
