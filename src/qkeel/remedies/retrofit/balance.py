"""Balances queries against keys: an exact reparametrisation of the old model that reduces the cost of a norm."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.remedies.retrofit.fit_gains import copies, descend, put_back
from qkeel.remedies.retrofit.outputs import Reference, predictions
from qkeel.sites.site import AttentionSite, HeadSlice, across

# A norm divides each q and k by its length, which the old model may have used. How much the length varies from token to
# token depends on the relative scale of a head's dimensions, which can be chosen freely: with q_i · e^{t_i} and
# k_i · e^{-t_i} every product q·k is unchanged, for any t per dimension, and under RoPE for any t per rotated pair. So
# t and the gains are fitted together to the KL of the output, and e^{±t} is then multiplied into the rows of the q and
# k projections. There is one t per dimension (or pair) and key head, shared by the query heads of a group.

# Relative to the largest output: above float32 rounding, but far below the effect of a
# wrong pairing.
_SAME = 1e-4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ScaledRows:
    """Rows of a weight or bias that are multiplied by e^{sign · t}, where t belongs to site number `site`."""

    site: int
    heads: HeadSlice
    sign: float


@final
class Balance:
    """The numbers t of all sites, and the weights that they scale.

    `put()` writes the scaled weights, and `restore()` restores the old ones."""

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        self.sites = [site for site in sites if _plain(model, site)]
        self._rows: dict[int, tuple[Tensor, list[_ScaledRows]]] = {}
        for i, site in enumerate(self.sites):
            for heads, sign in ((site.query[0], 1.0), (site.key[-1], -1.0)):
                for rows in filter(None, (heads, heads.bias_of())):
                    p = model.get_parameter(rows.parameter)
                    self._rows.setdefault(id(p), (p, []))[1].append(
                        _ScaledRows(site=i, heads=rows, sign=sign)
                    )
        self.weights = [p for p, _ in self._rows.values()]
        self._old = copies(self.weights)
        self._pairs: list[Tensor] = []
        self.numbers: list[nn.Parameter] = []

    @classmethod
    def of(cls, reference: Reference, sites: Sequence[AttentionSite]) -> Balance | None:
        """Returns the balance of a model before its norm is added, or None if no pairing preserves its output."""
        balance = cls(reference.model, sites)
        for pairs in _PAIRINGS.values():
            if balance.sites and balance._leaves(reference, pairs):
                return balance
        return None

    @torch.no_grad()
    def _leaves(self, reference: Reference, pairs: Callable[[int], Tensor]) -> bool:
        """True if random values of t, shared according to this pairing, preserve the first batch's output."""
        self._begin(pairs)
        generator = torch.Generator().manual_seed(0)
        for t in self.numbers:
            # An experiment in place of reading the model's rotation: a wrong pairing shows at once.
            t.copy_(torch.rand(t.shape, generator=generator) - 0.5)
        self.put()
        new = predictions(reference.model, reference.batches[0])
        self.restore()
        for t in self.numbers:
            t.zero_()
        old = reference.old[0]
        return bool((new - old).abs().max() <= _SAME * old.abs().max())

    def _begin(self, pairs: Callable[[int], Tensor]) -> None:
        self._pairs = [pairs(site.head_dim) for site in self.sites]
        weight = self.weights[0]
        self.numbers = [
            nn.Parameter(
                torch.zeros(site.n_kv_heads, int(p.max()) + 1, device=weight.device)
            )
            for site, p in zip(self.sites, self._pairs)
        ]

    def scaled(self) -> list[Tensor]:
        """Returns the scaled weights as a function of the numbers t."""
        return [
            old * self._factor(p, rows)
            for old, (p, rows) in zip(self._old, self._rows.values())
        ]

    def _factor(self, p: Tensor, rows: Sequence[_ScaledRows]) -> Tensor:
        axis = rows[0].heads.axis if p.ndim > 1 else 0
        n = len(rows[0].heads.rows_of(p))
        lines = torch.ones(n, device=p.device, dtype=torch.float32)
        for scaled_rows in rows:
            heads, i = scaled_rows.heads, scaled_rows.site
            t = self.numbers[i][:, self._pairs[i]]
            # The query heads of a group share the numbers of its key head.
            if len(t) != heads.n:
                t = self.sites[i].per_query_head(t)
            index = heads.index.to(p.device).flatten()
            lines = lines.index_put((index,), (scaled_rows.sign * t).exp().flatten())
        return across(lines, axis, p).to(p.dtype)

    @torch.no_grad()
    def put(self) -> None:
        """Writes the scaled weights into the model."""
        put_back(self.weights, self.scaled())

    def restore(self) -> None:
        """Restores the old weights bit for bit."""
        put_back(self.weights, self._old)

    def descend(
        self,
        gains: Sequence[nn.Parameter],
        loss_of: Callable[[], Tensor],
        iterations: int,
    ) -> None:
        """Minimises a loss by L-BFGS over the numbers t and the gains jointly."""

        def gradients() -> tuple[Tensor, Sequence[Tensor]]:
            self.put()
            new, loss = self.scaled(), loss_of()
            grads = torch.autograd.grad(loss, [*self.weights, *gains])
            numbers = torch.autograd.grad(new, self.numbers, grads[: len(new)])
            return loss, (*numbers, *grads[len(new) :])

        descend([*self.numbers, *gains], gradients, iterations)
        self.put()


# Which dimensions of a head share a number t: without a rotation none do, otherwise the two dimensions of a pair.
_PAIRINGS: dict[str, Callable[[int], Tensor]] = {
    "none": torch.arange,
    "halves": lambda d: torch.arange(d) % max(d // 2, 1),
    "neighbours": lambda d: torch.arange(d) // 2,
}


def _plain(model: nn.Module, site: AttentionSite) -> bool:
    """True if one weight produces all of q, one weight produces all of k, and nothing else uses these weights."""
    if (len(site.terms), len(site.query), len(site.key)) != (1, 1, 1):
        return False
    query, key = site.query[0], site.key[0]
    if site.reparametrised or (query.n, key.n) != (site.n_heads, site.n_kv_heads):
        return False
    if {query.index.shape[1], key.index.shape[1]} != {site.head_dim}:
        return False
    # Scaling a shared weight would change what else is computed with it.
    used = collections.Counter(
        id(p) for _, p in model.named_parameters(remove_duplicate=False)
    )
    return all(used[id(model.get_parameter(s.parameter))] == 1 for s in (query, key))
