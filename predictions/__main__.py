"""`python -m predictions`: writes the pages of docs/results from the committed tables; `keep` makes a table of rows."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from predictions.pages import DOCS, edge_page, transfer_page, write
from predictions.table import PLACES, read
from predictions.table import write as write_rows
from qkeel.lab import RunConfig
from qkeel.lab.training.environment import computed_with

PAGES = {"edge": edge_page, "transfer": transfer_page}
ABOUT = {
    "edge": {
        "command": "python -m predictions.run edge",
        "cut": "The plan was 10 remedies, 9 rates, 8 seeds and 4 widths, 5,760 runs; it was cut before the "
        "prediction to 7 remedies, 6 rates, 4 seeds and 3 widths, for want of processor time.",
    },
    "transfer": {
        "command": "python -m predictions.run transfer",
        "cut": "The plan was 10 remedies, 3 widths, 3 depths and 16 seeds; it was cut before the prediction to 7 "
        "remedies, widths 16, 32 and 64 of one depth, and 8 seeds, for want of processor time.",
    },
}


def keep(name: str, source: Path) -> None:
    """Makes the committed table of a study of the rows that `predictions.run` wrote."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    identity = computed_with(dataclasses.replace(RunConfig(), device="cpu"))
    runs = len(rows) * (2 if name == "edge" else 1)
    rows = [{key: value for key, value in row.items() if key not in ("study", "collapsed")} for row in rows]
    write_rows(PLACES[name], rows, {**ABOUT[name], "file": PLACES[name].name, "runs": runs, "identity": identity})


def main() -> None:
    """Keeps rows if asked to, then writes all pages whose tables are there."""
    parser = argparse.ArgumentParser(prog="python -m predictions", description=__doc__)
    parser.add_argument("--keep", nargs=2, metavar=("STUDY", "ROWS"), help="rows that become the committed table")
    options = parser.parse_args()
    if options.keep:
        keep(options.keep[0], Path(options.keep[1]))
    for name, page in PAGES.items():
        if PLACES[name].exists():
            write(DOCS, page(*read(PLACES[name])))


if __name__ == "__main__":
    main()
