"""Some query rows for all: which, and how their statistics stand for the whole."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Int
from torch import Tensor

from qkeel.errors import InvalidValueError
from qkeel.functional.statistics.logit_stats import LogitStats


def chosen_rows(t: int, n: int | None, generator: torch.Generator | None) -> Int[Tensor, " n"] | None:
    """Draws n of t query rows, one from each of n equal stretches: row ⌊(i + u_i) t / n⌋, u_i uniform in [0, 1).

    Every row is drawn n / t times in the mean, so sums over the sample are unbiased; where a stretch begins within a
    row, two neighbours may both draw it. None stands for all rows: n is None or at least t.

    Raises:
        InvalidValueError: n is under 1, or there is no generator.
    """
    if n is None:
        return None
    if n < 1:
        raise InvalidValueError(f"expected a sample of at least one query, got {n}")
    if generator is None:
        raise InvalidValueError("a sample of queries needs a generator; pass torch.Generator().manual_seed(seed)")
    if n >= t:
        return None
    place = torch.rand(n, generator=generator, dtype=torch.float64, device=generator.device)
    place += torch.arange(n, device=generator.device)
    return (place * (t / n)).long().clamp_max(t - 1)


def standing_for(stats: LogitStats, t: int, n: int) -> LogitStats:
    """Statistics of n of t query rows with the counts and the sum (qk_frobenius) that all t have in expectation."""

    def scaled(count: Tensor) -> Tensor:
        return (count * t + n // 2) // n

    split = stats.classes
    if split is not None:
        counted = (scaled(count) for count in (split.n_queries, split.n_pairs, split.n_normed))
        split = dataclasses.replace(split, **dict(zip(("n_queries", "n_pairs", "n_normed"), counted)))
    return dataclasses.replace(
        stats,
        n_queries=scaled(stats.n_queries),
        n_pairs=scaled(stats.n_pairs),
        n_free=scaled(stats.n_free),
        n_products=scaled(stats.n_products),
        qk_frobenius=stats.qk_frobenius * (t / n) ** 0.5,
        classes=split,
    )
