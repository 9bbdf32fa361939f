"""Logit-adaptive learning rates (QuacK) per head, for MHA, GQA and MLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from qkeel import distributed as dist
from qkeel.errors import InvalidValueError
from qkeel.handle import Handle, with_hook
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import HeadsBySite, Target, active_at
from qkeel.remedies.head_weights import HeadNorms, HeadWeights, slice_name
from qkeel.remedies.optimizer_steps import scale_steps
from qkeel.remedies.saved_state import SavedState
from qkeel.remedies.step_remedy import UNDOES_MATCHED_STEPS, StepRemedy, sites_of
from qkeel.sites.site import AttentionSite


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LALR(StepRemedy):
    """Sets the rates lr(W) = τ · η · f(now) / f(start) with f(W) = 1 / (product of the norms of the logit's other
    matrices).

    f is 1/‖W_K^h‖ for W_Q^h and 1/‖W_Q^h‖ for W_K^h, so that a step changes the logits by a bounded amount, however
    large the weights have grown. A matrix that is part of several terms of the logit (`AttentionSite.terms`) gets the
    smallest f of these terms, and a matrix that heads share uses the largest product over these heads. This is the
    published algorithm 2 for MLA, extended to grouped keys. In a GAU, W_z produces both q and k and is its own partner.
    A weight that layers share is part of the terms of all these layers.

    The norms are Frobenius norms. Biases keep the base rate. The full step is scaled, including decoupled weight decay.
    For a matrix whose norm becomes zero, the initial norm is used; a matrix that was zero
    at the start is always ignored. Frozen weights count as partners. "Start" is when the remedy is applied; the
    optimizer's checkpoints contain the norms at the start, and so does `state()`. `heads` names the sites whose weights
    get such rates, with all their heads, as ((site.name, ()),).
    """

    tau: float = 0.1  #: τ, the factor on the rate, above 0
    heads: HeadsBySite | None = None

    name, takes_masks = "lalr", False
    line = "per-head learning rates for query and key weights, lower as their partners grow"
    source = "Anson & Aitchison 2025 (QuacK), arXiv 2511.21377, algorithms 1 and 2"
    rule = (
        "each step, per head h: lr(W_Q^h) = {tau} · η · ‖W_K^h‖₀ / ‖W_K^h‖, "
        "lr(W_K^h) = {tau} · η · ‖W_Q^h‖₀ / ‖W_Q^h‖; ‖·‖ the norm now, ‖·‖₀ at the start, η the optimizer's rate"
    )
    if_normed = (
        "a norm on q and k already makes the logit independent of the size of the weights",
        "use one of the two, or qk_lr for a plain lower rate",
    )
    if_computed = "the norm of the weight in the optimizer says nothing about the logit"

    def __post_init__(self) -> None:
        StepRemedy.__post_init__(self)
        # The rate of a head depends on the norms of those that share its weights.
        if any(numbers for _, numbers in self.heads or ()):
            raise InvalidValueError(
                f"expected heads of lalr as ((site.name, ()),), since it acts on all heads of a site, got {self.heads}"
            )

    @property
    def saves_state(self) -> bool:
        return True

    def chosen(self, sites: Sequence[AttentionSite]) -> list[AttentionSite]:
        return sites_of(self.heads, sites, self.name)

    def holds(self, site: AttentionSite) -> Refusal | None:
        if getattr(active_at(site).get("qk_clip"), "steps", "full") == "matched":
            return UNDOES_MATCHED_STEPS
        return StepRemedy.holds(self, site)

    def apply(self, target: Target) -> Handle:
        weights = HeadWeights(target, self.name)
        norms = HeadNorms(
            weights.slices,
            weights.parameters,
        )
        if dist.world() > 1:
            # No process may fail from here on, because the sums of the norms wait for the others.
            dist.gather_messages("qkeel.apply", "measures")
        start = norms()
        rates = HeadRates(target.sites, weights, start)
        steps = scale_steps(
            weights, lambda: self.tau * rates(norms()), remedy=self.name
        )
        names = [slice_name(s) for s in weights.slices]
        saved = SavedState(
            weights.all_optimizers,
            self.name,
            dict(zip(names, start.split(weights.counts))),
            lambda: rates.start_from(start),
        )
        return with_hook(saved, steps.remove)


@final
class HeadRates:
    """Computes f(now) / f(start) for every head of every weight of a model in a few operations.

    Each head of a weight has one product of norms for each term and each query head that use it: of the norms of the
    other matrices in the term. 1/f is the largest of these products.

    Args:
        sites: the attention layers.
        weights: the weights of their logits.
        start: the norms [h] at the start, ordered by weight.
    """

    def __init__(
        self, sites: Sequence[AttentionSite], weights: HeadWeights, start: Tensor
    ) -> None:
        indices, last = weights.indices(), len(start)
        owners: list[Tensor] = []
        partners: list[Tensor] = []
        for site, term in [(layer, term) for layer in sites for term in layer.terms]:
            slices = (*term.query, *term.key)
            # The index of the head of each weight that each query head uses.
            used = [indices[weights.entry(s)][site.used(s.n), 0] for s in slices]
            # By position, since a weight that produces q and k is its own partner.
            for position, owner in enumerate(used):
                other_heads = used[:position] + used[position + 1 :]
                owners.append(owner)
                partners.append(
                    torch.stack(other_heads or [torch.full_like(owner, last)], 1)
                )
        most = max(table.shape[1] for table in partners)
        self._owners = torch.cat(owners)
        # Shorter products are padded with the 1 that follows the norms.
        self._partners = torch.cat(
            [F.pad(table, (0, most - table.shape[1]), value=last) for table in partners]
        )
        self.start_from(start)

    def start_from(self, start: Tensor) -> None:
        """Sets the norms at the start."""
        # A norm that was zero has no initial value to compare with, so it counts as unchanged.
        self._counted, self._old = start > 0, torch.where(start > 0, start, 1.0)
        self._first = self._products(self._old)

    def __call__(self, norms: Tensor) -> Tensor:
        if norms.device != self._old.device:
            # The model was moved after apply.
            self._counted, self._old, self._first = (
                x.to(norms.device) for x in (self._counted, self._old, self._first)
            )
        # A norm of zero would give its partner an infinite rate.
        norms = torch.where(self._counted & (norms > 0), norms, self._old)
        return self._first / self._products(norms)

    def _products(self, norms: Tensor) -> Tensor:
        """Returns 1/f for every head."""
        self._owners, self._partners = (
            x.to(norms.device) for x in (self._owners, self._partners)
        )
        products = F.pad(norms, (0, 1), value=1.0)[self._partners].prod(1)
        return torch.zeros_like(norms).scatter_reduce(0, self._owners, products, "amax")
