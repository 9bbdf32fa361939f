"""The runs of the drift study as one compact table: what the laws of logits and of gains are fitted and tested on.

    python -m experiments.predictions.drift fit|test|gain-fit|gain-test --out FOLDER --jobs 6 --seeds 0 1 2

Each process appends to FOLDER/rows-*.csv as runs end, one seed of all cells before the next, so that what is there
when it is stopped is balanced; started again it does what is left.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.studies.drift import DRIFT, HELD_OUT, variant
from qkeel.errors import QkeelError
from qkeel.lab import Grid, PlannedRun, RunConfig, RunDirectory, product, run
from qkeel.lab.checkpoint import identity

KEY = ("remedy", "width", "depth", "heads", "head_dim", "batch", "context", "schedule", "steps", "lr", "seed")
COLUMNS = (
    *("part", *KEY),
    *("init_loss", "val_loss", "cpu_seconds", "at", "max_logit"),
)
REMEDIES = ("none", "qk_norm", "qk_clip:threshold=30", "lalr:tau=0.1")  # of the law of gains
# Where gains are fitted, and where the fit is tested: widths with blocks, rates, seeds. Heads are of 16.
GAINS = {
    "gain-fit": (
        ((32, 1), (32, 2), (32, 4), (64, 1), (64, 2), (64, 4), (128, 1), (128, 2), (128, 4)),
        (0.01, 0.03, 0.1),
        range(200, 204),
    ),
    "gain-test": (((48, 3), (96, 2), (64, 6), (192, 1)), (0.01, 0.03, 0.055, 0.1), range(300, 304)),
}


def planned(part: str, base: RunConfig, seeds: Sequence[int]) -> Sequence[PlannedRun]:
    """Returns the runs of a part, on its own seeds where none are given."""
    if part in GAINS:
        sizes, lrs, own = GAINS[part]
        grid = Grid(remedies=REMEDIES, lrs=lrs, seeds=tuple(seeds or own))
        return [cell for size in sizes for cell in product(variant(base, (*size, 16)), grid, str(size))]
    study = HELD_OUT if part == "test" else DRIFT
    return study.plan(base, dataclasses.replace(study.grid, seeds=tuple(seeds) or study.grid.seeds)).runs


def cells(part: str, seeds: Sequence[int]) -> list[list[RunConfig]]:
    """Returns the runs of a part in units of a seed, size and remedy, one seed after the other."""
    base = dataclasses.replace(RunConfig(), device="cpu", dtype="fp32")
    units: dict[tuple[int, str, str], list[RunConfig]] = {}
    for cell in planned(part, base, seeds):
        units.setdefault((cell.config.seed, cell.role, cell.config.remedy), []).append(cell.config)
    ordered = sorted(units, key=lambda unit: (unit[0], unit[2] != "none"))
    return [units[unit] for unit in ordered]


def key(config: RunConfig) -> tuple[str, ...]:
    """Returns what tells a run from the others of its part, as the table writes it."""
    model, optim, data = config.model, config.optim, config.data
    sizes = (model.d_model, model.n_layers, model.n_heads, model.head_dim or model.d_model // model.n_heads)
    found = (config.remedy, *sizes, data.batch, data.context, optim.schedule, config.steps, optim.lr, config.seed)
    return tuple(map(str, found))


def done(out: Path) -> set[tuple[str, ...]]:
    """Returns the keys of the rows that are there."""
    found = set()
    for file in out.glob("rows-*.csv"):
        with file.open(newline="") as text:
            found |= {tuple(row[1 : len(KEY) + 1]) for row in csv.reader(text) if len(row) == len(COLUMNS)}
    return found


def train(job: tuple[str, list[RunConfig], str]) -> int:
    """Trains the runs of a unit and appends their rows."""
    part, configs, out = job
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, config in enumerate(configs):
            try:
                rows.append(row(part, config, run(config, Path(folder, str(number)))))
            except QkeelError as error:
                print("failed:", error, flush=True)
    with Path(out, f"rows-{os.getpid()}.csv").open("a", newline="") as text:
        csv.writer(text, lineterminator="\n").writerows(rows)
    return len(rows)


def row(part: str, config: RunConfig, place: RunDirectory) -> list[object]:
    """Returns the row of a run: what it is, its losses, and the largest logit at every recorded step."""
    records = place.metrics()
    losses = (records[0]["val_loss"], records[-1]["val_loss"])
    cost = sum(record["cpu_seconds"] for record in records[-1:])
    steps, logits = [record["step"] for record in records], [record["max_logit"] for record in records]
    said = [f"{value:.6g}" for value in (*losses, cost)]
    return [part, *key(config), *said, " ".join(map(str, steps)), " ".join(f"{value:.5g}" for value in logits)]


def merged(out: Path, part: str, units: Sequence[Sequence[RunConfig]], table: Path) -> int:
    """Writes the rows of a plan that are done, in its order, as one table; returns how many are missing."""
    rows = {}
    for file in out.glob("rows-*.csv"):
        with file.open(newline="") as text:
            rows |= {tuple(line[1 : len(KEY) + 1]): line for line in csv.reader(text) if len(line) == len(COLUMNS)}
    keys = [key(config) for unit in units for config in unit]
    with table.open("w", newline="") as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows[one] for one in keys if one in rows)
    return sum(one not in rows for one in keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("fit", "test", *GAINS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=())
    parser.add_argument("--table", type=Path, help="where to write all rows that are done")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    units = cells(given.part, given.seeds)
    there = done(given.out)
    left = [more for unit in units if (more := [config for config in unit if key(config) not in there])]
    (given.out / "environment.txt").write_text(repr(identity(units[0][0])) + "\n")
    jobs = [(given.part, unit, str(given.out)) for unit in left]
    if given.jobs == 1:
        for job in jobs:
            train(job)
    else:
        with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
            pool.map(train, jobs, chunksize=1)
    if given.table:
        print(f"{merged(given.out, given.part, units, given.table)} runs are missing from {given.table}")


if __name__ == "__main__":
    main()
