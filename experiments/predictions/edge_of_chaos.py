"""The judgement of what was predicted of the edge of chaos, from the rows of the study `edge`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.predictions.order import crossing, kendall, over_seeds, verdict

# Per step: two runs that begin 2^-24 apart, relative, are a tenth of their size apart after the 150 steps of a run.
EDGE = math.log(0.1 * 2**24) / 150
RISE = 0.1  # nats over the loss at the best rate: the knee
LOGIT = 100.0  # nats: the rival
FLOOR = 0.001  # nats
SLOWEST, FASTEST = 1e-4, 10.0  # exponents per step; FASTEST is that of pairs that part before a line can be fitted

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """The rows of the study as arrays [cells seeds rates]; a cell is a remedy at a width."""

    cells: Sequence[tuple[int, str]]
    seeds: Sequence[int]
    lrs: Sequence[float]
    loss: np.ndarray
    exponent: np.ndarray
    logit: np.ndarray
    difference: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Table:
        """Reads the rows of the seeds that every cell has in full."""
        cells = list(dict.fromkeys((row["d_model"], row["remedy"]) for row in rows))
        lrs = sorted({row["lr"] for row in rows})
        found = {(row["d_model"], row["remedy"], row["seed"], row["lr"]): row for row in rows}
        every = sorted({row["seed"] for row in rows})
        seeds = [s for s in every if all((*cell, s, lr) in found for cell in cells for lr in lrs)]

        def array(read: Any) -> np.ndarray:
            return np.array([[[read(found[*cell, s, lr]) for lr in lrs] for s in seeds] for cell in cells])

        return cls(
            cells,
            seeds,
            lrs,
            array(lambda row: min(_finite(row["val_loss"]), row["init_loss"])),
            array(exponent),
            array(lambda row: _finite(row["max_abs_logit"])),
            array(lambda row: _finite(row["loss_difference"])),
        )


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.inf


def exponent(row: Row) -> float:
    """The exponent of a pair, per step, between SLOWEST and FASTEST; NaN where rounding made both runs the same."""
    if row["exponent"] is None:
        return math.nan if row["logit_distance"] == 0 else FASTEST
    return min(max(row["exponent"], SLOWEST), FASTEST)


def knees(table: Table, seeds: np.ndarray) -> np.ndarray:
    """Per cell, log2 of the rate above the best one at which the mean loss has risen by RISE."""
    found = []
    for loss in table.loss[:, seeds].mean(axis=1):
        best = int(loss.argmin())
        over = np.where(np.arange(len(loss)) < best, 0.0, loss - loss[best])
        found.append(crossing(table.lrs, over, RISE))
    return np.array(found)


def exponents(table: Table, seeds: np.ndarray) -> np.ndarray:
    """Median exponent [cells rates] of the pairs that have one; SLOWEST where none has."""
    own = table.exponent[:, seeds]
    known = np.where(np.isnan(own).all(axis=1, keepdims=True), SLOWEST, own)
    return np.nanmedian(known, axis=1)


def edges(table: Table, seeds: np.ndarray) -> np.ndarray:
    """Per cell, log2 of the rate at which the median exponent passes EDGE."""
    courses = np.log(exponents(table, seeds))
    return np.array([crossing(table.lrs, course, math.log(EDGE)) for course in courses])


def passes_logit(table: Table, seeds: np.ndarray) -> np.ndarray:
    """Per cell, log2 of the rate at which the median largest logit passes LOGIT: the rival."""
    courses = np.log(np.median(table.logit[:, seeds], axis=1))
    return np.array([crossing(table.lrs, course, math.log(LOGIT)) for course in courses])


def order(table: Table, seeds: np.ndarray) -> float:
    """Kendall's τ of edges and knees over the cells."""
    return kendall(edges(table, seeds), knees(table, seeds))


def miss(table: Table, seeds: np.ndarray) -> float:
    """Median over the cells of the octaves between edge and knee."""
    return float(np.median(np.abs(edges(table, seeds) - knees(table, seeds))))


def advantage(table: Table, seeds: np.ndarray) -> float:
    """Mean over the cells of the octaves by which the rival's rate is farther from the knee than the edge is."""
    knee = knees(table, seeds)
    return float((np.abs(passes_logit(table, seeds) - knee) - np.abs(edges(table, seeds) - knee)).mean())


def floors(table: Table, seeds: np.ndarray) -> float:
    """Share of cells and rates at which the chaos floor is over FLOOR just where the median exponent is over EDGE."""
    floor = np.sqrt(np.square(table.difference[:, seeds]).mean(axis=1))
    chaotic = exponents(table, seeds) > EDGE
    return float(((floor > FLOOR) == chaotic).mean())


# What was predicted: its words, the statistic, the level, and whether it was predicted to lie above.
PREDICTED = (
    ("order", "Kendall's τ of edge and knee over remedies and widths", order, 0.3, True),
    ("size", "median distance of edge and knee, octaves", miss, 1.0, False),
    ("rival", "octaves by which a largest logit of 100 misses the knee by more than the edge", advantage, 0.0, True),
    ("floor", "share of cells and rates that the edge sorts by chaos floor", floors, 0.8, True),
)


def judged(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns for each prediction its statistic with interval, its level and verdict."""
    table = Table.of(rows)
    every = np.arange(len(table.seeds))
    found: dict[str, Any] = {"seeds": list(table.seeds)}
    for name, words, statistic, level, above in PREDICTED:
        value = over_seeds(len(every), lambda seeds, of=statistic: of(table, seeds))
        found[name] = {"words": words, "value": value, "level": level, "verdict": verdict(value, level, above)}
    return found
