"""`python -m experiments.predictions`: writes the pages of notes/results from stored tables; `keep` makes a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from experiments.predictions.pages import DOCS, edge_page, transfer_page, write
from experiments.predictions.table import PLACES, tables_of
from experiments.predictions.table import write as write_rows
from qkeel.lab import RunConfig
from qkeel.lab.checkpoint import computed_with

PAGES = {"edge": edge_page, "transfer": transfer_page}
# What was left out of the plan.
CUT = {
    "edge": "Nothing was cut.",
    "transfer": "Of the sixteen seeds 0 to 7 were cut, for want of processor time: no prediction is judged on them. Of "
    "the depths one, two and four blocks stand at width 64 alone.",
}


def keep(name: str, source: Path) -> None:
    """Makes the committed table of a study of the rows that `predictions.run` wrote."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    identity = computed_with(dataclasses.replace(RunConfig(), device="cpu"))
    runs = len(rows) * (2 if name == "edge" else 1)
    rows = [{key: value for key, value in row.items() if key not in ("study", "collapsed")} for row in rows]
    place = PLACES[name][-1]
    about = {"command": f"python -m experiments.predictions.run {name}", "cut": CUT[name], "file": place.name}
    write_rows(place, rows, {**about, "runs": runs, "identity": identity})


def main() -> None:
    """Keeps rows if asked to, then writes all pages."""
    parser = argparse.ArgumentParser(prog="python -m experiments.predictions", description=__doc__)
    parser.add_argument("--keep", nargs=2, metavar=("STUDY", "ROWS"), help="rows that become the committed table")
    options = parser.parse_args()
    if options.keep:
        keep(options.keep[0], Path(options.keep[1]))
    for name, page in PAGES.items():
        write(DOCS, page(*tables_of(name)))


if __name__ == "__main__":
    main()
