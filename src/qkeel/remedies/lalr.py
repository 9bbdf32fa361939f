"""lalr: logit-adaptive learning rates (QuacK), per head, for MHA, GQA and MLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor

from qkeel.errors import InvalidValueError, unknown
from qkeel.functional.bounds import spectral_norm
from qkeel.functional.updates import group_max, repeat_groups
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import Remedy, Target, scale_steps
from qkeel.sites.find import is_normed
from qkeel.sites.site import AttentionSite, HeadSlice


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LALR(Remedy):
    """lr(W) = τ · η · f(now) / f(start), f(W) = 1 / (product of the norms of the other matrices on the logit's way).

    For W_Q^h: f = 1/‖W_K^h‖, for W_K^h: 1/‖W_Q^h‖, so a step changes logits by a bounded amount however large
    the weights have grown. In general (`AttentionSite.terms`): over the terms a matrix takes part in the smallest
    f, and where heads share it the largest product over those heads; this is the published algorithm 2 for MLA
    and its extension to grouped keys. Biases keep the base rate. The whole step is scaled, decoupled weight decay
    included. A matrix of norm zero counts with the norm it had at the start.
    """

    tau: float = 0.1
    norm: Literal["frobenius", "spectral"] = "frobenius"

    name = "lalr"
    line = "per-head learning rates for query and key weights, lower as their partners grow"
    source = "Anson & Aitchison 2025 (QuacK), arXiv 2511.21377, algorithms 1 and 2"

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise InvalidValueError(f"expected tau above 0, got {self.tau}")
        if self.norm not in ("frobenius", "spectral"):
            raise unknown("norm of lalr", self.norm, ("frobenius", "spectral"))

    def supports(self, site: AttentionSite) -> Refusal | None:
        if is_normed(site):
            return Refusal(
                "a norm on q and k already makes the logit independent of the size of the weights",
                "use one of the two, or qk_lr for a plain lower rate",
            )
        return None

    def apply(self, target: Target) -> Handle:
        slices = list({s.parameter: s for site in target.sites for s in [*site.query, *site.key]}.values())
        place = {s.parameter: i for i, s in enumerate(slices)}
        weights = [target.parameter(s.parameter).detach() for s in slices]
        start = self._norms(slices, weights)

        def factors(now: list[Tensor]) -> list[Tensor]:
            rates = _rates(target.sites, slices, place, start, self._norms(slices, now))
            return [s.expand(self.tau * rate, w) for s, rate, w in zip(slices, rates, now)]

        def state() -> dict[str, Any]:
            return {s.parameter: n.clone() for s, n in zip(slices, start)}

        def load(values: dict[str, Any]) -> None:
            for s, n in zip(slices, start):
                n.copy_(values[s.parameter])

        return Handle(scale_steps(target, self.name, slices, factors), state=state, load=load)

    def _norms(self, slices: Sequence[HeadSlice], weights: Sequence[Tensor]) -> list[Tensor]:
        measure = spectral_norm if self.norm == "spectral" else _frobenius
        return [measure(s.heads(w)) for s, w in zip(slices, weights)]


def _frobenius(w: Tensor) -> Tensor:
    return torch.linalg.vector_norm(w.flatten(1), dim=1)


def _rates(
    sites: Sequence[AttentionSite],
    slices: Sequence[HeadSlice],
    place: dict[str, int],
    start: list[Tensor],
    now: list[Tensor],
) -> list[Tensor]:
    """f(now) / f(start) for every weight, before τ."""
    # Zero-initialised weights (LoRA's B, some output heads) would give 0/0: they count as unchanged.
    now = [torch.where((a > 0) & (b > 0), a, torch.where(b > 0, b, torch.ones_like(b))) for a, b in zip(now, start)]
    safe = [torch.where(b > 0, b, torch.ones_like(b)) for b in start]
    rates: list[Tensor | None] = [None] * len(slices)
    for site in sites:
        for i, (new, old) in _site_products(site, slices, place, now, safe).items():
            rates[i] = old / new
    return [torch.ones_like(n) if r is None else r for r, n in zip(rates, now)]


def _site_products(
    site: AttentionSite,
    slices: Sequence[HeadSlice],
    place: dict[str, int],
    now: list[Tensor],
    start: list[Tensor],
) -> dict[int, tuple[Tensor, Tensor]]:
    """Per weight, the largest product of the other norms on its way, now and at the start.

    f is one over it: the smallest f over terms is one over the largest product.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for term in site.terms:
        way = [place[s.parameter] for s in (*term.query, *term.key)]
        for i in way:
            pair = []
            for norms in (now, start):
                product = torch.ones(site.n_heads, dtype=norms[i].dtype, device=norms[i].device)
                for j in way:
                    if j != i:
                        product = product * repeat_groups(norms[j], site.n_heads)
                pair.append(group_max(product, slices[i].n))
            if i in found:
                pair = [torch.maximum(a, b) for a, b in zip(found[i], pair)]
            found[i] = (pair[0], pair[1])
    return found
