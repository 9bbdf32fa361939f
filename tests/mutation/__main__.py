"""Mutants of every room against its direct tests: `python -m tests.mutation`.

    python -m tests.mutation --seeds 11 --out FILE.json [--rooms functional spec] [--root CHECKOUT]
    python -m tests.mutation --table BEFORE.json [AFTER.json]

The tests of a folder are traced once: a mutant is run against the tests that execute its line, and is alive at once
where none does. Each runs in a forked process that finds torch and pytest imported. `--root` mutates another checkout
with the tests of that checkout: the state before a change.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .lines import Lines
from .mutants import Mutant, mutants, sample
from .run import verdict, warm
from .targets import ROOMS, Room


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
    parser.add_argument("--seeds", nargs="+", type=int, default=[11])
    parser.add_argument("--count", type=int, help="mutants per room and seed, for as many as the room has")
    parser.add_argument("--lines", type=Path, help="a folder for what was traced, FILE-lines where there is --out")
    parser.add_argument(
        "--out", type=Path, default="mutation.json", help="a file with one row per mutant; one that is there goes on"
    )
    parser.add_argument("--table", type=Path, nargs="+", help="prints the shares of such files and runs nothing")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(path.read_text(encoding="utf-8")) for path in args.table]))
        return
    root, out = args.root.resolve(), args.out.resolve()
    os.chdir(root)
    warm(root)
    rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    for name in args.rooms:
        room = ROOMS[name]
        chosen = drawn(root, room, args.seeds, args.count or room.count)
        lines = Lines(root, room, args.lines or out.with_name(f"{out.stem}-lines"))
        print(f"{name}: {len(lines.seconds)} tests; these fail without a mutant and are left out: {lines.failed}")
        while True:
            done = {row["key"] for row in rows if row["room"] == name}
            for seed, mutant in chosen:
                if mutant.key not in done:
                    rows.append(_row(root, name, seed, mutant, lines))
                    print(*rows[-1].values(), flush=True)
                    _write(out, rows)
            # A test that fails alone without a mutant, too, has killed none.
            killers = {row["by"] for row in rows if row["room"] == name and row["by"].startswith("tests/")}
            _, failing = verdict(root, None, sorted(killers))
            if not failing:
                break
            lines.leave_out(failing)
            rows = [row for row in rows if row["room"] != name or row["by"] not in failing]
        print(table([rows]), flush=True)


def table(runs: list[list[dict[str, Any]]]) -> str:
    """The share of killed mutants by room, for each run and for the mutants that all of them have."""
    keys = [{row["key"] for row in rows} for rows in runs]
    common = set.intersection(*keys)
    columns = [(rows, keys[i]) for i, rows in enumerate(runs)] + [(rows, common) for rows in runs[1:] and runs]
    lines = []
    for name in [*ROOMS, ""]:
        cells = [name or "together"]
        for rows, kept in columns:
            results = [row["result"] != "survived" for row in rows if name in ("", row["room"]) and row["key"] in kept]
            share = f" ({100 * sum(results) / len(results):.0f} %)" if results else ""
            cells.append(f"{sum(results)} of {len(results)}{share}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _row(root: Path, room: str, seed: int, mutant: Mutant, lines: Lines) -> dict[str, Any]:
    """One line of the results: the mutant, what became of it, by which test and in how many seconds."""
    start = time.monotonic()
    result, by = "survived", [""]
    for tests in lines.tests_of(mutant):
        if result == "survived":
            result, by = verdict(root, mutant, tests)
    seconds = round(time.monotonic() - start, 1)
    return {"room": room, "seed": seed, **asdict(mutant), "result": result, "by": "".join(by[:1]), "seconds": seconds}


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
