"""The judgement of the second prediction of the edge of chaos: on seeds, remedies, rates and a width that are new."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from experiments.predictions.edge_of_chaos import (
    PREDICTED,
    Table,
    edges,
    knees,
    miss,
    order,
    passes_logit,
)
from experiments.predictions.order import kendall, over_seeds, verdict

SEEDS = (4, 5, 6, 7)
NEW = ("key_norm", "qk_lr:factor=0.1", "swin_norm")
WIDEST = 128
# Keep q and k, or their steps, small.
HELD = ("qk_norm", "qkv_norm", "lalr:tau=0.1", "qk_lr:factor=0.1")
# What bounds no logit: the rival can see these at all.
FREE = ("none", "softcap:cap=50", "sigmoid", "lalr:tau=0.1", *NEW)
MARGIN = 0.25  # octaves
Statistic = Callable[[Table, np.ndarray], float]
Side = Literal["above", "below", "inside"]


def within(table: Table, seeds: np.ndarray) -> float:
    """Kendall's τ of edges and knees among the remedies of a width, mean of the widths."""
    widths, edge, knee = np.array([d for d, _ in table.cells]), edges(table, seeds), knees(table, seeds)
    return float(np.mean([kendall(edge[widths == d], knee[widths == d]) for d in np.unique(widths)]))


def free(table: Table, seeds: np.ndarray) -> float:
    """Mean octaves by which the rival's rate is farther from the knee than the edge is, where logits are free."""
    knee = knees(table, seeds)
    extra = np.abs(passes_logit(table, seeds) - knee) - np.abs(edges(table, seeds) - knee)
    return float(extra[_of(table, FREE)].mean())


def held(table: Table, seeds: np.ndarray) -> float:
    """Mean octaves of the edge over the knee where q and k are held."""
    return float((edges(table, seeds) - knees(table, seeds))[_of(table, HELD)].mean())


def others(table: Table, seeds: np.ndarray) -> float:
    """The same of the other remedies."""
    return float((edges(table, seeds) - knees(table, seeds))[~_of(table, HELD)].mean())


def falls(rate: Callable[[Table, np.ndarray], np.ndarray]) -> Statistic:
    """The mean over remedies of the octaves by which a rate falls from width 64 to the widest."""

    def of(table: Table, seeds: np.ndarray) -> float:
        found = dict(zip(table.cells, rate(table, seeds)))
        return float(np.mean([found[64, remedy] - found[d, remedy] for d, remedy in table.cells if d == WIDEST]))

    return of


def in_new_cells(statistic: Statistic) -> Statistic:
    """A statistic of the cells of which nothing was run before."""

    def of(table: Table, seeds: np.ndarray) -> float:
        new = np.array([d == WIDEST or remedy in NEW for d, remedy in table.cells])
        cells = [cell for cell, own in zip(table.cells, new) if own]
        arrays = (own[new] for own in (table.loss, table.exponent, table.logit, table.difference))
        return statistic(Table(cells, table.seeds, table.lrs, *arrays), seeds)

    return of


def _of(table: Table, remedies: Sequence[str]) -> np.ndarray:
    return np.isin([remedy for _, remedy in table.cells], remedies)


# What was predicted: its name and words, the statistic, the level, and on which side of it (inside: of ±level).
AGAIN: tuple[tuple[str, str, Statistic, float, Side], ...] = (
    *(
        (name, words, statistic, level, "above" if above else "below")
        for name, words, statistic, level, above in PREDICTED
    ),
    ("within", "τ of edge and knee among the remedies of one width, mean of the widths", within, 0.3, "above"),
    ("free", "the rival's extra miss in octaves where logits are free", free, MARGIN, "inside"),
    ("held", "edge minus knee in octaves, where q and k are held", held, 0.0, "above"),
    ("others", "edge minus knee in octaves, the others", others, 0.0, "below"),
    ("edge128", "octaves by which the edge falls from width 64 to 128", falls(edges), 0.3, "above"),
    ("knee128", "octaves by which the knee falls from width 64 to 128", falls(knees), 0.3, "above"),
    ("new order", "τ of edge and knee in the cells of which nothing was run", in_new_cells(order), 0.3, "above"),
    ("new size", "median distance of edge and knee in these cells, octaves", in_new_cells(miss), 1.0, "below"),
)


def judged(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, tuple[float, float, float], str]]:
    """Returns name, words, value with interval and verdict of each prediction, on the seeds of these rows."""
    table, found = Table.of(rows), []
    for name, words, statistic, level, side in AGAIN:
        value = over_seeds(len(table.seeds), lambda seeds, of=statistic: of(table, seeds))
        found.append(
            (name, words, value, inside(value, level) if side == "inside" else verdict(value, level, side == "above"))
        )
    return found


def inside(found: tuple[float, float, float], margin: float) -> str:
    """Returns whether a statistic that was predicted to lie inside of ±margin does, by its interval.

    >>> inside((0.0, -0.1, 0.1), 0.25), inside((0.0, -0.1, 0.3), 0.25), inside((0.4, 0.3, 0.5), 0.25)
    ('held', 'undecided', 'refuted')
    """
    _, low, high = found
    if -margin < low and high < margin:
        return "held"
    return "refuted" if low > margin or high < -margin else "undecided"
