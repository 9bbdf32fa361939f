"""lalr: logit-adaptive learning rates (QuacK), per head, for MHA, GQA and MLA."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.nn import functional as F

from qkeel.errors import InvalidValueError, unknown
from qkeel.functional.bounds import spectral_norm
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import HeadWeights, Remedy, Target, check_number, refuse_rescaled, refuse_untold
from qkeel.remedies.bundle import frobenius_norm
from qkeel.remedies.steps import HeadSteps
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
    and its extension to grouped keys; in a GAU W_z, on both ways, is its own partner. A weight that layers share
    takes part in the terms of all of them. Biases keep the base rate. The whole step is scaled, decoupled weight decay
    included. A matrix of norm zero counts with the norm it had at the start; one that was zero at the start never
    counts. Frozen weights count as partners.

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
        measure = spectral_norm if self.norm == "spectral" else frobenius_norm
        steps = HeadSteps(target, self.name, weights, measure=measure, decay=self.decay == "scaled")
        row, counts = steps.sizes(), [s.n for s in weights.slices]
        rates = Rates(_uses(target.sites, weights), counts, row)
        start = row.split(counts)

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
            rates.start_from(row)

        names = _names(weights)
        handle = steps.scale(lambda now: rates(now, self.tau))
        return Handle(handle.remove, state=state, load=load)


@final
class Rates:
    """f(now) / f(start) per head of every weight, of all weights of a model by a few operations.

    The norms of all entries stand in one row, 1 at its end. A table of places in it says for each number of the row
    whose norms to multiply: [n uses repeats others], the largest product over uses and repeats being 1/f. Tables of
    one shape are one. `counts`: heads of each entry; `start` their norms, one entry after the other.
    """

    def __init__(self, uses: Sequence[Sequence[Use]], counts: Sequence[int], start: Tensor) -> None:
        firsts = [0, *itertools.accumulate(counts)]
        alike: dict[torch.Size, list[tuple[int, Tensor]]] = {}
        for i, own in enumerate(uses):
            table = _table(own, counts, firsts, i)
            alike.setdefault(table.shape[1:], []).append((firsts[i], table))
        self._tables = [torch.cat([table for _, table in group]) for group in alike.values()]
        order = [torch.arange(first, first + len(t)) for group in alike.values() for first, t in group]
        self._back = torch.cat(order).argsort()
        self.start_from(start)

    def start_from(self, start: Tensor) -> None:
        """Take these norms for those at the start."""
        row = F.pad(start, (0, 1), value=1.0)
        # What was zero has no start to compare with: it counts as unchanged.
        self._counted, self._old = row > 0, torch.where(row > 0, row, 1.0)
        self._to(row.device)
        self._first = self._products(self._old)

    def __call__(self, now: Tensor, tau: float = 1.0) -> Tensor:
        row = F.pad(now, (0, 1), value=1.0)
        if row.device != self._old.device:  # where the weights were moved to
            self._counted, self._old, self._first = (x.to(row.device) for x in (self._counted, self._old, self._first))
            self._to(row.device)
        # What is zero now could blow its partner up.
        new = torch.where(self._counted & (row > 0), row, self._old)
        return tau * (self._first / self._products(new))

    def _products(self, row: Tensor) -> Tensor:
        """1/f for every number of the row but the last."""
        return torch.cat([row[table].prod(-1).amax((1, 2)) for table in self._tables])[self._back]

    def _to(self, device: torch.device) -> None:
        self._tables, self._back = [table.to(device) for table in self._tables], self._back.to(device)


def _table(uses: Sequence[Use], counts: Sequence[int], firsts: Sequence[int], i: int) -> Tensor:
    """[n uses repeats others] places of the norms that the rate of entry i depends on; 1 fills up."""
    most = max(len(others) for others, _ in uses)
    repeats = max(n_heads for _, n_heads in uses) // counts[i]
    found = []
    for others, n_heads in uses:
        heads = torch.arange(n_heads)
        places = [firsts[j] + heads // (n_heads // counts[j]) for j in others]
        places += [torch.full((n_heads,), firsts[-1])] * (most - len(others))
        table = torch.stack(places, -1).view(counts[i], -1, most)
        found.append(table.repeat(1, -(-repeats // table.shape[1]), 1)[:, :repeats])
    return torch.stack(found, 1)


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
