"""The stored tables of results: what made them, and one compact row for each run or pair of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
# Of each study the table of the first prediction, then that of the second.
PLACES = {
    "edge": tuple(RESULTS / f"edge-of-chaos-2026-11-{day}.json" for day in (22, 23)),
    "transfer": tuple(RESULTS / f"transfer-2026-11-{day}.json" for day in (22, 23)),
}


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns what is said about the rows, and the rows."""
    about = json.loads(path.read_text(encoding="utf-8"))
    names, values = about.pop("columns"), about.pop("rows")
    return about, [dict(zip(names, row)) for row in values]


def tables_of(study: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Returns the tables of a study that are there, in the order of its predictions."""
    return [read(place) for place in PLACES[study] if place.exists()]
