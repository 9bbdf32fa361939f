"""Weights that are split over processes, or quantised: norms per head over all processes, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from qkeel import dist
from qkeel.errors import RefusedError
from qkeel.functional.norms import wide
from qkeel.heads.site import HeadSlice
from qkeel.patching.graph_nodes import is_wrapper
from qkeel.remedies.steps.head_groups import Measure, frobenius_norm


def has_plain_rows(weight: Tensor) -> bool:
    """True if the rows of a weight, or of this process's part of it, can be read and scaled as they are."""
    return weight.is_floating_point() and not is_wrapper(dist.local(weight))


def check_plain_rows(name: str, weight: Tensor, remedy: str) -> None:
    """Raise RefusedError for a quantised weight, and for one that is split over processes in a way that is not known.

    FSDP2 and tensor parallelism keep a weight as a DTensor, of which each process has a block. The flat copies of ZeRO
    and FSDP1 are not recognised as copies.
    """
    if not has_plain_rows(weight):
        raise RefusedError(
            f"{name} is quantised ({type(weight).__name__} of {weight.dtype}), so the rows of its heads cannot be read "
            f"or scaled; apply {remedy} to plain floating point weights"
        )
    dist.shard(name, weight)


def check_whole(name: str, weight: Tensor, remedy: str) -> None:
    """Raise RefusedError for a weight that is split over processes, where a remedy needs the whole of each head."""
    if dist.is_split(weight):
        raise RefusedError(
            f"{name} is split over processes, and {remedy} needs all rows and columns of a head at once; use lalr or "
            "qk_clip, which make do with parts, or DistributedDataParallel, which keeps weights whole"
        )


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
