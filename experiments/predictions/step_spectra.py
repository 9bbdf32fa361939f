"""Does what a step adds to W_QᵀW_K predict the change of the logits, and does it lead the alarms?

What was predicted is in step_spectra.md, written before the first run. The stored rows were trained at commit c5b7e68e.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.alarms import lasting_gap
from experiments.predictions.order import over_seeds, verdict
from qkeel.monitor import History

TABLE = Path(__file__).parents[1] / "results" / "step-spectra-2026-11-23.json"
STEPS = 150
TUNED, JUDGED = range(40, 43), range(50, 56)
REFERENCE = "qk_norm"
LEAST_LEAD, MOST_FALSE, LEAST_ORDER, FACTOR, SHARE = 10, 0.05, 0.8, 3.0, 0.9

Row = dict[str, Any]


def key(row: Row) -> tuple[str, float, int]:
    """The run of a row."""
    return row["kind"], row["lr"], row["seed"]


def stored_rows() -> list[Row]:
    """The rows of the stored table, one for each run."""
    return json.loads(TABLE.read_text(encoding="utf-8"))["rows"]


def is_wrong(row: Row, reference: Row) -> bool:
    """Collapsed, or for good over 0.1 nats behind the reference of its seed and rate."""
    histories = []
    for one in (row, reference):
        steps = np.array([int(s) for s in one["losses"]], dtype=float)
        losses = {"step": steps, "val_loss": np.array([*one["losses"].values()])}
        histories.append(History(steps=steps, values=losses, heads={}))
    return bool(row["collapsed"]) or lasting_gap(*histories) is not None


def fires(row: Row, threshold: float) -> int | None:
    """The first step at which Σ B, continued to the end of the schedule, is over the threshold."""
    return next((s for s, x in zip(row["steps"], row["ahead"]) if x > threshold), None)


def chosen(rows: Sequence[Row], wrong: Sequence[bool]) -> float:
    """The lowest threshold, so the earliest, with few enough false alarms."""
    healthy = [row for row, bad in zip(rows, wrong) if not bad]
    tops = sorted(max(row["ahead"]) for row in healthy)
    allowed = int(MOST_FALSE * len(healthy))
    return tops[len(tops) - 1 - allowed]


def judge(rows: Sequence[Row]) -> Row:
    """Every statement with its numbers and verdict."""
    table = {key(row): row for row in rows}
    own = [row for row in rows if "ahead" in row]
    wrong = {
        key(row): is_wrong(row, table[REFERENCE, row["lr"], row["seed"]]) for row in rows if row["kind"] != REFERENCE
    }
    tuned, held = ([row for row in own if row["seed"] in seeds] for seeds in (TUNED, JUDGED))
    threshold = chosen(tuned, [wrong[key(row)] for row in tuned])
    bad, healthy = ([row for row in held if wrong[key(row)] == state] for state in (True, False))
    seeds = sorted({row["seed"] for row in held})
    by_seed = {seed: [row for row in held if row["seed"] == seed] for seed in seeds}

    def median_order(places: np.ndarray) -> float:
        return float(np.nanmedian([row["order"] for i in places for row in by_seed[seeds[i]]]))

    def median_lead(places: np.ndarray) -> float:
        found = [lead(row) for i in places for row in by_seed[seeds[i]] if row in bad]
        known = [x for x in found if x is not None]
        return float(np.median(known)) if known else math.nan

    def lead(row: Row) -> int | None:
        """How many steps before the alarm it fires; STEPS stand for what does not fire."""
        mine = fires(row, threshold)
        if mine is None and row["alarm"] is None:
            return None
        return (STEPS if row["alarm"] is None else row["alarm"]) - (STEPS if mine is None else mine)

    order, ahead = over_seeds(len(seeds), median_order), over_seeds(len(seeds), median_lead)
    near = [1 / FACTOR <= row["ratio"][1] <= FACTOR for row in held]
    false = [row for row in healthy if fires(row, threshold) is not None]
    requested = {}
    for name, kinds in (("all sinks", ("none", "lalr:tau=0.1", "sink")), ("gate shut", ("sink",))):
        of = [row for row in rows if row["kind"] in kinds and row["seed"] in JUDGED and not wrong[key(row)]]
        requested[name] = [sum(row.get(name) is not None for row in of), len(of)]
    return {
        "order": order,
        "scale": [sum(near), len(near)],
        "ratio": [float(np.median([row["ratio"][i] for row in held])) for i in range(3)],
        "ratio_by_run": sorted(round(row["ratio"][1], 3) for row in held),
        "over_bound": [sum(row["over_bound"] for row in held), sum(row["records"] for row in held)],
        "runs_over_bound": sum(row["over_bound"] > 0 for row in held),
        "closest": max(row["closest"] for row in held),
        "threshold": threshold,
        "lead": ahead,
        "leads": sorted(x for row in bad if (x := lead(row)) is not None),
        "wrong_runs": len(bad),
        "wrong_that_fire": sum(fires(row, threshold) is not None for row in bad),
        "wrong_with_alarm": sum(row["alarm"] is not None for row in bad),
        "false": [len(false), len(healthy)],
        "false_alarms_of_default_rules": [sum(row["alarm"] is not None for row in healthy), len(healthy)],
        "rules on request, healthy runs that fire": requested,
    }


def verdicts(found: Row) -> list[tuple[str, str, str]]:
    """Of each prediction what was found, and whether it held."""

    def share(of: Sequence[int]) -> str:
        return f"{of[0]:,} of {of[1]:,}"

    order, lead = found["order"], found["lead"]
    near, false = found["scale"], found["false"]
    return [
        ("order", f"{order[0]:.2f} ({order[1]:.2f} to {order[2]:.2f})", verdict(order, LEAST_ORDER)),
        (
            "scale",
            f"{share(near)} runs; measured / p {found['ratio'][1]:.1f} in the median",
            "held" if near[0] >= SHARE * near[1] else "refuted",
        ),
        ("bound", f"{share(found['over_bound'])} changes are over B", "refuted" if found["over_bound"][0] else "held"),
        ("lead", f"{lead[0]:.0f} steps ({lead[1]:.0f} to {lead[2]:.0f})", verdict(lead, LEAST_LEAD)),
        ("false", f"{share(false)} healthy runs", "held" if false[0] <= MOST_FALSE * false[1] else "refuted"),
    ]
