"""Mutants of every room against its direct tests: `python -m tests.mutation`.

    python -m tests.mutation --seed 11 --out FILE.json [--rooms functional spec] [--root CHECKOUT]
    python -m tests.mutation --table BEFORE.json [AFTER.json]

The tests of a folder are traced once: a mutant is run against the tests that execute its line, and is alive at once
where none does. Each runs in a forked process that finds torch and pytest imported. `--root` mutates another checkout
with the tests of that checkout: the state before a change.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .lines import Lines
from .mutants import mutants, sample
from .run import failing, file_of, warm
from .targets import FORMULAS, ROOMS, mutated_files


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=list(ROOMS))
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument(
        "--most",
        type=float,
        default=20.0,
        help="seconds of tests for one mutant, the quickest",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default="mutation.json",
        help="a row per mutant; one that is there goes on",
    )
    parser.add_argument(
        "--table",
        type=Path,
        nargs="+",
        help="prints the shares of such files and runs nothing",
    )
    args = parser.parse_args()
    if args.table:
        print(
            table([json.loads(path.read_text(encoding="utf-8")) for path in args.table])
        )
        return
    root, out = args.root.resolve(), args.out.resolve()
    warm(root)
    rows: list[dict[str, Any]] = (
        json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    )
    for room in args.rooms:
        lines = Lines(root, room, out.with_name(f"{out.stem}-lines"))
        print(f"{room}: {len(lines.tests)} tests", flush=True)
        wrong = [""]
        rows = [
            row
            for row in rows
            if row["room"] != room
            or row["by"]
            or not row["left"]
            or row["most"] >= args.most
        ]
        while wrong:
            done = {row["key"] for row in rows if row["room"] == room}
            for mutant in drawn(root, room, args.seed):
                if mutant.key[:16] in done:
                    continue
                start = time.monotonic()
                *parts, left = lines.tests_of(mutant, args.most)
                by = next(
                    filter(None, (failing(root, tests, mutant) for tests in parts)),
                    [""],
                )[0]
                row = {
                    "room": room,
                    **asdict(mutant),
                    "key": mutant.key[:16],
                    "by": by,
                    "most": args.most,
                }
                rows.append(
                    {
                        **row,
                        "left": len(left),
                        "seconds": round(time.monotonic() - start, 1),
                    }
                )
                print(*rows[-1].values(), flush=True)
                text = ",\n".join(json.dumps(row) for row in rows)
                out.write_text(f"[\n{text}\n]\n", encoding="utf-8")
            # A test that fails alone without a mutant, too, has killed none.
            wrong = failing(
                root,
                sorted(
                    {
                        row["by"]
                        for row in rows
                        if row["room"] == room and "tests/" in row["by"]
                    }
                ),
            )
            lines.tests = {
                test: traced
                for test, traced in lines.tests.items()
                if not {test, file_of(test)} & {*wrong}
            }
            rows = [
                row for row in rows if row["room"] != room or row["by"] not in wrong
            ]
    print(table([rows]))


def drawn(root, room, seed):
    """Returns the mutants that a seed draws from a room."""
    files = mutated_files(root, room)
    every = [
        m
        for file in files
        for m in mutants(str(file.relative_to(root)), file.read_text(encoding="utf-8"))
    ]
    return sample(
        list({mutant.key: mutant for mutant in every}.values()),
        seed,
        40 if room in FORMULAS else 20,
    )


def table(runs):
    """Killed of drawn by room in each run, and in each run of those that all runs drew."""
    common = set.intersection(*({row["key"] for row in rows} for rows in runs))
    lines = []
    for room in [*ROOMS, "together"]:
        cells = [room]
        for rows in [
            *runs,
            *([row for row in rows if row["key"] in common] for rows in runs),
        ]:
            killed = [
                bool(row["by"]) for row in rows if room in (row["room"], "together")
            ]
            cells.append(
                f"{sum(killed)} of {len(killed)} ({100 * sum(killed) / max(len(killed), 1):.0f} %)"
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
