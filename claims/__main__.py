"""`make claims`: runs the studies of the claims, as far as they are not done, and writes results and page."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from claims.judge import HERE, PAGE, page
from claims.table import CLAIMS, CORPUS, SEEDS, STUDIES, Cell
from qkeel.errors import DataError, QkeelError
from qkeel.lab import Execution, RunConfig, make_plan, run_plan
from qkeel.lab.data.corpus import load
from qkeel.lab.studies import find_study
from qkeel.lab.training.environment import computed_with
from qkeel.records import read_json, write_json, write_text


def asked(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m claims", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/claims"), help="directory of the studies")
    parser.add_argument("--only", nargs="*", choices=list(STUDIES), default=list(STUDIES), help="studies to run")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"number of seeds [{SEEDS}]")
    parser.add_argument("--steps", type=int, help="steps of each run, where not the study's own: for a trial")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once [2]")
    parser.add_argument("--results", type=Path, default=HERE / "results.json", help="file of results")
    parser.add_argument("--page", type=Path, default=PAGE, help="page that is written")
    return parser.parse_args(arguments)


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs what is left of one study; returns its part of the results."""
    study, axes = STUDIES[name]
    own = find_study(study)
    base = own.base or RunConfig()
    if load(base.data).sha256 != CORPUS:
        raise DataError(
            f"the claims are tested on the text of SHA-256 {CORPUS[:12]}…, and {base.data.source} is another one here "
            "(it is the standard library of the running Python): use CPython 3.11.7"
        )
    base = dataclasses.replace(base, device="cpu", steps=options.steps or base.steps)
    grid = dataclasses.replace(own.grid, **(axes or {}), seeds=range(options.seeds))
    plan = make_plan(study, base, grid, own.contexts)
    result = run_plan(plan, options.out / name, Execution(workers=options.jobs, stack="auto", command="make claims"))
    for failure in result.failures:
        print(f"{failure.directory}: {failure.error}", file=sys.stderr)
    keys = _columns(name)
    table = result.long_table if own.contexts else [row for row in result.table if row["status"] == "done"]
    rows = [{key: row[key] for key in keys if row.get(key) is not None} for row in table]
    return {"identity": computed_with(plan.runs[0].config), "rows": rows}


def _columns(name: str) -> list[str]:
    """The columns that the claims of a study read."""
    cells = [side for c in CLAIMS if c.study == name for side in (c.left, c.right) if isinstance(side, Cell)]
    wanted = ["seed", *(key for cell in cells for key in (*cell.where, cell.column))]
    if "lr_sensitivity" in wanted:
        wanted += ["lr", "val_loss", "init_loss"]
    return [key for key in dict.fromkeys(wanted) if key != "lr_sensitivity"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the studies one after the other; results are written after each, so that nothing is lost."""
    options = asked(sys.argv[1:] if arguments is None else arguments)
    results = read_json(options.results) if options.results.exists() else {}
    try:
        for name in options.only:
            results[name] = run(name, options)
            write_json(options.results, results)
            write_text(options.page, page(results))
            print(f"{name}: {len(results[name]['rows'])} rows")
    except QkeelError as error:
        print(f"python -m claims: {error}", file=sys.stderr)
        return 1
    write_text(options.page, page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
