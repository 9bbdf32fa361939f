"""Queries against keys: an exact change of the old model's weights after which a norm takes less away.

A norm divides each q and k by its own size, which the old model may have used. How much size varies from token to token
depends on how a head's numbers are scaled against each other, and that is free: with q_i · e^{t_i} and k_i · e^{-t_i}
every product q·k is what it was, for any t per dimension; under RoPE for any t per rotated pair. So t is fitted
along with the gains to the KL of the output, and goes into the rows of the q and k projections. One t per number
(or pair) and key head; the query heads of a group share it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from qkeel.heads.site import AttentionSite, HeadSlice, across
from qkeel.remedies.retrofit.fit_gains import descend_along, put_back
from qkeel.remedies.retrofit.predictions import Reference, predictions

_SAME = 1e-4  # of the largest output: above float32's rounding, far below what a wrong pairing does


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Rows of a weight or bias that site number `site` scales by e^{sign · t}."""

    site: int
    heads: HeadSlice
    sign: float


@final
class Balance:
    """The numbers t of all sites, and the weights they go into; `put()` writes those, `restore()` puts the old back."""

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        self.sites = [site for site in sites if _plain(model, site)]
        self._rows: dict[int, tuple[Tensor, list[_Rows]]] = {}
        for i, site in enumerate(self.sites):
            for heads, sign in ((site.query[0], 1.0), (site.key[-1], -1.0)):
                for part in filter(None, (heads, heads.bias_of())):
                    p = model.get_parameter(part.parameter)
                    self._rows.setdefault(id(p), (p, []))[1].append(_Rows(site=i, heads=part, sign=sign))
        self.weights = [p for p, _ in self._rows.values()]
        self._old = [p.detach().clone() for p in self.weights]
        self._pairs: list[Tensor] = []
        self.numbers: list[nn.Parameter] = []

    @classmethod
    def of(cls, reference: Reference, sites: Sequence[AttentionSite]) -> Balance | None:
        """The balance of a model without its norm, or None where no scaling leaves it as it is (but for rounding)."""
        balance = cls(reference.model, sites)
        for pairs in _PAIRINGS.values():
            if balance.sites and balance._leaves(reference, pairs):
                return balance
        return None

    @torch.no_grad()
    def _leaves(self, reference: Reference, pairs: Callable[[int], Tensor]) -> bool:
        """True if numbers at random, tied in this way, leave the first batch's output."""
        self._begin(pairs)
        generator = torch.Generator().manual_seed(0)
        for t in self.numbers:
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
        like = self.weights[0]
        self.numbers = [
            nn.Parameter(torch.zeros(site.n_kv_heads, int(p.max()) + 1, device=like.device))
            for site, p in zip(self.sites, self._pairs)
        ]

    def scaled(self) -> list[Tensor]:
        """The weights as they are to be, a function of the numbers."""
        return [old * self._factor(p, rows) for old, (p, rows) in zip(self._old, self._rows.values())]

    def _factor(self, p: Tensor, rows: Sequence[_Rows]) -> Tensor:
        axis = rows[0].heads.axis if p.ndim > 1 else 0
        lines = torch.ones(len(rows[0].heads.rows_of(p)), device=p.device, dtype=torch.float32)
        for one in rows:
            t = self.numbers[one.site][:, self._pairs[one.site]]
            t = t if len(t) == one.heads.n else self.sites[one.site].per_query_head(t)
            lines = lines.index_put((one.heads.index.to(p.device).flatten(),), (one.sign * t).exp().flatten())
        return across(lines, axis, p).to(p.dtype)

    @torch.no_grad()
    def put(self) -> None:
        """Write the scaled weights."""
        put_back(self.weights, self.scaled())

    def restore(self) -> None:
        """The old weights, bit for bit."""
        put_back(self.weights, self._old)

    def descend(self, gains: Sequence[nn.Parameter], loss_of: Callable[[], Tensor], iterations: int) -> None:
        """L-BFGS on a loss by the numbers and the gains at once."""

        def gradients() -> tuple[Tensor, Sequence[Tensor]]:
            self.put()
            new, loss = self.scaled(), loss_of()
            grads = torch.autograd.grad(loss, [*self.weights, *gains])
            numbers = torch.autograd.grad(new, self.numbers, grads[: len(new)])
            return loss, (*numbers, *grads[len(new) :])

        descend_along([*self.numbers, *gains], gradients, iterations)
        self.put()


# Which dimensions of a head are scaled by the same number: each on its own without a rotation, else the two of a pair.
_PAIRINGS: dict[str, Callable[[int], Tensor]] = {
    "none": torch.arange,
    "halves": lambda d: torch.arange(d) % max(d // 2, 1),
    "neighbours": lambda d: torch.arange(d) // 2,
}


def _plain(model: nn.Module, site: AttentionSite) -> bool:
    """True if rows of one weight make q, rows of one make k, and nothing else is made of them."""
    if len(site.terms) != 1 or len(site.query) != 1 or len(site.key) != 1 or site.reparametrised:
        return False
    query, key = site.query[0], site.key[0]
    if (query.n, key.n) != (site.n_heads, site.n_kv_heads):
        return False
    if query.index.shape[1] != site.head_dim or key.index.shape[1] != site.head_dim:
        return False
    used = collections.Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return all(used[id(model.get_parameter(s.parameter))] == 1 for s in (query, key))
