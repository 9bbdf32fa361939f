"""Weights with the rows of some heads exchanged or at zero: copies, the model keeps its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from qkeel.sites.site import HeadSlice
from qkeel.sites.verify.recorded_operators import Place, place

# The rows of one weight, and of which of their heads; None for all.
Chosen = tuple[HeadSlice, Sequence[int] | None]


class ChangedWeights:
    """Copies of the weights of a site with the rows of some heads changed.

    Heads whose rows are all zero, as in an adapter before its first step, get small random ones first: what zero is
    multiplied by changes no logit. So do those whose product with the weight before them is zero, as where an adapter
    starts from two orthogonal matrices: `chains` are the weights of each path, input first.
    """

    def __init__(
        self, model: nn.Module, slices: Sequence[HeadSlice], chains: Iterable[Sequence[HeadSlice]] = ()
    ) -> None:
        names = dict.fromkeys(name for s in slices for name in (s.parameter, s.bias) if name is not None)
        self.parameters = {name: model.get_parameter(name) for name in names}
        self._base = {name: p.detach() for name, p in self.parameters.items()}
        self._slices = slices
        for s in slices:
            self._fill(s, ~s.rows_of(self._base[s.parameter])[s.index.to(self._device(s))].ne(0).flatten(1).any(1))
        for chain in chains:
            for inner, outer in itertools.pairwise(chain):
                if (empty := self._vanishing(inner, outer)) is not None:
                    self._fill(outer, empty)
        self._copies: dict[str, Tensor] = {}
        self._changed: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, which of them, what they were

    def base(self) -> dict[Place, Tensor]:
        """The weights without heads of zeros, with which all others are compared."""
        return {place(self.parameters[name]): value for name, value in self._base.items()}

    def rotated(self, chosen: Iterable[Chosen]) -> dict[Place, Tensor]:
        """Each row of the chosen heads is in the place of the next of its head; one row alone has the other sign.

        A norm over the head, or over all heads together, is what it was: no other head changes by it. Rows that make
        queries and keys alike are stretched instead, since no rotation of both changes their product. What is returned
        holds until the next change.
        """
        return self._with(
            (rows, index, self._other(s, rows[index])) for s, heads in chosen for rows, index in self._rows(s, heads)
        )

    def _other(self, s: HeadSlice, rows: Tensor) -> Tensor:
        """Other numbers in the place of rows [heads r …]."""
        if sum(s.parameter == other.parameter and s.same(other) for other in self._slices) > 1:
            factors = 0.5 + torch.arange(rows.shape[1], dtype=rows.dtype, device=rows.device) % 2
            return rows * factors.view(-1, *[1] * (rows.ndim - 2))
        return rows.roll(1, dims=1) if rows.shape[1] > 1 else -rows

    def zeroed(self, slices: Iterable[HeadSlice]) -> dict[Place, Tensor]:
        """All these rows and their biases are zero, until the next change."""
        return self._with(
            (rows, index, torch.zeros((), dtype=rows.dtype, device=rows.device))
            for s in slices
            for rows, index in self._rows(s, None)
        )

    def _with(self, changes: Iterable[tuple[Tensor, Tensor, Tensor]]) -> dict[Place, Tensor]:
        """The weights with these numbers in these rows, copied once and put back before the next change."""
        for rows, index, before in reversed(self._changed):
            rows[index] = before
        self._changed.clear()
        for rows, index, numbers in changes:
            self._changed.append((rows, index, rows[index]))
            rows[index] = numbers
        return {place(p): self._copies.get(name, self._base[name]) for name, p in self.parameters.items()}

    def _rows(self, s: HeadSlice, heads: Sequence[int] | None) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows [rows …] of a copied weight and of its bias, and which of them belong to the heads [heads r]."""
        for part in filter(None, (s, s.bias_of())):
            if part.parameter not in self._copies:
                self._copies[part.parameter] = self._base[part.parameter].clone()
            copy = self._copies[part.parameter]
            index = part.index if heads is None else part.index[list(heads)]
            yield (s.rows_of(copy) if part is s else copy.view(-1, 1)), index.to(copy.device)

    def _device(self, s: HeadSlice) -> torch.device:
        return self._base[s.parameter].device

    def _vanishing(self, inner: HeadSlice, outer: HeadSlice) -> Tensor | None:
        """Of which heads the product of two weights is zero up to rounding; None where these do not follow on rows."""
        first, second = (s.rows_of(self._base[s.parameter]) for s in (inner, outer))
        if first is second or inner.n != 1 or inner.index.shape[1] != second.shape[1] or first.device != second.device:
            return None
        before, after = first[inner.index[0].to(first.device)], second[outer.index.to(second.device)]
        size = after.flatten(1).norm(dim=1) * before.norm()
        return (after @ before).flatten(1).norm(dim=1) <= 8 * torch.finfo(after.dtype).eps * size

    def _fill(self, s: HeadSlice, empty: Tensor) -> None:
        rows = s.rows_of(self._base[s.parameter])
        index = s.index.to(rows.device)
        if not bool(empty.any()):
            return
        generator = torch.Generator().manual_seed(0)
        index = index[empty]
        noise = torch.randn(*index.shape, rows.shape[1], generator=generator) * rows.shape[1] ** -0.5
        self._base[s.parameter] = self._base[s.parameter].clone()
        s.rows_of(self._base[s.parameter])[index] = noise.to(rows)
