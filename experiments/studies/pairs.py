"""Pairs of runs that start one float32 step apart in one weight, and how far they part."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.files import read_json, write_json
from qkeel.lab import Grid, PlannedRun, RunConfig, RunDirectory, product
from qkeel.metrics import slope

UNMOVED, MOVED = "unmoved", "moved"  # roles of the two runs of a pair
_LOGITS = ("max_logit", "min_logit")


def pairs(base: RunConfig, grid: Grid) -> list[PlannedRun]:
    """Returns all runs of the grid, then the same runs with one weight changed by one float32 step."""
    return [
        *product(base, grid, UNMOVED),
        *product(dataclasses.replace(base, nudge=1), grid, MOVED),
    ]


def write_pairs(out: Path) -> list[dict[str, Any]]:
    """Writes chaos.json for a study of pairs: their common configuration, and one entry per finished pair.

    Pairs of a study with parts, such as several widths, have no common configuration; each entry names its part. The
    distance of a pair is the root mean square difference of the largest and smallest logit of every head on the probe.
    """
    study = read_json(out / "study.json")
    runs = {
        (
            entry["role"].partition(", ")[0],
            entry.get("part", ""),
            entry["remedy"],
            entry["lr"],
            entry["seed"],
        ): out / "runs" / entry["run_id"]
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
            entries.append(
                {
                    **(
                        named
                        if part
                        else dict(itertools.islice(named.items(), 1, None))
                    ),
                    **_parted(both),
                }
            )
    write_json(
        out / "chaos.json", {"base": study["base"].get(UNMOVED, {}), "pairs": entries}
    )
    return entries


def _parted(both: Sequence[RunDirectory]) -> dict[str, float | None]:
    heads = [run.heads() for run in both]
    steps = min(
        (run.steps for run in heads), key=len
    )  # a run that diverges to NaN stops early
    courses = [
        np.stack([run.values[name][: len(steps)] for name in _LOGITS], axis=1)
        for run in heads
    ]
    apart = distance(*courses)
    rate = divergence_rate(
        steps.tolist(), apart, distance(np.zeros_like(courses[0]), courses[0])
    )
    losses = [float(run.summary()["val_loss"]) for run in both]
    return {
        "loss_difference": abs(losses[1] - losses[0]),
        "logit_distance": float(apart[-1]),
        "exponent": None if math.isnan(rate) else rate,
    }


# How fast two runs diverge that differ only by rounding: a finite-time Lyapunov exponent.

SATURATED = 0.1  # beyond this distance, relative to the size of the compared values, exponential growth saturates
_LEAST = 3  # points needed to fit a line


def distance(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the root mean square difference between two trajectories [steps ...] at each step [steps].

    >>> distance(np.zeros((2, 2)), np.array([[3.0, 3.0], [0.0, 0.0]]))
    array([3., 0.])
    """
    apart = (np.asarray(other, np.float64) - np.asarray(one, np.float64)).reshape(
        len(one), -1
    )
    return np.sqrt(np.square(apart).mean(axis=1))


def divergence_rate(
    steps: Sequence[float], distances: np.ndarray, sizes: np.ndarray
) -> float:
    """Returns the slope of ln distance against steps, per step; NaN with fewer than 3 usable steps.

    The fit uses the steps from the first distance above 0 until a distance exceeds a tenth of the size of the compared
    values. A positive slope means that the runs diverge exponentially (chaos); its inverse is the number of steps in
    which the distance grows e-fold.

    Source: Wolf et al. 1985, Determining Lyapunov exponents from a time series, for the quantity.

    >>> round(divergence_rate(range(6), 1e-6 * np.exp(0.5 * np.arange(6)), np.ones(6)), 6)
    0.5
    """
    points = []
    for step, apart, size in zip(steps, distances, sizes):
        if not apart <= SATURATED * size:
            break
        if apart > 0:
            points.append((float(step), math.log(apart)))
    if len(points) < _LEAST:
        return math.nan
    line = np.array(points)
    return slope(line[:, 0], line[:, 1])
