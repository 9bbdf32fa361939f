"""What was looked at after the verdicts on the edge of chaos: not predicted, so it suggests and tests nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from predictions.edge_of_chaos import EDGE, FLOOR, Table, edges, exponents, knees, passes_logit
from predictions.order import kendall, over_seeds

# What bounds no logit: the rival can see these at all.
FREE = ("none", "softcap:cap=50", "sigmoid", "lalr:tau=0.1")
# Keep q and k, or their steps, small.
HELD = ("qk_norm", "qkv_norm", "lalr:tau=0.1")
Interval = tuple[float, float, float]


def looked_at(rows: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, Interval]], tuple[int, int, int, int]]:
    """Returns statistics in words with intervals; and numbers of cells and rates: chaotic with a floor over FLOOR and
    without, not chaotic with and without."""
    table = Table.of(rows)
    n = len(table.seeds)
    widths, names = (np.array(column) for column in zip(*table.cells))

    def within(seeds: np.ndarray, rate: Any) -> float:
        own = [(rate(table, seeds)[widths == d], knees(table, seeds)[widths == d]) for d in np.unique(widths)]
        return float(np.mean([kendall(x, y) for x, y in own]))

    def advantage(seeds: np.ndarray) -> float:
        apart = [np.abs(rate(table, seeds) - knees(table, seeds)) for rate in (passes_logit, edges)]
        return float((apart[0] - apart[1])[np.isin(names, FREE)].mean())

    def side(seeds: np.ndarray, held: bool) -> float:
        return float((edges(table, seeds) - knees(table, seeds))[np.isin(names, HELD) == held].mean())

    statistics = (
        ("τ of edge and knee among the remedies of one width, mean of the widths", lambda s: within(s, edges)),
        ("the same of the rival", lambda s: within(s, passes_logit)),
        (
            "the rival's extra miss in octaves, where nothing bounds logits (none, softcap, sigmoid, LALR)",
            advantage,
        ),
        ("edge minus knee in octaves, QK-norm, QKV-norm and LALR", lambda s: side(s, True)),
        ("edge minus knee in octaves, the others", lambda s: side(s, False)),
    )
    floor, chaotic = np.sqrt(np.square(table.difference).mean(axis=1)) > FLOOR, exponents(table, np.arange(n)) > EDGE
    counts = (floor & chaotic, ~floor & chaotic, floor & ~chaotic, ~floor & ~chaotic)
    a, b, c, d = (int(own.sum()) for own in counts)
    return [(words, over_seeds(n, of)) for words, of in statistics], (a, b, c, d)
