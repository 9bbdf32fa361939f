"""The timing of all benchmarks: cases in turn within each round, and their ratios to one of them.

Wall time is unreliable on a shared machine, and absolute times apply to one machine only. Results are therefore
milliseconds of process CPU time, and the ratio case / base within the same round, each with its minimum, median and
maximum over rounds.
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


def settle(threads: int = 1) -> None:
    """Restarts this process once with the same command, fixed allocator settings and `threads` threads.

    The allocator reads its settings when the process starts.
    """
    wanted = {**MALLOC, "OMP_NUM_THREADS": str(threads)}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        sys.stdout.flush()
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@final
@dataclasses.dataclass(frozen=True, slots=True)
class BenchRow:
    """One case: its milliseconds per call in each round, and their ratios to the base in the same round."""

    name: str
    times: list[float]
    ratios: list[float]

    @property
    def ratio(self) -> float:
        """The median over rounds of case / base in the same round."""
        return statistics.median(self.ratios)

    def as_dict(self) -> dict[str, Any]:
        """Returns the row in the format of results files."""
        return {
            "case": self.name,
            "cpu_ms": [round(f(self.times), 4) for f in (min, statistics.median, max)],
            "ratio": [round(f(self.ratios), 4) for f in (min, statistics.median, max)],
        }


def processor_ms(case: Callable[[], object], calls: int) -> float:
    """Returns the milliseconds of process CPU time per call."""
    start = time.process_time()
    for _ in range(calls):
        case()
    return (time.process_time() - start) * 1e3 / calls


def interleave(
    cases: Mapping[str, Callable[[], object]],
    base: str,
    rounds: int = 15,
    calls: int = 1,
    warmup: int = 2,
    clock: Callable[[Callable[[], object], int], float] = processor_ms,
) -> list[BenchRow]:
    """Times every case once per round, reversing the order each round, and returns a row per case.

    Args:
        cases: the functions to call, by name.
        base: the case to which the ratios refer.
        rounds: the number of rounds.
        calls: the number of consecutive calls of a case in a round.
        warmup: the number of calls of each case before the first round.
        clock: a function of a case and a number of calls that returns the milliseconds per call.
    """
    for case in cases.values():
        for _ in range(warmup):
            case()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds):
        for name in cases if i % 2 == 0 else reversed(list(cases)):
            times[name].append(clock(cases[name], calls))
    return [
        BenchRow(n, ts, [a / b for a, b in zip(ts, times[base])])
        for n, ts in times.items()
    ]
