"""Statistics per head that are a formula of queries and keys alone: one function and one row each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkeel.functional.statistics.merging import Merge, merged

PerHead = Float[Tensor, " h"]
Formula = Callable[[Float[Tensor, "b h t d"], Float[Tensor, "b g s d"], Bool[Tensor, "b t"] | None], PerHead]


@dataclasses.dataclass(frozen=True, slots=True)
class HeadFormula:
    """A statistic per head, and how it merges: the mean weighted by query rows, the largest, or the smallest.

    of: a function of q [b h t d] and k [b g s d] as they enter the dot product, h a multiple of g, and of which query
        rows count, [b t] or None for all; it gives [h]. None for what a kernel finds with its own statistics.
    """

    of: Formula | None
    merge: Literal["mean", "max", "min"]


# By recorded name; the same name has a row in records.HEAD_FIELDS.
HEAD_FORMULAS: dict[str, HeadFormula] = {"entropy_error": HeadFormula(None, "mean")}


def merge_formulas(
    a: Mapping[str, PerHead], b: Mapping[str, PerHead], n_a: Int[Tensor, " h"], n_b: Int[Tensor, " h"]
) -> dict[str, PerHead]:
    """The values of two data sets of n_a and n_b query rows as those of both."""
    rules = {name: Merge(HEAD_FORMULAS[name].merge, count="n_queries") for name in a.keys() & b.keys()}
    return {**a, **b, **merged({**a, "n_queries": n_a}, {**b, "n_queries": n_b}, rules)}
