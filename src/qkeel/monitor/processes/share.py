"""The share that each process has in a number, and the number that all shares make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, final

import torch
from torch import Tensor

Key = tuple[str, str]  # the site, "" for the whole model, and the name of the number
WHOLE_MODEL = ("lr", "train_loss", "final_hidden_norm")  # of no site
How = Literal["mean", "root_mean", "root", "max"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """The knowledge that one process has of a number: its value over some of the data, or over its part of a weight.

    mean: Σ weight · value / Σ weight; root_mean: √(Σ weight · value² / Σ weight); root: √Σ value²; max: the largest.
    A process whose weight is 0 knows nothing of it.

    Args:
        value, weight: of one shape.
        of: "data" of all processes, "weights" of those that hold unlike parts of the weights.
        own: the values are of the heads that this process computes, not of all heads.
    """

    value: Tensor
    weight: Tensor
    how: How = "mean"
    of: Literal["data", "weights"] = "data"
    own: bool = False


Given = Mapping[Key, Tensor | Share]  # a tensor is known alike to all processes that hold the same weights
Numbers = dict[Key, Tensor]


def combined(how: How, values: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The number that several processes make; NaN where none of them knows anything."""
    known = [w > 0 for w in weights]
    if len(values) == 1:
        return values[0].masked_fill(~known[0], torch.nan)
    x, w = torch.stack([v.masked_fill(~k, 0.0) for v, k in zip(values, known)]), torch.stack(list(weights))
    if how == "max":
        out = x.masked_fill(w == 0, -torch.inf).amax(0)
    elif how == "mean":
        out = (w * x).sum(0) / w.sum(0)
    else:
        top = x.abs().amax(0).nan_to_num(1.0, 1.0).clamp_min(torch.finfo(x.dtype).tiny)  # squares stay finite
        total = ((x / top).square() * (w if how == "root_mean" else 1.0)).sum(0)
        out = top * (total / w.sum(0) if how == "root_mean" else total).sqrt()
    return out.masked_fill(w.sum(0) == 0, torch.nan)


def _smaller_over_eps(query: Tensor, key: Tensor, eps: Tensor) -> Tensor:
    return torch.minimum(query, key) / eps


def _product(query: Tensor, key: Tensor) -> Tensor:
    return query * key


# Numbers that are made of merged ones: from which, whether those are only for this, and how.
MADE: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Callable[..., Tensor]]] = {
    "grad_over_eps": (("query_grad_rms", "key_grad_rms", "eps"), ("eps",), _smaller_over_eps),
    "gain_bound": (("query_bound", "key_bound"), ("query_bound", "key_bound"), _product),
}


def with_made(numbers: Numbers) -> Numbers:
    """The numbers, and those that are made of them."""
    found = dict(numbers)
    for name, (parts, only, make) in MADE.items():
        for site in [site for site, known in numbers if known == parts[-1]]:
            if all((site, part) in numbers for part in parts):
                found[site, name] = make(*(numbers[site, part] for part in parts))
            for part in only:
                found.pop((site, part), None)
    return found
