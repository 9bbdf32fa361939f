"""Merges the statistics of two data sets into those of both, field by field."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


How = Literal["max", "min", "sum", "root", "mean"]


@dataclasses.dataclass(frozen=True, slots=True)
class Merge:
    """The rule of a field: the larger, the smaller, the sum, the root of the sum of squares, or a mean weighted by the
    field `count`. `neutral` is its value where nothing was seen."""

    how: How
    neutral: float = 0.0
    count: str = ""


def rule(how: How, neutral: float = 0.0, count: str = "") -> dict[str, Merge]:
    """The metadata of a field that merges in this way, see `Merge`."""
    return {"merge": Merge(how, neutral, count)}


def merge_rules(kind: type[DataclassInstance]) -> dict[str, Merge]:
    """The rules of the fields that have one, by name. Counts are the sums."""
    return {field.name: field.metadata["merge"] for field in dataclasses.fields(kind) if field.metadata}


def merged(a: Mapping[str, Tensor], b: Mapping[str, Tensor], rules: Mapping[str, Merge]) -> dict[str, Tensor]:
    """The merged fields of two statistics of one kind, those that the rules name."""
    return {name: _merged(a, b, name, rule) for name, rule in rules.items()}


def tensors(stats: DataclassInstance) -> dict[str, Tensor]:
    """The fields of some statistics that are tensors, by name."""
    return {name: x for name in _field_names(type(stats)) if isinstance(x := getattr(stats, name), Tensor)}


@functools.cache
def _field_names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple([field.name for field in dataclasses.fields(kind)])


def _merged(a: Mapping[str, Tensor], b: Mapping[str, Tensor], name: str, rule: Merge) -> Tensor:
    mine, other = a[name], b[name]
    if rule.how == "max":
        return torch.maximum(mine, other)
    if rule.how == "min":
        return torch.minimum(mine, other)
    if rule.how == "sum":
        return mine + other
    if rule.how == "root":
        return torch.hypot(mine, other)
    # In the means' dtype: a quotient of integers would be float32.
    share = b[rule.count].to(mine.dtype) / (a[rule.count] + b[rule.count]).clamp_min(1)
    return torch.lerp(mine, other, share if share.ndim == mine.ndim else share[..., None])
