"""Weights with the rows of some heads exchanged or at zero: copies, the model keeps its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from qkeel.sites.site import HeadSlice
from qkeel.sites.verify.recorded_operators import Place, place

# The rows of one weight, and of which of their heads; None for all.
Chosen = tuple[HeadSlice, Sequence[int] | None]


class ChangedWeights:
    """Copies of the weights of a site with the rows of some heads changed.

    Heads whose rows are all zero, as in an adapter before its first step, get small random ones first: what zero is
    multiplied by changes no logit.
    """

    def __init__(self, model: nn.Module, slices: Sequence[HeadSlice]) -> None:
        names = dict.fromkeys(name for s in slices for name in (s.parameter, s.bias) if name is not None)
        self.parameters = {name: model.get_parameter(name) for name in names}
        self._base = {name: p.detach() for name, p in self.parameters.items()}
        for s in slices:
            self._fill(s)

    def same(self) -> dict[Place, Tensor]:
        """Copies of the weights as they are."""
        return {place(p): p.detach().clone() for p in self.parameters.values()}

    def base(self) -> dict[Place, Tensor]:
        """The weights without heads of zeros, with which all others are compared."""
        return {place(self.parameters[name]): value for name, value in self._base.items()}

    def rotated(self, chosen: Iterable[Chosen]) -> dict[Place, Tensor]:
        """Each row of the chosen heads is in the place of the next of its head; one row alone has the other sign.

        A norm over the head, or over all heads together, is what it was: no other head changes by it.
        """
        new = self._copies(chosen := list(chosen))
        for (s, heads), name, rows in self._parts(chosen, new):
            index = _chosen_rows(s, heads).to(rows.device)
            before = s.rows_of(self._base[name]) if name == s.parameter else self._base[name].reshape(-1, 1)
            rows[index] = before[index.roll(1, dims=1)] if index.shape[1] > 1 else -before[index]
        return self._placed(new)

    def zeroed(self, slices: Iterable[HeadSlice]) -> dict[Place, Tensor]:
        """All these rows and their biases are zero."""
        chosen: list[Chosen] = [(s, None) for s in slices]
        new = self._copies(chosen)
        for (s, _), _, rows in self._parts(chosen, new):
            rows[s.index.flatten().to(rows.device)] = 0
        return self._placed(new)

    def _copies(self, chosen: Iterable[Chosen]) -> dict[str, Tensor]:
        names = {name for s, _ in chosen for name in (s.parameter, s.bias) if name is not None}
        return {name: value.clone() if name in names else value for name, value in self._base.items()}

    def _parts(self, chosen: Iterable[Chosen], new: dict[str, Tensor]) -> Iterable[tuple[Chosen, str, Tensor]]:
        """The rows [rows …] of each chosen weight, and those of its bias."""
        for s, heads in chosen:
            yield (s, heads), s.parameter, s.rows_of(new[s.parameter])
            if s.bias is not None:
                yield (s, heads), s.bias, new[s.bias].view(-1, 1)

    def _placed(self, new: dict[str, Tensor]) -> dict[Place, Tensor]:
        return {place(self.parameters[name]): value for name, value in new.items()}

    def _fill(self, s: HeadSlice) -> None:
        rows = s.rows_of(self._base[s.parameter])
        index = s.index.to(rows.device)
        empty = ~rows[index].ne(0).flatten(1).any(1)
        if not bool(empty.any()):
            return
        generator = torch.Generator().manual_seed(0)
        index = index[empty]
        noise = torch.randn(*index.shape, rows.shape[1], generator=generator) * rows.shape[1] ** -0.5
        self._base[s.parameter] = self._base[s.parameter].clone()
        s.rows_of(self._base[s.parameter])[index] = noise.to(rows)


def _chosen_rows(s: HeadSlice, heads: Sequence[int] | None) -> Tensor:
    return s.index if heads is None else s.index[list(heads)]
