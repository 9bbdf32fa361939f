"""Pairs of runs that start one float32 step apart in one weight, and how far they part."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qkeel.lab import Grid, PlannedRun, RunConfig, RunDirectory, product
from qkeel.metrics import distance, divergence_rate
from qkeel.records import read_json, write_json

UNMOVED, MOVED = "unmoved", "moved"  # roles of the two runs of a pair
_LOGITS = ("max_logit", "min_logit")


def pairs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns all runs of the grid, then the same runs with one weight changed by one float32 step."""
    return [*product(base, grid, UNMOVED), *product(dataclasses.replace(base, nudge=1), grid, MOVED)]


def write_pairs(out: Path) -> list[dict[str, Any]]:
    """Writes chaos.json for a study of pairs: their common configuration, and one entry per finished pair.

    Pairs of a study with parts, such as several widths, have no common configuration; each entry names its part. The
    distance of a pair is the root mean square difference of the largest and smallest logit of every head on the probe.
    """
    study = read_json(out / "study.json")
    runs = {
        (entry["role"].partition(", ")[0], entry.get("part", ""), entry["remedy"], entry["lr"], entry["seed"]): out
        / "runs"
        / entry["run_id"]
        for entry in study["runs"]
    }
    entries = []
    for (role, part, remedy, lr, seed), directory in runs.items():
        other = runs.get((MOVED, part, remedy, lr, seed))
        if role != UNMOVED or other is None:
            continue
        both = RunDirectory(directory), RunDirectory(other)
        if all((run.path / "DONE").exists() for run in both):
            named = {"part": part, "remedy": remedy, "lr": lr, "seed": seed}
            entries.append({**(named if part else dict(itertools.islice(named.items(), 1, None))), **_parted(both)})
    write_json(out / "chaos.json", {"base": study["base"].get(UNMOVED, {}), "pairs": entries})
    return entries


def _parted(both: Sequence[RunDirectory]) -> dict[str, float | None]:
    heads = [run.heads() for run in both]
    steps = min((run.steps for run in heads), key=len)  # a run that diverges to NaN stops early
    courses = [np.stack([run.values[name][: len(steps)] for name in _LOGITS], axis=1) for run in heads]
    apart = distance(*courses)
    rate = divergence_rate(steps.tolist(), apart, distance(np.zeros_like(courses[0]), courses[0]))
    losses = [float(run.summary()["val_loss"]) for run in both]
    return {
        "loss_difference": abs(losses[1] - losses[0]),
        "logit_distance": float(apart[-1]),
        "exponent": None if math.isnan(rate) else rate,
    }
