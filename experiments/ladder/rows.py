"""The results of the ladder: one JSON object a line for each finished run, appended as runs end."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.ladder.plan import RUNGS, Point, Question

Row = Mapping[str, Any]
RESULTS = Path(__file__).parent / "results"


def read(rung: str, folder: Path = RESULTS) -> list[Row]:
    """The rows of a rung; a last line that a kill has torn is left out."""
    path = folder / f"{rung}.jsonl"
    if not path.exists():
        return []
    *lines, _ = path.read_text(encoding="utf-8").split("\n")  # what stands behind the last end of line is torn
    return [json.loads(line) for line in lines]


def append(rung: str, rows: Iterable[Row], folder: Path = RESULTS) -> None:
    """Adds rows in one write that is on the disk when this returns; a torn line before them is cut off."""
    path = folder / f"{rung}.jsonl"
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    with path.open("ab+") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def number(value: float | None) -> float | None:
    """A number as a row holds it: five digits, None where it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


def point(row: Row) -> Point:
    """The point of the plan that a row is the result of."""
    return Point(row["rung"], row["arm"], row["lr"], row["seed"])


def values(question: Question, rung: str, rows: Sequence[Row]) -> dict[int, float]:
    """The value of a question by seed on a rung's rows; seeds with a missing or diverged run are left out."""
    lr = RUNGS[rung].roles.get(question.role)
    if lr is None:
        return {}
    sides = []
    for arm in (question.left, question.right):
        column = "max_abs_logit" if question.logits else "val_loss"
        mine = {r["seed"]: r[column] for r in rows if r["arm"] == arm and r["lr"] == lr and r[column] is not None}
        sides.append(mine)
    if question.logits:
        return {seed: math.log(z) for seed, z in sides[0].items()}
    return {seed: sides[0][seed] - sides[1][seed] for seed in sorted(sides[0].keys() & sides[1].keys())}
