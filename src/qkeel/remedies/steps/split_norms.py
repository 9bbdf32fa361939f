"""Norms of heads of which each process holds a part: squares added up over the processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from qkeel import dist
from qkeel.errors import RefusedError
from qkeel.functional.norms import wide
from qkeel.remedies.steps.head_groups import Measure, frobenius_norm
from qkeel.sites.site import HeadSlice


@final
class SplitNorms:
    """The Frobenius norms per head of weights that are split over processes, by one collective for all of them.

    ‖W^h‖² is the sum over processes of the squares that each of them holds.
    """

    def __init__(self, slices: Sequence[HeadSlice], tensors: Sequence[Tensor], measure: Measure | None) -> None:
        shards = list(dist.shards_of([(s.parameter, t) for s, t in zip(slices, tensors)]))
        self._slices, self._tensors = slices, tensors
        self._sums = dist.PartialSums(shards)
        # The head of each row that this process holds; one more for rows of none.
        self._heads = {
            i: s.lines(torch.arange(s.n), t.shape[s.axis], nobody=s.n)[slice(*shard.spans[s.axis])]
            for i, (s, t, shard) in enumerate(zip(slices, tensors, shards))
            if shard is not None
        }
        if self._heads and measure not in (None, frobenius_norm):
            raise RefusedError(
                f"{slices[next(iter(self._heads))].parameter} is split over processes, of whose parts no spectral norm "
                "can be made; use norm=frobenius"
            )
        self._split = torch.cat([torch.full((s.n,), i in self._heads) for i, s in enumerate(slices)])
        self._counted = torch.cat([torch.full((s.n,), float(c)) for s, c in zip(slices, self._sums.counted)])

    def __contains__(self, i: int) -> bool:
        return i in self._heads

    def squares(self, i: int) -> Tensor:
        """[n] the squares of this process's part of an entry."""
        rows = self._slices[i].rows_of(dist.local(self._tensors[i]).detach())
        own = rows.to(wide(rows.dtype)).square().sum(1)
        heads = self._heads[i] = self._heads[i].to(own.device)
        return own.new_zeros(self._slices[i].n + 1).index_add_(0, heads, own)[:-1]

    def norms(self, row: Tensor) -> Tensor:
        """A row of norms, with squares of split entries, as one of norms alone."""
        if not self._heads:
            return row
        self._split, self._counted = self._split.to(row.device), self._counted.to(row)
        summed = self._sums.add_up(row * self._counted)
        return torch.where(self._split, summed.sqrt(), row)
