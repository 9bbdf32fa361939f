"""Which weights take a head's γ, and to which power, so that its logit, and nothing else, is multiplied by γ."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from qkeel.errors import RefusedError
from qkeel.remedies.base import Target, where
from qkeel.sites.site import AttentionSite, HeadSlice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogitFactor:
    """A weight that is scaled by γ or, with `root`, by √γ.

    The γ of each of the weight's n heads is the smallest γ of the query heads `heads`."""

    weight: HeadSlice
    heads: Int64[Tensor, "n r"]
    root: bool


def factors_by_site(target: Target, *, by_group: bool) -> list[list[LogitFactor]]:
    """Returns the weights of each site that take its γ, such that no other logit and no value changes.

    A weight that other layers use too, or that also makes values, is left alone, and its partner takes all of γ. Layers
    whose weights are the same on both sides are one layer that runs several times: a head of theirs has one γ, by its
    largest logit in all of them.

    Raises:
        RefusedError: other layers use the weights on both sides of a product, so no factor on them is exact.
    """
    factors: list[list[LogitFactor]] = []
    # By parameter: what is computed with it, for a layer's logits or, without a layer, for values.
    uses: dict[nn.Parameter, list[tuple[AttentionSite | None, HeadSlice]]] = {}
    for user in target.all_sites or target.sites:
        users = [(None, s) for s in user.value_weights]
        for use in (*users, *((user, s) for s in _last_weights(user))):
            for p in _parameters_of(use[1], target):
                uses.setdefault(p, []).append(use)
    for site in target.sites:
        fixed = [
            s
            for s in _last_weights(site)
            if any(
                # Another layer would be changed too, unless it is the same layer, which is then clipped as one.
                user is not site
                and target.overlap(s, used)
                and (user is None or not _is_same_layer(site, user, target))
                for p in _parameters_of(s, target)
                for user, used in uses[p]
            )
        ]
        exact = logit_factors(site, by_group=by_group, fixed=fixed)
        if exact is None:
            raise RefusedError(
                f"qk_clip at {where(site)}: other layers or the values use {', '.join(s.parameter for s in fixed)} "
                "too, and the weights that are left cannot take the factor of each head alone. Set groups=group if "
                "only query heads share a key head; otherwise use lalr or qk_lr, which scale steps and not weights"
            )
        factors.append(exact)
    return factors


def _parameters_of(s: HeadSlice, target: Target) -> list[nn.Parameter]:
    return [target.parameter(name) for name in (s.parameter, s.bias) if name]


def _is_same_layer(site: AttentionSite, other: AttentionSite, target: Target) -> bool:
    """True if the remedy acts on both sites and every head has the same weights in both."""
    return (
        len(site.terms) == len(other.terms)
        # Sites are compared by identity.
        and other in target.sites
        and all(
            target.parameter(a.parameter) is target.parameter(b.parameter) and a.same(b)
            for a, b in zip(_last_weights(site), _last_weights(other))
        )
    )


def _last_weights(site: AttentionSite) -> list[HeadSlice]:
    """Returns the last weight on the path to q and to k in each term, in order."""
    return [path[-1] for term in site.terms for path in (term.query, term.key)]


def logit_factors(
    site: AttentionSite, *, by_group: bool, fixed: Collection[HeadSlice] = ()
) -> list[LogitFactor] | None:
    """Returns the weights to scale by γ or √γ so that each product of a site is scaled by γ, or None if that is
    impossible.

    Only the last weight on the path to each q and k is scaled. The powers on the two sides of a product add up to 1. A
    weight shared by several query heads is not scaled, so its partner is scaled by γ, and any other weights paired with
    that partner are left unscaled; the same holds for `fixed` weights. All remaining weights are scaled by
    √γ. With `by_group`, a weight that a group of query heads shares is scaled too: both the weight and its partner are
    scaled by the √γ of the group's largest logit.
    """
    weights: list[HeadSlice] = []

    def entry(s: HeadSlice) -> int:
        for i, weight in enumerate(weights):
            if weight.parameter == s.parameter and weight.same(s):
                return i
        weights.append(s)
        return len(weights) - 1

    terms = [(entry(term.query[-1]), entry(term.key[-1])) for term in site.terms]
    kept = {entry(s) for s in fixed}
    unscaled = set(kept)
    for i, s in enumerate(weights):
        if s.n < site.n_heads and (not by_group or s.n == 1 < site.n_kv_heads):
            unscaled.add(i)
    for a, b in terms:
        # Where all heads share both sides, both take the root of the same γ.
        if {a, b} <= unscaled:
            unscaled -= {a, b} - kept
    powers = dict.fromkeys(unscaled, 0.0)
    fewest = [s.n for s in weights]
    # Each iteration reaches one more product along a chain of weights that are in several of them.
    for _ in terms:
        for a, b in (*terms, *((b, a) for a, b in terms)):
            fewest[a] = min(fewest[a], fewest[b])
            if a in powers and powers.setdefault(b, 1.0 - powers[a]) != 1.0 - powers[a]:
                return None
    factors: list[LogitFactor] = []
    for i, (s, n) in enumerate(zip(weights, fewest)):
        power = powers.get(i, 0.5)
        if power == 0.0:
            continue
        if s.n == site.n_heads and power == 1.0:
            heads = torch.arange(s.n)[:, None]
        elif s.n == n and (power == 0.5 or (kept and by_group)):
            heads = site.users(n)
        elif s.n == site.n_heads and power == 0.5:
            heads = site.users(n)[site.used(n)]
        else:
            return None
        factors.append(LogitFactor(weight=s, heads=heads, root=power == 0.5))
    return factors
