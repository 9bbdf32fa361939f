"""Logit-adaptive learning rates (QuacK) per head, for MHA, GQA and MLA."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, final

import torch
from torch import Tensor
from torch.nn import functional as F

from qkeel.errors import InvalidValueError
from qkeel.functional.bounds import spectral_norm
from qkeel.handle import Handle, check_taken, compose
from qkeel.heads.site import AttentionSite
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import HeadsBySite, Target, active_at
from qkeel.remedies.head_rows import frobenius_norm
from qkeel.remedies.head_weights import (
    UNDOES_MATCHED_STEPS,
    HeadWeights,
    StepRemedy,
    innermost,
    sites_of,
    slice_name,
)
from qkeel.remedies.optimizer_steps import Measure, scalable, scale_steps
from qkeel.remedies.saved_state import SavedState

# A term that a weight is part of: the entries of the other weights in the term, the head of each of these weights that
# each query head uses, and the query heads that use each of the weight's own heads.
Use = tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]


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

    Biases keep the base rate. The full step is scaled, including decoupled weight decay, unless decay="plain" keeps the
    decay at the base rate η·λ. For a matrix whose norm becomes zero, the initial norm is used; a matrix that was zero
    at the start is always ignored. Frozen weights count as partners. "Start" is when the remedy is applied; the
    optimizer's checkpoints contain the norms at the start, and so does `state()`. If `heads` is given, weights that
    none of these heads uses keep the base rate. norm="spectral" synchronises a GPU with the
    host at every step, to solve an eigenvalue problem of size d per head.
    """

    tau: float = 0.1  #: τ, the factor on the rate, above 0
    norm: Literal["frobenius", "spectral"] = (
        "frobenius"  #: the norm of the weights in f
    )
    decay: Literal["scaled", "plain"] = "scaled"
    heads: HeadsBySite | None = None

    name, weight_in_use = "lalr", "is a multiple of"
    line = "per-head learning rates for query and key weights, lower as their partners grow"
    source = "Anson & Aitchison 2025 (QuacK), arXiv 2511.21377, algorithms 1 and 2"
    rule = (
        "each step, per head h: lr(W_Q^h) = {tau} · η · ‖W_K^h‖₀ / ‖W_K^h‖, "
        "lr(W_K^h) = {tau} · η · ‖W_Q^h‖₀ / ‖W_Q^h‖; ‖·‖ the {norm} norm now, ‖·‖₀ at the start, η the optimizer's rate"
    )
    if_normed = (
        "a norm on q and k already makes the logit independent of the size of the weights",
        "use one of the two, or qk_lr for a plain lower rate",
    )
    if_computed = "the norm of the weight in the optimizer says nothing about the logit"

    def chosen(self, sites: Sequence[AttentionSite]) -> list[AttentionSite]:
        return sites_of(self.heads, sites, self.name)

    def holds(self, site: AttentionSite) -> Refusal | None:
        if getattr(active_at(site).get("qk_clip"), "steps", "full") == "matched":
            return UNDOES_MATCHED_STEPS
        return StepRemedy.holds(self, site)

    def apply(self, target: Target) -> Handle:
        optimizer, weights = (
            innermost(target.need_optimizer(self.name)),
            HeadWeights.of(target),
        )
        keeps_decay = self.decay == "plain"
        tensors = scalable(optimizer, weights, self.name, keeps_decay=keeps_decay)
        measure = Measure(
            weights,
            tensors,
            spectral_norm if self.norm == "spectral" else frobenius_norm,
        )
        # The kind of norm is part of the names, so that the norms of one kind are never taken for those of the other.
        kind = "" if self.norm == "frobenius" else f":{self.norm}"
        row, names = (
            measure.at_start(),
            [f"{slice_name(s)}{kind}" for s in weights.slices],
        )
        rates = HeadRates(_uses(target.sites, weights), weights.counts, row)
        start = row.split(weights.counts)

        def state() -> dict[str, Tensor]:
            return {name: norm.clone() for name, norm in zip(names, start)}

        def load(values: dict[str, Tensor]) -> None:
            new_names = dict(
                zip(_names_of_0_1(weights), names)
            )  # which do not say the kind of norm
            values = {
                new_names.get(name, name): value for name, value in values.items()
            }
            check_taken(values, names, f"lalr:norm={self.norm}")
            wrong = [
                n
                for n, norms in zip(names, start)
                if n not in values or values[n].shape != norms.shape
            ]
            if wrong:
                raise InvalidValueError(
                    f"expected the initial norms of {len(names)} weights, got {len(values)}; these are "
                    f"missing or have a different shape: {wrong}; load the state of the same model and remedy"
                )
            for name, norms in zip(names, start):
                norms.copy_(values[name])
            rates.start_from(row)
            saved.note_loaded()

        acting = (
            None
            if self.heads is None
            else _acting(dict(self.heads), target.sites, weights).to(row.device)
        )

        def factors(norms: Tensor) -> Tensor:
            rates_of_heads = rates(norms, self.tau)
            return (
                rates_of_heads
                if acting is None
                else torch.where(acting.to(rates_of_heads.device), rates_of_heads, 1.0)
            )

        saved = SavedState(
            optimizer, self.name, dict(zip(names, start)), lambda: rates.start_from(row)
        )
        steps = scale_steps(
            optimizer,
            weights,
            factors,
            remedy=self.name,
            tensors=tensors,
            measure=measure,
            keeps_decay=keeps_decay,
        )
        return Handle(
            compose([steps, Handle(saved.remove)]).remove, state=state, load=load
        )


@final
class HeadRates:
    """Computes f(now) / f(start) for every head of every weight of a model in a few operations.

    The norms of all weights form one row with a 1 at its end. A table [n uses repeats others] contains, for each value
    in the row, the indices of the norms to multiply; 1/f is the largest of these products over uses and repeats. Tables
    of the same shape are concatenated.

    Args:
        uses: the terms that each weight is part of.
        counts: the number of heads of each weight.
        start: the norms at the start, ordered by weight.
    """

    def __init__(
        self, uses: Sequence[Sequence[Use]], counts: Sequence[int], start: Tensor
    ) -> None:
        firsts = [0, *itertools.accumulate(counts)]
        by_shape: dict[torch.Size, list[tuple[int, Tensor]]] = {}
        for i, own in enumerate(uses):
            table = _table(own, firsts, i)
            by_shape.setdefault(table.shape[1:], []).append((firsts[i], table))
        self._tables = [
            torch.cat([table for _, table in group]) for group in by_shape.values()
        ]
        order = [
            torch.arange(first, first + len(t))
            for group in by_shape.values()
            for first, t in group
        ]
        self._back = torch.cat(order).argsort()
        self.start_from(start)

    def start_from(self, start: Tensor) -> None:
        """Sets the norms at the start."""
        row = F.pad(start, (0, 1), value=1.0)
        # A norm that was zero has no initial value to compare with, so it counts as unchanged.
        self._counted, self._old = row > 0, torch.where(row > 0, row, 1.0)
        self._to(row.device)
        self._first = self._products(self._old)

    def __call__(self, norms: Tensor, tau: float = 1.0) -> Tensor:
        row = F.pad(norms, (0, 1), value=1.0)
        if row.device != self._old.device:  # the weights are on another device now
            self._counted, self._old, self._first = (
                x.to(row.device) for x in (self._counted, self._old, self._first)
            )
            self._to(row.device)
        # A norm of zero would give its partner an infinite rate.
        new = torch.where(self._counted & (row > 0), row, self._old)
        return tau * (self._first / self._products(new))

    def _products(self, row: Tensor) -> Tensor:
        """Returns 1/f for every value in the row except the last."""
        return torch.cat([row[table].prod(-1).amax((1, 2)) for table in self._tables])[
            self._back
        ]

    def _to(self, device: torch.device) -> None:
        self._tables, self._back = (
            [table.to(device) for table in self._tables],
            self._back.to(device),
        )


def _table(uses: Sequence[Use], firsts: Sequence[int], i: int) -> Tensor:
    """Returns the indices [n uses repeats others] of the norms on which the rate of weight i depends.

    The table is padded with the index of the 1 at the end of the row."""
    most = max(len(partners) for partners, _, _ in uses)
    repeats = max(len(users_of_heads[0]) for _, _, users_of_heads in uses)
    tables = []
    for partners, used, users_of_heads in uses:
        users = torch.tensor(users_of_heads)
        places = [
            firsts[j] + torch.tensor(heads)[users] for j, heads in zip(partners, used)
        ]
        places += [torch.full(users.shape, firsts[-1])] * (most - len(partners))
        table = torch.stack(places, -1)
        tables.append(table.repeat(1, -(-repeats // table.shape[1]), 1)[:, :repeats])
    return torch.stack(tables, 1)


def _uses(sites: Sequence[AttentionSite], weights: HeadWeights) -> list[list[Use]]:
    uses: list[list[Use]] = [[] for _ in weights.slices]
    for site in sites:
        for term in site.terms:
            slices = (*term.query, *term.key)
            factors = [weights.place(s) for s in slices]
            heads = [tuple(site.used(s.n).tolist()) for s in slices]
            for a, i in enumerate(
                factors
            ):  # by position, since a weight that produces q and k is its own partner
                partners = [b for b in range(len(factors)) if b != a]
                users_of_heads = tuple(map(tuple, site.users(slices[a].n).tolist()))
                uses[i].append(
                    (
                        tuple(factors[b] for b in partners),
                        tuple(heads[b] for b in partners),
                        users_of_heads,
                    )
                )
    return [list(dict.fromkeys(u)) for u in uses]


def _acting(
    heads: Mapping[str, tuple[int, ...]],
    sites: Sequence[AttentionSite],
    weights: HeadWeights,
) -> Tensor:
    """Returns a mask [heads of all weights] that is True for the parts that a named head uses."""
    masks = [torch.zeros(n, dtype=torch.bool) for n in weights.counts]
    for site in sites:
        named = torch.tensor([*(heads[site.name] or range(site.n_heads))])
        for term in site.terms:
            for s in (*term.query, *term.key):
                masks[weights.place(s)] |= torch.isin(site.users(s.n), named).any(1)
    return torch.cat(masks)


def _names_of_0_1(weights: HeadWeights) -> list[str]:
    """Returns the names that states of version 0.1 have: with a number if a parameter has several entries."""
    names = weights.names
    return [
        f"{name}#{names[:i].count(name)}" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]
