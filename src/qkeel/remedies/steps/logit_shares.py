"""The power of γ that each weight takes so that every product of a logit is multiplied by γ and by nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from qkeel.heads.site import AttentionSite, HeadSlice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitShare:
    """A weight that takes γ or, with `root`, √γ: for each of its n heads the smallest of the query heads `heads`."""

    weight: HeadSlice
    heads: Int64[Tensor, "n r"]
    root: bool


def logit_shares(site: AttentionSite, *, by_group: bool) -> list[LogitShare] | None:
    """The shares of the last weights of every term of a site; None if no powers of γ suit all its products.

    The powers of the two sides of a product add up to 1. A weight that query heads share takes none, so that what it
    is multiplied by takes γ, and everything that this is multiplied by none; what is not bound so takes √γ. With
    `by_group` a weight that a group of query heads shares is not left alone: it and its partner take √γ of the worst.
    """
    weights: list[HeadSlice] = []
    terms = [(_place(weights, t.query[-1]), _place(weights, t.key[-1])) for t in site.terms]
    h = site.n_heads
    alone = {i for i, s in enumerate(weights) if s.n < h and (not by_group or s.n == 1 < site.n_kv_heads)}
    for a, b in terms:
        if {a, b} <= alone:
            alone -= {a, b}
    powers = _powers(terms, alone)
    if powers is None:
        return None
    found = []
    for part in _connected(terms, len(weights)):
        n = min(weights[i].n for i in part)
        for i in part:
            s, power = weights[i], powers.get(i, 0.5)
            if power == 1.0 and s.n != h:
                return None
            if power == 1.0:
                found.append(LogitShare(weight=s, heads=torch.arange(h)[:, None], root=False))
            elif power == 0.5:
                if s.n not in (n, h):
                    return None
                heads = site.users(n) if s.n == n else site.users(n)[site.used(n)]
                found.append(LogitShare(weight=s, heads=heads, root=True))
    return found


def _place(weights: list[HeadSlice], s: HeadSlice) -> int:
    """The number of a weight's rows among those that are known; new ones are added."""
    for i, other in enumerate(weights):
        if other.parameter == s.parameter and other.same(s):
            return i
    weights.append(s)
    return len(weights) - 1


def _powers(terms: Sequence[tuple[int, int]], alone: set[int]) -> dict[int, float] | None:
    """The powers that follow from those weights taking none; None if they contradict each other."""
    powers = dict.fromkeys(alone, 0.0)
    both = [*terms, *((b, a) for a, b in terms)]
    for _ in terms:  # each round reaches one product further
        for a, b in both:
            if a in powers and powers.setdefault(b, 1.0 - powers[a]) != 1.0 - powers[a]:
                return None
    return powers


def _connected(terms: Sequence[tuple[int, int]], n: int) -> list[list[int]]:
    """The weights in parts: those that products tie to each other."""
    part = list(range(n))
    for a, b in terms:
        old, new = part[a], part[b]
        part = [new if p == old else p for p in part]
    return [[i for i in range(n) if part[i] == p] for p in dict.fromkeys(part)]
