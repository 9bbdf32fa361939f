"""Mutants of the formulas, the specs and the step remedies against their direct tests: `make mutation`.

    python -m tests.mutation --seeds 0 1 --count 30 [--rooms functional spec steps] [--out FILE.json]

Every mutant runs in a forked process that finds torch and pytest imported, so one costs the time of its tests.
`--root` mutates another checkout with the tests of that checkout: the state before a change.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from .mutants import Mutant, mutants, sample
from .run import verdict, warm
from .targets import ROOMS, Room, tests_of


def drawn(root: Path, room: Room, seeds: list[int], count: int) -> list[tuple[int, Mutant]]:
    """Returns the mutants that the seeds draw from a room, each once, with the seed that drew it first."""
    files = sorted({path for pattern in room.files for path in root.glob(pattern)})
    every = [m for f in files for m in mutants(str(f.relative_to(root)), f.read_text(encoding="utf-8"))]
    found: dict[str, tuple[int, Mutant]] = {}
    for seed in seeds:
        for mutant in sample([m for m in every if m.key not in found], seed, count):
            found[mutant.key] = (seed, mutant)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=list(ROOMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--count", type=int, default=30, help="mutants per room and seed")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds per mutant")
    parser.add_argument("--out", type=Path, help="a JSON file with one row per mutant; one that is there goes on")
    parser.add_argument("--trust", action="store_true", help="the tests are known to pass without a mutant")
    args = parser.parse_args()
    root = args.root.resolve()
    os.chdir(root)
    warm(root)
    rows: list[dict[str, object]] = []
    if args.out is not None and args.out.exists():  # goes on where a run was stopped
        rows = json.loads(args.out.read_text(encoding="utf-8"))
    done = {row["key"] for row in rows}
    for name in args.rooms:
        chosen = [pair for pair in drawn(root, ROOMS[name], args.seeds, args.count) if pair[1].key not in done]
        if chosen and not args.trust:
            result, by = verdict(root, None, tests_of(root, ROOMS[name], ""), 10 * args.timeout)
            assert result == "survived", f"expected the tests of {name} to pass without a mutant, but {by} fails"
        for seed, mutant in chosen:
            rows.append(row := _row(root, name, seed, mutant, args.timeout))
            print(*(row[key] for key in ("result", "seconds", "path", "line", "function", "change", "by")), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        for seed in args.seeds:
            own = [row["result"] != "survived" for row in rows if row["room"] == name and row["seed"] == seed]
            print(f"{name}, seed {seed}: {sum(own)} of {len(own)} killed")


def _row(root: Path, room: str, seed: int, mutant: Mutant, timeout: float) -> dict[str, object]:
    """One line of the results: the mutant, what became of it, by which test and in how many seconds."""
    start = time.monotonic()
    first, *others = tests_of(root, ROOMS[room], mutant.path)
    result, by = verdict(root, mutant, [first], timeout)
    if result == "survived":
        result, by = verdict(root, mutant, others, timeout)
    seconds = round(time.monotonic() - start, 1)
    return {"room": room, "seed": seed, **asdict(mutant), "result": result, "by": by, "seconds": seconds}


if __name__ == "__main__":
    main()
