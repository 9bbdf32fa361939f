"""Mutants of every room against its direct tests: `python -m tests.mutation`.

    python -m tests.mutation --seed 11 --out FILE.json [--rooms functional spec] [--root CHECKOUT]
    python -m tests.mutation --table BEFORE.json [AFTER.json]

The tests of a folder are traced once: a mutant is run against the tests that execute its line, and is alive at once
where none does. Each runs in a forked process that finds torch and pytest imported. `--root` mutates another checkout
with the tests of that checkout: the state before a change.
"""

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from .lines import Lines
from .mutants import mutants, sample
from .run import failing, warm
from .targets import FORMULAS, ROOMS, mutated_files


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=list(ROOMS))
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument(
        "--count", type=int, help="mutants a room; 20, or 40 of formulas"
    )
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
    rows = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    for room in args.rooms:
        lines = Lines(root, room, out.with_name(f"{out.stem}-lines"))
        print(f"{room}: {len(lines.tests)} tests", flush=True)
        wrong = [""]
        while wrong:
            done = {row["key"] for row in rows if row["room"] == room}
            for mutant in drawn(root, room, args.seed, args.count):
                if mutant.key[:16] not in done:
                    row = measured(lines, root, mutant, args.most)
                    rows.append({"room": room, **row})
                    print(*rows[-1].values(), flush=True)
                    text = ",\n".join(json.dumps(row) for row in rows)
                    out.write_text(f"[\n{text}\n]\n", encoding="utf-8")
            # A test that fails alone without a mutant, too, has killed none.
            killers = {row["by"] for row in rows if row["room"] == room}
            wrong = failing(root, sorted(x for x in killers if "tests/" in x))
            lines.leave_out(wrong)
            rows = [row for row in rows if row["by"] not in wrong]
    print(table([rows]))


def measured(lines, root, mutant, most):
    """The first test that fails with a mutant, and how many were too many to run."""
    start = time.monotonic()
    *parts, left = lines.tests_of(mutant, most)
    killers = (failing(root, tests, mutant) for tests in parts)
    return {
        **asdict(mutant),
        "key": mutant.key[:16],
        "by": next(filter(None, killers), [""])[0],
        "most": most,
        "left": len(left),
        "seconds": round(time.monotonic() - start, 1),
    }


def drawn(root, room, seed, count=None):
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
        count or (40 if room in FORMULAS else 20),
    )


def table(runs):
    """Killed of drawn by room in each run."""
    lines = []
    for room in [*ROOMS, "together"]:
        cells = [room]
        for rows in runs:
            drawn_rows = [row for row in rows if room in (row["room"], "together")]
            killed = sum(bool(row["by"]) for row in drawn_rows)
            share = 100 * killed / max(len(drawn_rows), 1)
            cells.append(f"{killed} of {len(drawn_rows)} ({share:.0f} %)")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
