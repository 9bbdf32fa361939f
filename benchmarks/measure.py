"""The harness of every benchmark: its command line, its rounds, the tables it prints and the results it writes.

The timing is that of `benchmarks.timing`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import qkeel
from benchmarks.timing import BenchRow, interleave, processor_ms

__all__ = [
    "Bench",
    "Case",
    "Cases",
    "BenchRow",
    "about",
    "between",
    "by_native",
    "median_interval",
    "restored",
]
__all__ += ["take_turns"]

Case = Callable[[], object]
Cases = dict[str, Case]


class Bench:
    """One run of a benchmark: what its command line asks for, and the tables found so far.

    Args:
        name: of the module. doc: its docstring. arguments: of the command line, None for the process's own.
        rounds: default of --rounds; None: the benchmark has no rounds. peer: what --no-compile leaves out.
        needs: readiness of compiled operators, without which there is nothing to measure. writes: it has --out.
        flags: more flags of argparse.
    """

    def __init__(
        self,
        name: str,
        doc: str | None,
        arguments: Sequence[str] | None = None,
        *,
        rounds: int | None = 15,
        peer: str = "",
        needs: Sequence[Callable[[], bool]] = (),
        writes: bool = False,
        flags: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.command = f"python -m benchmarks{'.' * bool(name)}{name}"
        parser = argparse.ArgumentParser(prog=self.command, description=doc)
        parser.add_argument(
            "--toy", action="store_true", help="tiny sizes: only to see that it runs"
        )
        if rounds is not None:
            parser.add_argument("--rounds", type=int, default=rounds)
        if peer:
            parser.add_argument(
                "--no-compile",
                action="store_true",
                help=f"leave {peer} out (saves minutes)",
            )
        if writes:
            parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
        for flag, options in (flags or {}).items():
            parser.add_argument(flag, **options)
        self.options = parser.parse_args(arguments)
        self.toy: bool = self.options.toy
        self.rounds: int = (
            0
            if rounds is None
            else min(2, self.options.rounds)
            if self.toy
            else self.options.rounds
        )
        self.compiled = bool(peer) and not (self.toy or self.options.no_compile)
        self.tables: dict[str, object] = {}
        torch.set_num_threads(1)
        if needs:
            os.environ["QKEEL_NATIVE"] = "1"
        if not all(ready() for ready in needs):
            raise SystemExit(
                "the kernels could not be compiled; the warning above says why"
            )

    def table(
        self, title: str, cases: Cases, calls: int = 1, warmup: int = 2, **more: Any
    ) -> list[BenchRow]:
        """Times the cases in turn, prints their ratios to the first one, and keeps them for the results file.

        `more`: other rounds than those asked for, another clock.
        """
        rows = take_turns(cases, more.pop("rounds", self.rounds), calls, warmup, **more)
        show(title, rows, rows[0].name)
        self.tables[title] = [row.as_dict() for row in rows]
        return rows

    def numbers(self, title: str, values: Mapping[str, float]) -> None:
        """Prints and keeps numbers that are no times."""
        print(f"\n{title}")
        for name, value in values.items():
            print(f"  {name:<40} {value:9.6g}")
        self.tables[title] = dict(values)

    def write(self, device: str, *, add: bool = False, **more: Any) -> Path:
        """Writes the tables, or `more` with them, into DEVICE-DATE.json; returns the file.

        With `add`, the entries of each part of `more` are added to those that the file already has."""
        notes = about(self.command, self.rounds)
        path: Path = (
            self.options.out
            / f"{device}-{notes['date']}{'-toy' if self.toy else ''}.json"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        notes |= more.pop("about", {})
        if add and path.exists():
            known = json.loads(path.read_text())
            more = {
                name: {**known.get(name, {}), **part} for name, part in more.items()
            }
        text = json.dumps(
            {"about": notes, **(more or {"tables": self.tables})},
            indent=1,
            ensure_ascii=False,
        )
        path.write_text(text + "\n")
        print(f"\nwritten: {path}")
        return path

    def markdown(self) -> str:
        """Returns the tables for the docs: milliseconds and ratios, or numbers that are no times."""
        lines = []
        for title, rows in self.tables.items():
            times = isinstance(rows, list)
            spread = "min / median / max"
            lines += [
                f"\n### {title}\n",
                f"| case | ms {spread} | ratio {spread} |"
                if times
                else "| case | value |",
            ]
            lines.append("|---" * (2 + times) + "|")
            for row in rows if isinstance(rows, list) else []:
                both = (
                    " / ".join(f"{x:.3f}" for x in row[name])
                    for name in ("cpu_ms", "ratio")
                )
                lines.append(f"| {row['case']} | {' | '.join(both)} |")
            lines += (
                [f"| {name} | {value} |" for name, value in rows.items()]
                if isinstance(rows, dict)
                else []
            )
        return "\n".join(lines).strip() + "\n"


def take_turns(
    cases: Cases,
    rounds: int,
    calls: int = 1,
    warmup: int = 2,
    clock: Callable[[Case, int], float] = processor_ms,
) -> list[BenchRow]:
    """`interleave` with the first case as base; QKEEL_NATIVE is afterwards what it was before."""
    return restored(
        "QKEEL_NATIVE",
        lambda: interleave(cases, next(iter(cases)), rounds, calls, warmup, clock),
    )


def between(rows: Sequence[BenchRow], over: str, base: str) -> float:
    """Returns the median over rounds of one case over another, each in the same round."""
    times = {row.name: row.times for row in rows}
    return statistics.median(a / b for a, b in zip(times[over], times[base]))


def median_interval(
    values: Sequence[float], level: float = 0.95
) -> tuple[float, float]:
    """Returns an interval for the median of what the values are drawn from, whatever its distribution.

    It is from the k-th smallest to the k-th largest value, with the largest k for which fewer than k of n values are
    below the median with a probability of at most (1 - level) / 2. Infinite if n is too small for the level.

    >>> median_interval([3.0, 1.0, 2.0, 5.0, 4.0, 6.0])
    (1.0, 6.0)
    >>> median_interval([1.0, 2.0])
    (-inf, inf)
    """
    n, k, below = len(values), 0, 0.0
    while k < n and (below := below + math.comb(n, k) / 2**n) <= (1 - level) / 2:
        k += 1
    ordered = sorted(values)
    return (ordered[k - 1], ordered[-k]) if k else (-math.inf, math.inf)


def restored(variable: str, run: Callable[[], Any], value: str | None = None) -> Any:
    """Returns run(), with the variable of the environment at `value` if given; puts the old one back."""
    before = os.environ.get(variable)
    os.environ.update({} if value is None else {variable: value})
    try:
        return run()
    finally:
        os.environ.pop(variable, None)
        os.environ.update({} if before is None else {variable: before})


def by_native(switch: str, case: Case) -> Case:
    """Returns the case with compiled kernels ("1") or without ("0"); `take_turns` restores the variable."""

    def run() -> object:
        os.environ["QKEEL_NATIVE"] = switch
        return case()

    return run


def about(command: str, rounds: int) -> dict[str, Any]:
    """Returns the versions, the machine and the day of a results file."""
    return {
        "qkeel": qkeel.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, 1 thread, {torch.backends.cpu.get_cpu_capability()}",
        "date": datetime.date.today().isoformat(),
        "rounds": rounds,
        "command": command,
    }


def show(title: str, rows: list[BenchRow], base: str) -> None:
    """Prints a table."""
    print(f"\n{title}\n  (ms min / median / max; ratio to {base!r}, median of rounds)")
    width = max(len(r.name) for r in rows)
    for r in rows:
        low, mid, high = min(r.times), statistics.median(r.times), max(r.times)
        print(
            f"  {r.name:<{width}}  {low:9.2f} / {mid:9.2f} / {high:9.2f}   {r.ratio:6.3f}"
        )
