"""The rows of a weight that belong to heads, each touched once, however many slices name them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from qkeel.sites.site import HeadSlice, across

Share = tuple[int, HeadSlice]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Rows of a weight or bias as a view [n r m], with one factor for each of the n.

    `shares` are the numbers of the entries it stands for, with their slices. The n are the heads of its one slice, or,
    in a `whole` piece, the lines of the whole tensor: its slices overlap without being the same, or have no view.
    """

    weight: Tensor
    shares: tuple[Share, ...]
    whole: bool

    def view(self, like: Tensor | None = None) -> Tensor:
        """The rows, as a view; of another tensor of the weight's shape if there is one."""
        weight, own = (self.weight if like is None else like).detach(), self.shares[0][1]
        return own.rows_of(weight)[:, None] if self.whole else own.heads(weight)

    def makers(self, firsts: Sequence[int], nobody: int) -> Tensor:
        """[n most] places of the heads that own a part, `nobody` where there are none.

        In a row of numbers per head, entry after entry; `firsts` are the places of their first heads.
        """
        own = [(s, torch.arange(s.n) + firsts[i]) for i, s in self.shares]
        if not self.whole:
            return torch.stack([heads for _, heads in own], 1)
        lines = self.shares[0][1].rows_of(self.weight).shape[0]
        found = torch.stack([s.lines(heads, lines, nobody=nobody) for s, heads in own], 1)
        # A line with an owner takes that one's place for the missing ones, so that what nobody gets does not count.
        return torch.where(found == nobody, found.amin(1, keepdim=True), found)


def stacked(tables: Sequence[Tensor]) -> Tensor:
    """Tables of places one below the other; the first of a row is repeated where others are longer."""
    most = max(t.shape[1] for t in tables)
    return torch.cat([torch.cat([t, t[:, :1].expand(-1, most - t.shape[1])], 1) for t in tables])


def pieces(weight: Tensor, shares: Sequence[Share]) -> list[Piece]:
    """The fewest pieces that touch every row of the slices once, and no others where that can be done by views."""
    if weight.ndim == 1:  # a bias has no columns
        shares = [(i, dataclasses.replace(s, axis=0)) for i, s in shares]
    alike: list[list[Share]] = []
    for i, s in shares:
        group = next((g for g in alike if g[0][1].same(s)), None)
        if group is None:
            alike.append(group := [])
        group.append((i, s))
    numbers = torch.cat([g[0][1].index.flatten() for g in alike])
    apart = numbers.unique().numel() == numbers.numel() and all(g[0][1].grid is not None for g in alike)
    if not apart:
        return [Piece(weight=weight, shares=tuple(shares), whole=True)]
    return [Piece(weight=weight, shares=tuple(g), whole=False) for g in alike]


def owned(tensors: Sequence[Tensor | None], slices: Sequence[HeadSlice]) -> list[tuple[Tensor, list[int], list[Piece]]]:
    """Each tensor once, with its entries and the pieces that these make of it; None has none."""
    found: dict[int, tuple[Tensor, list[int]]] = {}
    for i, tensor in enumerate(tensors):
        if tensor is not None:
            found.setdefault(id(tensor), (tensor, []))[1].append(i)
    return [(tensor, entries, pieces(tensor, [(i, slices[i]) for i in entries])) for tensor, entries in found.values()]


def merge_lines(shares: Sequence[tuple[HeadSlice, Tensor]], weight: Tensor) -> Tensor:
    """Factors per head of every slice of one weight (or bias), as one tensor that broadcasts against it.

    Rows that no head owns get 1. Rows that several slices own (a weight that layers share) get the smallest.
    """
    axis = shares[0][0].axis if weight.ndim > 1 else 0
    rows = weight.shape[axis]
    if len(shares) == 1:
        lines = shares[0][0].lines(shares[0][1], rows)
    else:
        lines = torch.stack([s.lines(factor, rows, nobody=torch.inf) for s, factor in shares]).amin(0)
        lines = torch.where(lines.isinf(), 1.0, lines)
    return across(lines, axis) if weight.ndim > 1 else lines
