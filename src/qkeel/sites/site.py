"""AttentionSite: one attention in a model, its geometry, and which slice of which weight makes head h."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from qkeel.errors import InvalidValueError
from qkeel.spec import AttentionSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadSlice:
    """Which part of a weight belongs to each head.

    `parameter` is the qualified name in the model; `axis` 0 for rows (nn.Linear), 1 for columns (Conv1D);
    `index` [n r] are the row or column numbers of each head, n = query heads, key heads, or 1 where all heads
    share the whole matrix. `bias` is the name of the bias, if there is one.
    """

    parameter: str
    axis: int
    index: Tensor
    bias: str | None = None
    contiguous: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        flat = self.index.reshape(-1)
        # Known once, so that no step looks at the index again: do the heads lie one after the other from row 0?
        object.__setattr__(self, "contiguous", bool((flat == torch.arange(flat.numel())).all()))

    @property
    def n(self) -> int:
        """How many heads have a part of their own."""
        return self.index.shape[0]

    def heads(self, weight: Tensor) -> Tensor:
        """The weight as [n r m]: a view where the heads lie one after the other, else a copy."""
        rows = weight if self.axis == 0 else weight.mT
        n, r = self.index.shape
        if self.contiguous and rows.shape[0] == n * r:
            return rows.view(n, r, -1) if rows.is_contiguous() else rows.unflatten(0, (n, r))
        return rows[self.index]

    def expand(self, per_head: Tensor, weight: Tensor) -> Tensor:
        """A value per head [n] as a tensor that broadcasts against the weight (1 where no head owns the row)."""
        rows = weight.shape[self.axis]
        n, r = self.index.shape
        if self.contiguous and rows == n * r:
            lines = per_head.repeat_interleave(r) if n > 1 else per_head.expand(rows)
        else:
            lines = per_head.new_ones(rows).index_copy(
                0, self.index.reshape(-1).to(per_head.device), per_head.repeat_interleave(r)
            )
        return lines[:, None] if self.axis == 0 else lines[None, :]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitTerm:
    """One product the logit is a sum of: the matrices on the query's way and on the key's way, input first.

    Plain attention has one term, (W_q) and (W_k). MLA has two: (W_dq, W_uq)·(W_dkv, W_uk) and the rotated
    (W_dq, W_qr)·(W_kr). A norm cuts the way: what lies before it does not scale the logit and is left out.
    """

    query: tuple[HeadSlice, ...]
    key: tuple[HeadSlice, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSite:
    """One attention of a model."""

    name: str
    module: nn.Module
    spec: AttentionSpec
    n_heads: int
    n_kv_heads: int
    head_dim: int
    terms: tuple[LogitTerm, ...]

    @property
    def query(self) -> list[HeadSlice]:
        """Every weight on the query's way, each once."""
        return _unique(s for term in self.terms for s in term.query)

    @property
    def key(self) -> list[HeadSlice]:
        """Every weight on the key's way, each once."""
        return _unique(s for term in self.terms for s in term.key)


def _unique(slices: object) -> list[HeadSlice]:
    return list({s.parameter: s for s in slices}.values())  # type: ignore[attr-defined]


def rows(parameter: str, n: int, size: int, bias: str | None = None) -> HeadSlice:
    """n heads of `size` rows each, one after the other, as in nn.Linear."""
    if n < 1 or size < 1:
        raise InvalidValueError(f"expected at least one head and row, got {n} heads of {size} rows")
    return HeadSlice(parameter=parameter, axis=0, index=torch.arange(n * size).view(n, size), bias=bias)
