"""lalr: logit-adaptive learning rates (QuacK), per head, for MHA, GQA and MLA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor

from qkeel.errors import InvalidValueError, unknown
from qkeel.functional.bounds import spectral_norm
from qkeel.functional.updates import group_max, repeat_groups
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import HeadWeights, Remedy, Target, check_number, refuse_rescaled, refuse_untold
from qkeel.remedies.masters import innermost
from qkeel.remedies.steps import scale_steps
from qkeel.sites.find import is_normed
from qkeel.sites.site import AttentionSite

# One term a weight takes part in: the entries of the other weights of the term, and the number of query heads.
Use = tuple[tuple[int, ...], int]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LALR(Remedy):
    """lr(W) = τ · η · f(now) / f(start), f(W) = 1 / (product of the norms of the other matrices on the logit's way).

    For W_Q^h: f = 1/‖W_K^h‖, for W_K^h: 1/‖W_Q^h‖, so a step changes logits by a bounded amount however large
    the weights have grown. In general (`AttentionSite.terms`): over the terms a matrix takes part in the smallest
    f, and where heads share it the largest product over those heads; this is the published algorithm 2 for MLA
    and its extension to grouped keys. A weight that layers share takes part in the terms of all of them. Biases
    keep the base rate. The whole step is scaled, decoupled weight decay included. A matrix of norm zero counts with
    the norm it had at the start; one that was zero at the start never counts. Frozen weights count as partners.

    The norms are those of the weights when the remedy is applied; `state()` carries them across a checkpoint.
    decay="plain" leaves decoupled weight decay at the base rate, η·λ, and scales the rest of the step only.
    norm="spectral" synchronises a GPU with the host at every step (an eigenvalue problem of size d per head).
    """

    tau: float = 0.1
    norm: Literal["frobenius", "spectral"] = "frobenius"
    decay: Literal["scaled", "plain"] = "scaled"

    name = "lalr"
    line = "per-head learning rates for query and key weights, lower as their partners grow"
    source = "Anson & Aitchison 2025 (QuacK), arXiv 2511.21377, algorithms 1 and 2"
    on_steps = True

    def __post_init__(self) -> None:
        check_number("lalr", "tau", self.tau)
        if self.norm not in ("frobenius", "spectral"):
            raise unknown("norm of lalr", self.norm, ("frobenius", "spectral"))
        if self.decay not in ("scaled", "plain"):
            raise unknown("decay of lalr", self.decay, ("scaled", "plain"))

    def supports(self, site: AttentionSite) -> Refusal | None:
        return self.holds(site) or refuse_untold(site)

    def holds(self, site: AttentionSite) -> Refusal | None:
        if is_normed(site):
            return Refusal(
                "a norm on q and k already makes the logit independent of the size of the weights",
                "use one of the two, or qk_lr for a plain lower rate",
            )
        return refuse_rescaled(site, "the norm of what the optimizer steps says nothing about the logit")

    def apply(self, target: Target) -> Handle:
        weights = HeadWeights.of(target)
        uses = _uses(target.sites, weights)
        measure = spectral_norm if self.norm == "spectral" else frobenius_norm
        read = weights.read(innermost(target.need_optimizer(self.name)), self.name)
        start = [measure(s.heads(p.detach())) for s, p in zip(weights.slices, read)]

        def factors(now: list[Tensor]) -> list[Tensor]:
            start[:] = [s.to(n) for s, n in zip(start, now)]  # where the weights were moved to
            return [self.tau * rate for rate in rates(uses, start, now)]

        def state() -> dict[str, Any]:
            return {name: norm.clone() for name, norm in zip(names, start)}

        def load(values: dict[str, Any]) -> None:
            wrong = [n for n, own in zip(names, start) if n not in values or values[n].shape != own.shape]
            if wrong or len(values) != len(names):
                raise InvalidValueError(
                    f"expected the norms at the start of {len(names)} weights, got {len(values)} of which these are "
                    f"missing or of another shape: {wrong}; load the state of the same model and remedy"
                )
            for name, own in zip(names, start):
                own.copy_(values[name])

        names = _names(weights)
        steps = scale_steps(target, self.name, weights, measure, factors, decay=self.decay == "scaled")
        return Handle(steps.remove, state=state, load=load)


def frobenius_norm(heads: Tensor) -> Tensor:
    """‖W^h‖_F of each head's part [n r m]."""
    return torch.linalg.vector_norm(heads, dim=(1, 2))


def rates(uses: Sequence[Sequence[Use]], start: Sequence[Tensor], now: Sequence[Tensor]) -> list[Tensor]:
    """f(now) / f(start) per head of every weight, before τ."""
    counts = [s > 0 for s in start]
    # What was zero has no start to compare with: it counts as unchanged. What is zero now could blow its partner up.
    old = [torch.where(c, s, 1.0) for c, s in zip(counts, start)]
    new = [torch.where(c & (n > 0), n, o) for c, n, o in zip(counts, now, old)]
    return [_product(u, old, len(s)) / _product(u, new, len(s)) for u, s in zip(uses, start)]


def _product(uses: Sequence[Use], norms: Sequence[Tensor], n: int) -> Tensor:
    """1/f: the largest product of the other norms, over the terms and, where heads share the weight, over them."""
    largest: Tensor | None = None
    for others, n_heads in uses:
        product = functools.reduce(torch.mul, [repeat_groups(norms[i], n_heads) for i in others])
        product = group_max(product, n)
        largest = product if largest is None else torch.maximum(largest, product)
    assert largest is not None
    return largest


def _uses(sites: Sequence[AttentionSite], weights: HeadWeights) -> list[list[Use]]:
    found: list[list[Use]] = [[] for _ in weights.slices]
    for site in sites:
        for term in site.terms:
            way = [weights.place(s) for s in (*term.query, *term.key)]
            for a, i in enumerate(way):  # by position: a weight that makes q and k is its own partner
                found[i].append((tuple(j for b, j in enumerate(way) if b != a), site.n_heads))
    return [list(dict.fromkeys(u)) for u in found]


def _names(weights: HeadWeights) -> list[str]:
    """A name per entry: the parameter's, numbered where one parameter has several (a fused projection)."""
    plain = [s.parameter for s in weights.slices]
    return [f"{name}#{plain[:i].count(name)}" if plain.count(name) > 1 else name for i, name in enumerate(plain)]
