"""Numbers of the weights behind the heads of one site, from the part of them that this process holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from qkeel.dist.shards import local, shard
from qkeel.functional.bounds import interaction_norm
from qkeel.functional.norms import wide, widest
from qkeel.heads.site import AttentionSite, HeadSlice
from qkeel.monitor.measure.weight_products import Chain, gram, own_rows
from qkeel.monitor.processes.share import Share

NORMS = {"query": "query_weight_norm", "key": "key_weight_norm"}


@final
class SplitWeights:
    """Squares of norms add up over the processes; a singular value is known to one that has all rows of a head.

    Nothing is gathered. The numbers are those of WeightNorms, [h] per query head of the whole model.
    """

    def __init__(
        self,
        site: AttentionSite,
        parameters: Mapping[str, Tensor],
        counted: Callable[[Tensor], bool],
        eps: float | None,
        multiplies: bool,
    ) -> None:
        """Takes whether this process's part of a parameter counts, the optimizer's eps, if it has one, and whether the
        weights are matrices that multiply one another."""
        self.site, self._parameters, self._eps, self._multiplies = site, parameters, eps, multiplies
        self._parts = {s.parameter: shard(s.parameter, parameters[s.parameter]) for s in (*site.query, *site.key)}
        sides = {"query": [t.query for t in site.terms], "key": [t.key for t in site.terms]}
        self._rows = {side: [self._local(s, counted) for s in own_rows(chains)] for side, chains in sides.items()}
        self._whole = self._whole_heads(sides["query"] + sides["key"])

    def shares(self) -> dict[str, Share]:
        """All numbers of the site as they are now."""
        found: dict[str, Share] = {}
        grads = {}
        for side, rows in self._rows.items():
            found[NORMS[side]] = self._norm(rows, [self._parameters[s.parameter] for s, _, _ in rows])
            of = [self._parameters[s.parameter].grad for s, _, _ in rows]
            if all(grad is not None for grad in of):
                grads[f"{side}_grad_rms"] = self._norm(rows, of, root_mean=True)  # type: ignore[arg-type]
        found |= grads
        if self._eps and len(grads) == 2:
            eps = torch.full((1,), self._eps, dtype=self._dtype, device=self._device)
            found["eps"] = Share(value=eps, weight=torch.ones_like(eps), of="weights")
        if self._multiplies:
            found["qk_spectral_norm"] = self._spectral()
        return found

    @property
    def _dtype(self) -> torch.dtype:
        """The widest that the device has."""
        return widest(self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def _local(self, s: HeadSlice, counted: Callable[[Tensor], bool]) -> tuple[HeadSlice, Tensor, Tensor]:
        """A weight, the head of each row that is here, and how many numbers of each query head are."""
        p = self._parameters[s.parameter]
        here = s.rows_of(local(p))
        part = self._parts[s.parameter]
        first = 0 if part is None else part.spans[s.axis if p.ndim > 1 else 0][0]
        at = s.index - first
        heads = torch.full((len(here),), s.n)
        inside = (at >= 0) & (at < len(here))
        if counted(p):
            heads[at[inside]] = torch.arange(s.n)[:, None].expand_as(at)[inside]
        count = torch.zeros(s.n + 1).index_add_(0, heads, torch.ones(len(here)))[: s.n] * here.shape[1]
        return s, heads.to(p.device), self.site.per_query_head(count).to(p.device)

    def _norm(
        self, rows: Sequence[tuple[HeadSlice, Tensor, Tensor]], of: Sequence[Tensor], *, root_mean: bool = False
    ) -> Share:
        squares, counts = [], []
        for (s, heads, count), x in zip(rows, of, strict=True):
            here = s.rows_of(local(x))
            norms = torch.linalg.vector_norm(here.to(wide(here.dtype)), dim=1)
            total = torch.zeros(s.n + 1, dtype=self._dtype, device=norms.device)  # in which the squares are finite
            total = total.index_add_(0, heads, norms.to(self._dtype).square())[: s.n]
            squares.append(self.site.per_query_head(total))
            counts.append(count)
        square, count = torch.stack(squares).sum(0), torch.stack(counts).sum(0)
        if root_mean:
            value = (square / count.clamp_min(1)).sqrt()
            return Share(value=value, weight=count, how="root_mean", of="weights")
        return Share(value=square.sqrt(), weight=count, how="root", of="weights")

    def _whole_heads(self, chains: Sequence[Chain]) -> Tensor:
        """The query heads of which all weights on both ways are here."""
        whole = torch.ones(self.site.n_heads, dtype=torch.bool)
        for s in (s for chain in chains for s in chain):
            part = self._parts[s.parameter]
            if part is not None:
                p = self._parameters[s.parameter]
                axis = s.axis if p.ndim > 1 else 0
                first, last = part.spans[axis]
                here = ((s.index >= first) & (s.index < last)).all(1)
                others = all(part.spans[i] == (0, n) for i, n in enumerate(p.shape) if i != axis)
                whole &= here[self.site.used(s.n)] & others
        return whole.nonzero().flatten()

    def _spectral(self) -> Share:
        value = torch.zeros(self.site.n_heads, dtype=self._dtype, device=self._device)
        weight = torch.zeros_like(value)
        if len(self._whole):
            at = self._whole.to(self._device)
            a, b = (gram([getattr(t, side) for t in self.site.terms], self._heads) for side in ("query", "key"))
            n = len(at)
            norms = interaction_norm(a.expand(n, -1, -1), b.expand(n, -1, -1))
            value[at], weight[at] = norms.to(value.dtype), 1.0
        return Share(value=value, weight=weight, of="weights")

    def _heads(self, s: HeadSlice) -> Tensor:
        """The rows [n r m] of the query heads that are here whole."""
        p, part = self._parameters[s.parameter], self._parts[s.parameter]
        first = 0 if part is None else part.spans[s.axis if p.ndim > 1 else 0][0]
        here = s.rows_of(local(p)).detach()
        at = s.index[self.site.used(s.n)[self._whole]] - first
        return here[at.to(here.device)].to(wide(here.dtype))
