"""The judgement of what was predicted of transfer between sizes, from the rows of the study `transfer`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.intervals import paired_effects
from experiments.predictions.order import kendall, over_seeds, verdict

Row = Mapping[str, Any]
Size = tuple[str, int]  # parametrisation and width

TARGET = 64  # the width at which both parametrisations are the same: what advice is for
TUNING = 1000  # seeds from here on are those that rates are chosen on
MARGIN = 0.01  # nats; advice is right where its remedy is no farther from the best one at the target
RIGHT = 0.9
DRAWS = 4000


def losses(rows: Sequence[Row]) -> tuple[list[str], list[int], dict[Size, np.ndarray]]:
    """Returns remedies, seeds that every size has in full, and held-out losses [remedies seeds] of each size."""
    found = {
        (row["parametrisation"], row["d_model"], row["remedy"], row["seed"]): row["val_loss"]
        for row in rows
        if row["seed"] < TUNING
    }
    remedies = list(dict.fromkeys(row["remedy"] for row in rows))
    sizes = list(dict.fromkeys(key[:2] for key in found))
    every = sorted({key[3] for key in found})
    seeds = [s for s in every if all((*size, remedy, s) in found for size in sizes for remedy in remedies)]
    tables = {size: np.array([[_finite(found[*size, r, s]) for s in seeds] for r in remedies]) for size in sizes}
    return remedies, seeds, tables | {("mup", TARGET): tables["standard", TARGET]}


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.inf


def order(tables: Mapping[Size, np.ndarray], size: Size, seeds: np.ndarray) -> float:
    """Kendall's τ of the remedies' mean losses at a size and at the target."""
    return kendall(tables[size][:, seeds].mean(axis=1), tables["standard", TARGET][:, seeds].mean(axis=1))


def advice(tables: Mapping[Size, np.ndarray], size: Size, n: int) -> float:
    """Share of draws of n seeds whose best remedy at a size is within MARGIN of the best at the target."""
    target = tables["standard", TARGET].mean(axis=1)
    proxy = tables[size]
    picks = np.random.default_rng(0).integers(0, proxy.shape[1], (DRAWS, n))
    chosen = proxy[:, picks].mean(axis=2).argmin(axis=0)
    return float((target[chosen] <= target.min() + MARGIN).mean())


def gains(remedies: Sequence[str], table: np.ndarray) -> dict[str, Any]:
    """Each remedy's gain over none at a size, Holm over the remedies; by the registered rule it is to be above 0."""
    none = table[list(remedies).index("none")]
    others = [(remedy, own) for remedy, own in zip(remedies, table) if remedy != "none"]
    return dict(zip((r for r, _ in others), paired_effects([none - own for _, own in others])))


def judged(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns each prediction with its value, interval where it has one, and verdict; and the tables of the page."""
    remedies, seeds, tables = losses(rows)
    n = len(seeds)
    near, far = ("standard", 32), ("standard", 16)
    small = over_seeds(n, lambda own: order(tables, near, own))
    smaller = over_seeds(n, lambda own: order(tables, near, own) - order(tables, far, own))
    mup = over_seeds(n, lambda own: order(tables, ("mup", 32), own) - order(tables, near, own))
    right = {size: advice(tables, size, n) for size in (near, far)}
    return {
        "seeds": seeds,
        "order": {"value": small, "verdict": verdict(small, 0.4)},
        "nearer": {"value": smaller, "verdict": verdict(smaller, 0.0)},
        "mup": {"value": mup, "verdict": verdict(mup, 0.2, above=False)},
        "advice": {"value": right[near], "verdict": "held" if right[near] >= RIGHT else "refuted"},
        "advice16": {"value": right[far], "verdict": "held" if right[far] < RIGHT else "refuted"},
        "effects": gains(remedies, tables["standard", TARGET]),
    }
