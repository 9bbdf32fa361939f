"""The runs of the predictions: small studies one after the other, whose compact rows are written as they come."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.claims.studies import CORPORA
from experiments.studies import ONE_OF_EACH
from experiments.studies.edge import EDGE, EDGE_LRS
from experiments.studies.pairs import write_pairs
from experiments.studies.transfer import TRANSFER, TRANSFER_LRS
from qkeel.errors import DataError
from qkeel.lab import Grid, RunConfig, make_plan, run_plan
from qkeel.lab.checkpoint import computed_with
from qkeel.lab.text import load

Row = dict[str, Any]
COLUMNS = ("val_loss", "init_loss", "max_abs_logit", "end_entropy", "collapsed", "cpu_seconds")
# Parametrisation and number of layers -> widths. µP is the standard parametrisation at width 64.
SIZES: Mapping[tuple[str, int], Sequence[int]] = {
    ("standard", 2): (16, 32, 64, 128),
    ("mup", 2): (16, 32, 128),
    ("standard", 1): (64,),
    ("standard", 4): (64,),
}
AT_ONCE = 8  # seeds of a unit of the transfer study
STUDIES = {"edge": EDGE, "transfer": TRANSFER}


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """One small study: a remedy at one size, its rates and seeds; the rows that it gives have these names."""

    study: str
    remedy: str
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    parametrisation: str
    n_layers: int
    d_model: int
    steps: int

    def about(self) -> Row:
        """The columns that are the same for all of its rows."""
        names = ("study", "remedy", "parametrisation", "n_layers", "d_model", "steps")
        return {name: getattr(self, name) for name in names}


def edge_units(seeds: Sequence[int], steps: int, widths: Sequence[int]) -> list[Unit]:
    """The units of the edge of chaos, seeds outermost: what is done when the time is over is balanced."""
    return [
        Unit("edge", remedy, EDGE_LRS, (seed,), "standard", 2, width, steps)
        for seed in seeds
        for remedy in ONE_OF_EACH
        for width in sorted(widths, reverse=True)
    ]


def tuning_units(seeds: Sequence[int], steps: int, widths: Sequence[int]) -> list[Unit]:
    """The units that rates are chosen by, the widest first."""
    return [
        Unit("transfer", remedy, TRANSFER_LRS, tuple(seeds), *how, width, steps)
        for width in sorted(widths, reverse=True)
        for how, known in SIZES.items()
        if width in known
        for remedy in ONE_OF_EACH
    ]


def compared_units(units: Sequence[Unit], rows: Sequence[Row], seeds: Sequence[int]) -> list[Unit]:
    """The units that are compared: those of the tuning, each at its best rate, seeds outermost."""
    losses: dict[tuple[Any, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        losses[key(row)][row["lr"]].append(row["val_loss"])
    tuned = []
    for unit in units:
        found = {lr: own for lr, own in losses[key(unit.about())].items() if lr in unit.lrs}
        if len(found) == len(unit.lrs):
            best = min(sorted(found), key=lambda lr: sum(found[lr][: len(unit.seeds)]) / len(unit.seeds))
            tuned.append(dataclasses.replace(unit, lrs=(best,)))
    groups = [tuple(seeds[i : i + AT_ONCE]) for i in range(0, len(seeds), AT_ONCE)]
    return [dataclasses.replace(unit, seeds=group) for group in groups for unit in tuned]


def key(about: Mapping[str, Any]) -> tuple[Any, ...]:
    """The study, remedy and size of a row or of a unit's columns."""
    return tuple(about[name] for name in ("study", "remedy", "parametrisation", "n_layers", "d_model", "steps"))


def left(units: Sequence[Unit], rows: Sequence[Row]) -> list[Unit]:
    """The units of which a row is missing."""
    there = {(*key(row), row["lr"], row["seed"]) for row in rows}
    return [u for u in units if any((*key(u.about()), lr, seed) not in there for lr in u.lrs for seed in u.seeds)]


def do(unit: Unit) -> list[Row]:
    """Runs one unit in a directory of its own, which is removed again; returns its rows."""
    base = STUDIES[unit.study].base or RunConfig()
    model = dataclasses.replace(
        base.model, d_model=unit.d_model, n_layers=unit.n_layers, parametrisation=unit.parametrisation
    )
    base = dataclasses.replace(base, model=model, device="cpu", steps=unit.steps, checkpoint_every=0)
    plan = make_plan(STUDIES[unit.study], base, Grid(remedies=[unit.remedy], lrs=unit.lrs, seeds=unit.seeds))
    out = Path(tempfile.mkdtemp())
    try:
        result = run_plan(plan, out)
        if result.failures:
            raise RuntimeError(f"{unit}: {result.failures[0].error}")
        pairs = write_pairs(out) if unit.study == "edge" else []
        return list(rows_of(unit, result.table, {(pair["lr"], pair["seed"]): pair for pair in pairs}))
    finally:
        shutil.rmtree(out)


def rows_of(unit: Unit, table: Sequence[Row], pairs: Mapping[tuple[float, int], Row]) -> Iterator[Row]:
    """One row for each rate and seed; of a pair that of the run as it is, with how its other run parted from it."""
    seen = set()
    for row in table:
        point = row["lr"], row["seed"]
        if point in seen:
            continue
        seen.add(point)
        numbers = {name: row[name] for name in COLUMNS}
        pair = pairs.get(point, {})
        more = {name: pair[name] for name in ("exponent", "logit_distance", "loss_difference") if name in pair}
        yield {**unit.about(), "lr": row["lr"], "seed": row["seed"], **numbers, **more}


def run(units: Sequence[Unit], out: Path, jobs: int) -> list[Row]:
    """Does what is left of the units on so many processes; returns all rows of the file."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    work = left(units, rows)
    with out.open("a") as file, multiprocessing.get_context("fork").Pool(jobs) as pool:
        for number, new in enumerate(pool.imap_unordered(do, work), start=1):
            rows += new
            file.writelines(json.dumps(row) + "\n" for row in new)
            file.flush()
            print(f"{number} of {len(work)}", {name: new[0][name] for name in ("study", "remedy", "d_model", "seed")})
    return rows


def asked(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.predictions.run", description=__doc__)
    parser.add_argument("study", choices=["edge", "transfer"])
    parser.add_argument("--out", type=Path, required=True, help="file of rows, one JSON object a line")
    parser.add_argument("--seeds", type=int, nargs="*", help="seeds [those of the study]")
    parser.add_argument("--tuning-seeds", type=int, nargs="*", default=TRANSFER.grid.tuning_seeds)
    parser.add_argument("--widths", type=int, nargs="*", help="widths [those of the study]")
    parser.add_argument("--steps", type=int, default=RunConfig().steps)
    parser.add_argument("--jobs", type=int, default=2, help="processes at once [2]")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is left of one study."""
    options = asked(sys.argv[1:] if arguments is None else arguments)
    if load(RunConfig().data).sha256 != CORPORA["stdlib"]:
        raise DataError(
            "the predictions are of the text of the claims, see experiments/notes/claims.md; this is another one"
        )
    print(json.dumps(computed_with(dataclasses.replace(RunConfig(), device="cpu"))))
    grid = STUDIES[options.study].grid
    seeds, widths = options.seeds or list(grid.seeds), options.widths or grid.d_model
    if options.study == "edge":
        run(edge_units(seeds, options.steps, widths), options.out, options.jobs)
        return 0
    units = tuning_units(options.tuning_seeds, options.steps, widths)
    rows = run(units, options.out, options.jobs)
    tuning = [row for row in rows if row["seed"] in options.tuning_seeds]
    run(compared_units(units, tuning, seeds), options.out, options.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
