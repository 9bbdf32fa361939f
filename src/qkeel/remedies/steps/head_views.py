"""Views of the rows of a weight that belong to heads: every row in one view, however many slices name it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from qkeel.sites.site import HeadSlice, across

Share = tuple[int, HeadSlice]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadView:
    """Rows of a weight or bias as a view [n r m], with one factor for each of the n.

    `shares` are the numbers of the entries it belongs to, with their slices. The n are the heads of its one slice, or,
    in a `whole` view, the rows of the whole tensor: its slices overlap without being the same, or have no view.
    """

    weight: Tensor
    shares: tuple[Share, ...]
    whole: bool

    def view(self, like: Tensor | None = None) -> Tensor:
        """The rows, as a view; of another tensor of the weight's shape if there is one."""
        weight, own = (self.weight if like is None else like).detach(), self.shares[0][1]
        return own.rows_of(weight)[:, None] if self.whole else own.heads(weight)

    def places(self, counts: Sequence[int]) -> Tensor:
        """[n most] places of the heads that own each row, the last place where there are none.

        They are places in one row of numbers: one per head, entry after entry, and one more behind them. `counts`
        are the numbers of heads of the entries.
        """
        *firsts, last = itertools.accumulate(counts, initial=0)
        own = [(s, torch.arange(s.n) + firsts[i]) for i, s in self.shares]
        if not self.whole:
            return torch.stack([heads for _, heads in own], 1)
        rows = self.shares[0][1].rows_of(self.weight).shape[0]
        found = torch.stack([s.lines(heads, rows, nobody=last) for s, heads in own], 1)
        # A row with an owner repeats that owner's place for the missing ones, so that the last place does not count.
        return torch.where(found == last, found.amin(1, keepdim=True), found)


def stacked(tables: Sequence[Tensor]) -> Tensor:
    """Tables of places one below the other; the first of a row is repeated where others are longer."""
    most = max(t.shape[1] for t in tables)
    return torch.cat([torch.cat([t, t[:, :1].expand(-1, most - t.shape[1])], 1) for t in tables])


def head_views(weight: Tensor, shares: Sequence[Share]) -> list[HeadView]:
    """The fewest views that hold every row of the slices once, and no other rows where views can do that."""
    if weight.ndim == 1:  # a bias has no columns
        shares = [(i, dataclasses.replace(s, axis=0)) for i, s in shares]
    groups: list[list[Share]] = []
    for i, s in shares:
        group = next((g for g in groups if g[0][1].same(s)), None)
        if group is None:
            groups.append(group := [])
        group.append((i, s))
    numbers = torch.cat([g[0][1].index.flatten() for g in groups])
    disjoint = numbers.unique().numel() == numbers.numel()
    if not disjoint or any(g[0][1].grid is None for g in groups):
        return [HeadView(weight=weight, shares=tuple(shares), whole=True)]
    return [HeadView(weight=weight, shares=tuple(g), whole=False) for g in groups]


def views_by_tensor(
    tensors: Sequence[Tensor | None], slices: Sequence[HeadSlice]
) -> list[tuple[Tensor, list[int], list[HeadView]]]:
    """Each tensor once, with its entries and the views of their rows; None has none."""
    found: dict[int, tuple[Tensor, list[int]]] = {}
    for i, tensor in enumerate(tensors):
        if tensor is not None:
            found.setdefault(id(tensor), (tensor, []))[1].append(i)
    return [
        (tensor, entries, head_views(tensor, [(i, slices[i]) for i in entries])) for tensor, entries in found.values()
    ]


def factor_per_row(shares: Sequence[tuple[HeadSlice, Tensor]], weight: Tensor) -> Tensor:
    """Factors per head of every slice of one weight (or bias), as one tensor that broadcasts against it. Rows that no
    head owns get 1. Rows that several slices own (a weight that layers share) get the smallest."""
    axis = shares[0][0].axis if weight.ndim > 1 else 0
    rows = weight.shape[axis]
    if len(shares) == 1:
        lines = shares[0][0].lines(shares[0][1], rows)
    else:
        lines = torch.stack([s.lines(factor, rows, nobody=torch.inf) for s, factor in shares]).amin(0)
        lines = torch.where(lines.isinf(), 1.0, lines)
    return across(lines, axis) if weight.ndim > 1 else lines
