"""The committed tables of results: what made them, and one compact row for each run or pair of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkeel.records import read_json, write_text

RESULTS = Path(__file__).parents[1] / "results"
# Of each study the table of the first prediction, then that of the second.
PLACES = {
    "edge": tuple(RESULTS / f"edge-of-chaos-2026-11-{day}.json" for day in (22, 23)),
    "transfer": tuple(RESULTS / f"transfer-2026-11-{day}.json" for day in (22, 23)),
}


def write(path: Path, rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Writes rows in the order of their names, a line each, under what is said about all of them."""
    names = list(rows[0])
    text = sorted(json.dumps([_short(row[name]) for name in names]) for row in rows)
    head = json.dumps({**about, "columns": names})[:-1]
    write_text(path, head + ', "rows": [\n' + ",\n".join(text) + "\n]}\n")


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns what is said about the rows, and the rows."""
    about = read_json(path)
    names, values = about.pop("columns"), about.pop("rows")
    return about, [dict(zip(names, row)) for row in values]


def _short(value: object) -> object:
    return float(f"{value:.7g}") if isinstance(value, float) else value


def tables_of(study: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Returns the tables of a study that are there, in the order of its predictions."""
    return [read(place) for place in PLACES[study] if place.exists()]
