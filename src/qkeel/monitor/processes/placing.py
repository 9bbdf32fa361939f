"""The statistics of some heads of a site as those of all its heads, the others not seen."""

from __future__ import annotations

import torch
from torch import Tensor

from qkeel.functional.statistics.class_stats import ClassStats
from qkeel.functional.statistics.head_formulas import HEAD_FORMULAS
from qkeel.functional.statistics.logit_stats import MERGES, LogitStats

Span = tuple[int, int, int]  # the first head, how many, of how many
_NOTHING = {"mean": 0.0, "max": -torch.inf, "min": torch.inf}


def placed(stats: LogitStats, heads: Span, keys: Span, *, count_keys: bool = True) -> LogitStats:
    """The statistics with a place for every head, for `merge`.

    Args:
        stats: of some heads.
        heads: which of the query heads these are.
        keys: which of the key heads.
        count_keys: whether the keys count; not where another process counts the same ones.
    """
    if heads[1] == heads[2] and keys[1] == keys[2] and count_keys:
        return stats

    def put(name: str, value: Tensor, nothing: float) -> Tensor:
        of_keys = name.startswith(("key_", "n_keys"))
        return put_in_place(value, keys if of_keys else heads, nothing, blank=of_keys and not count_keys)

    fields = {name: put(name, value, MERGES[name].neutral) for name, value in stats.tensors().items()}
    formulas = {n: put_in_place(x, heads, _NOTHING[HEAD_FORMULAS[n].merge]) for n, x in stats.formulas.items()}
    classes = stats.classes
    if classes is not None:
        parts = {n: put(n, x, -torch.inf if n == "max_logit" else 0.0) for n, x in classes.tensors().items()}
        classes = ClassStats(names=classes.names, **parts)
    return LogitStats(**fields, classes=classes, formulas=formulas)  # type: ignore[arg-type]


def put_in_place(value: Tensor, at: Span, nothing: float, *, blank: bool = False) -> Tensor:
    """The numbers of some heads among those of all, the others `nothing`; with `blank` all of them are."""
    first, n, total = at
    out = value.new_full((total, *value.shape[1:]), nothing)
    if not blank:
        out[first : first + n] = value
    return out
