"""Some query rows that stand for all of them."""

from __future__ import annotations

import torch
from jaxtyping import Int

from qkeel.errors import InvalidValueError


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
