"""`python -m experiments.claims`: runs what is left of the claims' studies, and writes results and page."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.claims.claim import OF_ALL_RATES, Cell
from experiments.claims.judge import HERE, PAGE, page
from experiments.claims.measures import MEASURES
from experiments.claims.site_page import SITE, site_page
from experiments.claims.studies import CORPORA, STUDIES
from experiments.claims.table import EVERY
from experiments.files import read_json, write_json
from qkeel.errors import DataError, QkeelError, RunDirectoryError
from qkeel.lab import (
    Execution,
    Plan,
    RunConfig,
    RunDirectory,
    computed_with,
    find_study,
    make_plan,
    run_plan,
)
from qkeel.lab.text import load


def asked(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.claims", description=__doc__
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/claims"), help="directory of the studies"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        choices=list(STUDIES),
        default=list(STUDIES),
        help="studies to run",
    )
    parser.add_argument(
        "--seeds", type=int, help="number of seeds [of each study, see claims.studies]"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the rows of seeds that the results have whole; the last of them is run again, and must be the same",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="steps of each run, where not the study's own: for a trial",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at once [2]")
    parser.add_argument(
        "--results", type=Path, default=HERE / "results.json", help="file of results"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="page that is written")
    return parser.parse_args(arguments)


def plan_of(name: str, seeds: Sequence[int] = (), steps: int | None = None) -> Plan:
    """The plan of a study of the table, on all its seeds where none are given; raises DataError where this Python has
    another text."""
    about = STUDIES[name]
    own = find_study(about.study)
    base = configured(
        own.base or RunConfig(),
        {"device": "cpu", **about.settings, **({"steps": steps} if steps else {})},
    )
    source = base.data.source
    if load(base.data).sha256 != CORPORA[source]:
        raise DataError(
            f"the claims are tested on the text of SHA-256 {CORPORA[source][:12]}…, and {source} is another one here "
            "(it comes with the running Python): use CPython 3.11.7"
        )
    grid = dataclasses.replace(
        own.grid, **about.grid, seeds=seeds or range(about.seeds)
    )
    contexts = (
        dataclasses.replace(own.contexts, posthoc=about.posthoc)
        if own.contexts
        else None
    )
    return make_plan(about.study, base, grid, contexts)


def configured(base: RunConfig, settings: Mapping[str, object]) -> RunConfig:
    """The configuration with these settings, those of a section as "data.task"."""
    values = base.to_dict()
    for place, value in settings.items():
        section, _, name = place.rpartition(".")
        (values[section] if section else values)[name] = value
    return RunConfig.from_dict(values)


def whole_seeds(rows: Sequence[Mapping[str, Any]]) -> int:
    """How many seeds, from 0 on, have as many rows as any has."""
    counts = collections.Counter(row["seed"] for row in rows)
    return next(
        seed
        for seed in itertools.count()
        if counts[seed] < max(counts.values(), default=1)
    )


def joined(
    name: str, before: Mapping[str, Any], now: Mapping[str, Any], first: int
) -> dict[str, Any]:
    """The rows of `before` of seeds under `first`, and those that were run now, where seed `first` is as it was."""
    texts = [
        sorted(json.dumps(row, sort_keys=True) for row in _of(about, first))
        for about in (before, now)
    ]
    if before["identity"] != now["identity"] or texts[0] != texts[1]:
        raise RunDirectoryError(
            f"seed {first} of {name}, run again, is not as it was: the rows of earlier seeds are of another machine or "
            "code and are not mixed with these. Run without --keep"
        )
    kept = [row for row in before["rows"] if row["seed"] < first]
    spent = now["cpu_seconds"] + round(
        before["cpu_seconds"] * len(kept) / len(before["rows"])
    )
    return {
        **now,
        "cpu_seconds": spent,
        "kept_seeds": first,
        "rows": [*kept, *now["rows"]],
    }


def _of(about: Mapping[str, Any], seed: int) -> list[Mapping[str, Any]]:
    return [row for row in about["rows"] if row["seed"] == seed]


def run(
    name: str, options: argparse.Namespace, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Runs what is left of one study; returns its part of the results. `before` is that part as it stands."""
    first = max(0, whole_seeds(before.get("rows", ())) - 1) if options.keep else 0
    plan = plan_of(
        name, range(first, options.seeds or STUDIES[name].seeds), options.steps
    )
    out = options.out / name
    result = run_plan(
        plan,
        out,
        Execution(workers=options.jobs, command="python -m experiments.claims"),
    )
    for failure in result.failures:
        print(f"{failure.directory}: {failure.error}", file=sys.stderr)
    done = [
        row for row in result.table if row["status"] == "done" and row["seed"] >= first
    ]
    if plan.contexts is None:
        for row in done:
            place = RunDirectory(out / "runs" / row["run_id"])
            row |= {
                column: MEASURES[column](place)
                for column in columns(name)
                if column in MEASURES
            }
    long = [
        row
        for row in result.long_table
        if row["accuracy_train"] is not None and row["seed"] >= first
    ]
    table = long if plan.contexts else done
    rows = [
        {key: row[key] for key in columns(name) if row.get(key) is not None}
        for row in table
    ]
    spent = round(sum(row["cpu_seconds"] for row in done))
    now = {
        "identity": computed_with(plan.runs[0].config),
        "cpu_seconds": spent,
        "rows": rows,
    }
    return joined(name, before, now, first) if first else now


def write_pages(place: Path, results: Mapping[str, Any]) -> None:
    """Writes the full page, and that of the site where the full one has its usual place."""
    place.write_text(page(results), encoding="utf-8")
    if place == PAGE:
        SITE.write_text(site_page(results), encoding="utf-8")


def columns(name: str) -> list[str]:
    """The columns that the claims of a study read."""
    cells = [
        side
        for claim in EVERY
        for side in (claim.left, claim.right)
        if isinstance(side, Cell) and (side.study or claim.study) == name
    ]
    wanted = ["seed", *(key for cell in cells for key in (*cell.where, cell.column))]
    made_of = {
        "lr_sensitivity": ("lr", "val_loss", "init_loss"),
        "largest_stable_lr": ("lr", "collapsed"),
    }
    wanted += [key for name in OF_ALL_RATES if name in wanted for key in made_of[name]]
    return [key for key in dict.fromkeys(wanted) if key not in OF_ALL_RATES]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the studies one after the other; results are written after each, so that nothing is lost."""
    options = asked(sys.argv[1:] if arguments is None else arguments)
    results = read_json(options.results) if options.results.exists() else {}
    try:
        for name in options.only:
            results[name] = run(name, options, results.get(name, {}))
            write_json(options.results, results)
            write_pages(options.page, results)
            print(f"{name}: {len(results[name]['rows'])} rows")
    except QkeelError as error:
        print(f"python -m experiments.claims: {error}", file=sys.stderr)
        return 1
    write_pages(options.page, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
