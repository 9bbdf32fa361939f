"""Interleaved timing: A B C, C B A, …; process CPU time; the ratio to a base taken round by round.

Wall time says little on a shared machine and absolute times belong to one machine, so a table here shows
min / median / max of CPU milliseconds and the median over rounds of case / base *in the same round*.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable

# glibc maps and unmaps tensors over 32 MiB afresh each time, which makes eager code look up to 3x slower.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def settle(threads: int = 1, module: str = "benchmarks") -> None:
    """Restart this process once with steady allocator settings and a fixed number of threads."""
    wanted = {**MALLOC, "OMP_NUM_THREADS": str(threads)}
    if any(os.environ.get(k) != v for k, v in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds of CPU time per round, and the ratio to the base in the same round."""

    name: str
    times: list[float]
    ratios: list[float]

    def as_dict(self) -> dict[str, object]:
        """For the results file."""
        return {
            "case": self.name,
            "cpu_ms": [round(f(self.times), 4) for f in (min, statistics.median, max)],
            "ratio": [round(f(self.ratios), 4) for f in (min, statistics.median, max)],
        }


def interleave(
    cases: dict[str, Callable[[], object]], base: str, rounds: int = 15, calls: int = 1, warmup: int = 2
) -> list[Row]:
    """Time every case once a round, order reversed each round."""
    for case in cases.values():
        for _ in range(warmup):
            case()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds):
        order = list(cases) if i % 2 == 0 else list(reversed(cases))
        for name in order:
            start = time.process_time()
            for _ in range(calls):
                cases[name]()
            times[name].append((time.process_time() - start) * 1e3 / calls)
    return [Row(n, ts, [a / b for a, b in zip(ts, times[base])]) for n, ts in times.items()]


def show(title: str, rows: list[Row], base: str) -> None:
    """Print a table."""
    print(f"\n{title}\n  (CPU ms min / median / max; ratio to {base!r}, median of rounds)")
    width = max(len(r.name) for r in rows)
    for r in rows:
        low, mid, high = min(r.times), statistics.median(r.times), max(r.times)
        print(f"  {r.name:<{width}}  {low:9.2f} / {mid:9.2f} / {high:9.2f}   {statistics.median(r.ratios):6.3f}")
