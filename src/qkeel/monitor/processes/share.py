"""The share that each process has in a number, and the number that all shares make."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
Numbers = Mapping[Key, Tensor]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One number of many sites: of each of their heads, or one of each site.

    Args:
        name: of the number.
        sites: their names.
        counts: how many heads each has; () for one number of each site.
        values: [heads of all sites], or [sites].
        weight: of how many tokens or other data each is the mean; None of what is known alike to all processes.
    """

    name: str
    sites: tuple[str, ...]
    counts: tuple[int, ...]
    values: Tensor
    weight: int | None = None

    def split(self) -> Iterator[tuple[Key, Tensor | Share]]:
        """The numbers of each site."""
        parts = self.values.split(self.counts) if self.counts else self.values.unbind()
        for site, x in zip(self.sites, parts, strict=True):
            known = x if self.weight is None else Share(value=x, weight=torch.full_like(x, self.weight))
            yield (site, self.name), known


@final
class SiteNumbers(Mapping[Key, Tensor | Share]):
    """Numbers by site and name. Those of all sites alike are kept as rows; a site's own are taken out when it is asked
    for."""

    def __init__(self, rows: Iterable[Row] = (), single: Given | None = None) -> None:
        """Takes rows, and numbers that are of none; of several with one key the last counts."""
        self.rows, self.single = tuple(rows), single or {}

    @functools.cached_property
    def _by_key(self) -> dict[Key, Tensor | Share]:
        return {**dict(itertools.chain.from_iterable(row.split() for row in self.rows)), **self.single}

    def __getitem__(self, key: Key) -> Tensor | Share:
        return self._by_key[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._by_key)

    def __len__(self) -> int:
        return len(self._by_key)

    def __or__(self, other: Given) -> SiteNumbers:
        """These and others."""
        if isinstance(other, SiteNumbers):
            return SiteNumbers((*self.rows, *other.rows), {**self.single, **other.single})
        return SiteNumbers(self.rows, {**self.single, **other})

    def each(self, change: Callable[[str, Tensor], Tensor]) -> SiteNumbers:
        """The same with all numbers changed; `change` gets their names too, and leaves the weights of shares."""
        rows = [dataclasses.replace(row, values=change(row.name, row.values)) for row in self.rows]
        single: dict[Key, Tensor | Share] = {}
        for key, x in self.single.items():
            share = isinstance(x, Share)
            single[key] = dataclasses.replace(x, value=change(key[1], x.value)) if share else change(key[1], x)
        return SiteNumbers(rows, single)

    def only(self, wanted: Callable[[str], bool]) -> SiteNumbers:
        """Those of some names."""
        single = {key: x for key, x in self.single.items() if wanted(key[1])}
        return SiteNumbers([row for row in self.rows if wanted(row.name)], single)

    def renamed(self, rename: Callable[[str, str], str]) -> SiteNumbers:
        """The same of sites that are called otherwise: `rename` gets a site and the name of a number."""
        rows = [dataclasses.replace(r, sites=tuple([rename(site, r.name) for site in r.sites])) for r in self.rows]
        return SiteNumbers(rows, {(rename(site, name), name): x for (site, name), x in self.single.items()})


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


_LAST = frozenset(parts[-1] for parts, _, _ in MADE.values())


def with_made(numbers: Numbers) -> Numbers:
    """The numbers, and those that are made of them."""
    if isinstance(numbers, SiteNumbers) and not any([name in _LAST for _, name in numbers.single]):  # noqa: C419
        return numbers
    found = dict(numbers)
    for name, (parts, only, make) in MADE.items():
        for site in [site for site, known in numbers if known == parts[-1]]:
            if all((site, part) in numbers for part in parts):
                found[site, name] = make(*(numbers[site, part] for part in parts))
            for part in only:
                found.pop((site, part), None)
    return found
