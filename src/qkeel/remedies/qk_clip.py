"""qk_clip: shrink the weights of heads whose logits passed a threshold, after the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from qkeel import dist
from qkeel.errors import QkeelWarning, RefusedError, caution, unknown
from qkeel.functional.updates import group_max, qk_clip_gamma, repeat_groups
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.kernels.native import adamw
from qkeel.kernels.statistics import stats_of_rows
from qkeel.remedies.base import HeadWeights, Remedy, Target, check_number, refuse_rescaled, refuse_untold
from qkeel.remedies.linear import check_keeps
from qkeel.remedies.masters import LOW_PRECISION, copies_in_state, innermost
from qkeel.remedies.pieces import Piece, pieces
from qkeel.remedies.presence import Presence
from qkeel.sites.find import is_normed
from qkeel.sites.intercept import maxima
from qkeel.sites.site import AttentionSite, HeadSlice, LogitTerm
from qkeel.sites.tap import Tap


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKClip(Remedy):
    """γ_h = min(1, τ/S_h), S_h the head's largest signed scaled logit over the batches since the last step.

    After the optimizer step W_Q^h and W_K^h are multiplied by √γ_h each (biases too), so the same batch would
    now give exactly τ if the step had not moved them. Where query heads share a key head, `groups` decides:
    "query" puts the whole γ_h on W_Q^h and leaves the key alone (exact per head), "group" clips the whole group
    by its worst head (Megatron-LM). MLA: √γ on both up-projections, γ on the rotated query, the shared rotated
    key untouched. GAU: √γ on the gains (and offsets) of q and of k. A weight that layers share is scaled once, by the
    smallest of their factors. Low-rank adapters: the base weight's rows and B's; where the base is frozen that is
    refused unless `frozen` is "scale".

    Heads under τ keep their weights bit for bit; negative, zero, missing, infinite and NaN maxima never clip.
    Only forwards in training mode count, all of those since the last step that was taken, of all processes that train
    together. Where a GradScaler skips a step there is no clip, and its maxima count for the next one. Float32 copies
    that the optimizer steps in place of low-precision weights, or keeps in its state, are scaled with them.
    """

    threshold: float = 100.0
    groups: Literal["query", "group"] = "query"
    frozen: Literal["refuse", "scale"] = "refuse"

    name = "qk_clip"
    line = "after each step, shrinks query and key weights of heads whose largest logit passed the threshold"
    source = "Kimi K2, arXiv 2507.20534, section 2.1"
    on_steps = True

    def __post_init__(self) -> None:
        check_number("qk_clip", "threshold", self.threshold)
        if self.groups not in ("query", "group"):
            raise unknown("groups of qk_clip", self.groups, ("query", "group"))
        if self.frozen not in ("refuse", "scale"):
            raise unknown("frozen of qk_clip", self.frozen, ("refuse", "scale"))

    def supports(self, site: AttentionSite) -> Refusal | None:
        return self.holds(site) or refuse_untold(site)

    def holds(self, site: AttentionSite) -> Refusal | None:
        if is_normed(site):
            return Refusal(
                "a norm on q or k undoes any scaling of its weights, so a clip would do nothing",
                "use one of the two; with a norm, watch its gains",
            )
        return refuse_rescaled(site, "scaling what is stored would not scale the logit")

    def apply(self, target: Target) -> Handle:
        optimizer = innermost(target.need_optimizer(self.name))
        plan = _Plan(self, target, optimizer)
        check_keeps(optimizer, self.name, plan.stepped)
        together = _meet(target)
        clip = _Clip(self, target, plan, together)
        presence = Presence(target.model, self.name, plan.names)
        hooks = [
            optimizer.register_step_pre_hook(lambda *_: presence.check()),
            optimizer.register_step_post_hook(clip.after_step),
        ]

        def undo() -> None:
            for hook in hooks:
                hook.remove()
            clip.tap.remove()

        return Handle(undo, state=clip.state, load=clip.load)

    def shares(self, site: AttentionSite, term: LogitTerm, gamma: Tensor) -> list[tuple[HeadSlice, Tensor]]:
        """Which weights of a term take which part of γ; the last on each way is the head's own."""
        query, key, h = term.query[-1], term.key[-1], site.n_heads
        if query.n == key.n == h:
            root = gamma.sqrt()
            return [(query, root), (key, root)]
        if query.n == h and (self.groups == "query" or key.n == 1 < site.n_kv_heads):
            return [(query, gamma)]
        if key.n == h:
            return [(key, gamma)]
        shared = -group_max(-gamma, min(query.n, key.n))  # the worst of the heads that go together
        return [(s, repeat_groups(shared, s.n).sqrt()) for s in (query, key)]


class _Plan:
    """Which rows of which tensors each slice of a site stands for, found out once."""

    def __init__(self, remedy: QKClip, target: Target, optimizer: Optimizer) -> None:
        weights = HeadWeights.of(target)
        self.stepped = weights.of_optimizer(optimizer, remedy.name)
        self.names: list[str] = []
        self.places: dict[int, list[int]] = {}
        found: dict[int, tuple[Tensor, list[tuple[int, HeadSlice]]]] = {}
        entries = 0
        for site in target.sites:
            for s in _scaled(remedy, site):
                copy = self.stepped[weights.place(s)]
                _check_frozen(remedy, target, s)
                for name in (s.parameter, s.bias):
                    if name is None:
                        continue
                    self.names.append(name)
                    p = target.parameter(name)
                    tensors = [p] if copy is None or copy is p or name == s.bias else [p, copy]
                    for tensor in tensors:
                        found.setdefault(id(tensor), (tensor, []))[1].append((entries, s))
                    self.places.setdefault(id(s), []).append(entries)
                    entries += 1
        self.pieces = [piece for tensor, shares in found.values() for piece in pieces(tensor, shares)]


def _scaled(remedy: QKClip, site: AttentionSite) -> list[HeadSlice]:
    """Every slice of a site that a clip scales, once."""
    nothing = torch.ones(site.n_heads)
    found = (s for term in site.terms for s, _ in remedy.shares(site, term, nothing))
    return list({id(s): s for s in found}.values())


def _check_frozen(remedy: QKClip, target: Target, s: HeadSlice) -> None:
    if remedy.frozen == "refuse" and not target.parameter(s.parameter).requires_grad:
        raise RefusedError(
            f"qk_clip would scale {s.parameter}, which is frozen, and an adapter saved without it would no longer fit: "
            "say frozen=scale and save the whole model, or use lalr"
        )


def _meet(target: Target) -> bool:
    """Whether other processes clip the same sites: one that clipped by its own batch alone would part from the rest."""
    if dist.world() == 1:
        return False
    word = ";".join(f"{site.name}:{site.n_heads}" for site in target.sites)
    verdict = dist.agree(f"qk_clip/{dist.ordinal('qk_clip')}", word)
    if verdict != "together":
        why = "do not all apply it" if verdict == "alone" else "hold different attention"
        raise RefusedError(
            f"qk_clip clips by the largest logit of all processes, and those of this run {why}; apply it in each of "
            "them to the same model, or in none"
        )
    return True


class _Clip:
    """One application of qk_clip: the tap that collects maxima and what happens after a step."""

    def __init__(self, remedy: QKClip, target: Target, plan: _Plan, together: bool) -> None:
        self.remedy, self.sites, self.plan, self.together = remedy, target.sites, plan, together
        self.tap = Tap(
            target.model, when_training=True, parts=True, measure=maxima, measure_rows=stats_of_rows, on_fault=_off
        )
        self.tap.dispatch = any(site.below for site in target.sites)
        self.tap.described = [site for site in target.sites if site.description is not None]
        self.kept: dict[str, Tensor] = {}  # maxima of a step that a GradScaler skipped, else -inf
        self._copies: dict[int, tuple[str, ...]] = {}

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Clip by the maxima since the last step that was taken."""
        found_inf = getattr(optimizer, "found_inf", None)
        maxima = {name: stats.max_logit for name, stats in self.tap.read().items()}
        # A step leaves nothing in the caches, where an operation of torch takes 50 µs: the usual case does without.
        alone = found_inf is None and not self.together and not self.kept
        if not alone or any(map(self._over, maxima.values())):
            self._clip(optimizer, maxima, found_inf)

    def _over(self, top: Tensor) -> bool:
        """Whether a head is over the threshold, or cannot be looked at."""
        under = float(self.remedy.threshold).__lt__  # no loop in Python; NaN is not over
        return not _readable(top) or any(map(under, top.tolist()))

    @torch.no_grad()
    def _clip(self, optimizer: Optimizer, maxima: dict[str, Tensor], found_inf: Tensor | None) -> None:
        if self.together:
            maxima = self._everyones(maxima)
        for name, kept in self.kept.items():
            maxima[name] = torch.maximum(maxima[name], kept.to(maxima[name])) if name in maxima else kept
        self.kept = {}
        if found_inf is not None:
            # A fused optimizer runs its hooks though a GradScaler let nothing move. The choice is made on the device.
            maxima, self.kept = _split(maxima, torch.as_tensor(found_inf))
        factors = self._factors(maxima)
        if factors:
            _shrink([(piece, t) for piece in self.plan.pieces for t in self._tensors(piece, optimizer)], factors)

    def _factors(self, maxima: dict[str, Tensor]) -> dict[int, Tensor]:
        """The factor per head of every entry of the sites to scale."""
        factors: dict[int, Tensor] = {}
        for site, gamma in self._gammas(maxima):
            for term in site.terms:
                for s, factor in self.remedy.shares(site, term, gamma):
                    for i in self.plan.places[id(s)]:
                        factors[i] = factor if i not in factors else torch.minimum(factors[i], factor)
        return factors

    def _gammas(self, maxima: dict[str, Tensor]) -> list[tuple[AttentionSite, Tensor]]:
        """γ of the sites to scale. On a CPU those with a head over the threshold; reading that costs little there.

        Elsewhere all of them: a multiplication by 1 leaves weights bit for bit, and waiting for the device would
        cost more.
        """
        seen = [(site, maxima[site.name]) for site in self.sites if site.name in maxima]
        if not seen:
            return []
        device = seen[0][1].device
        row = torch.cat([top.to(device) for _, top in seen])
        if _readable(row) and not bool((row > self.remedy.threshold).any()):
            return []
        # An infinite maximum is a breakdown, not a size: γ = 0 would kill the head for good.
        gammas = qk_clip_gamma(row.masked_fill(row.isinf(), -torch.inf), self.remedy.threshold)
        found = zip((site for site, _ in seen), gammas.split([len(top) for _, top in seen]))
        if _readable(row):
            return [(site, gamma) for site, gamma in found if min(gamma.tolist()) < 1]
        return [(site, gamma.to(top.device)) for (site, gamma), (_, top) in zip(found, seen)]

    def _everyones(self, maxima: dict[str, Tensor]) -> dict[str, Tensor]:
        """The largest over all processes, by one gather of a size that never changes."""
        device = dist.collective_device()
        nothing = [torch.full((site.n_heads,), -torch.inf, dtype=torch.float64) for site in self.sites]
        own = [maxima.get(site.name, none).to(device, torch.float64) for site, none in zip(self.sites, nothing)]
        everyones = dist.gather(torch.cat(own)).amax(0).split([site.n_heads for site in self.sites])
        return {
            site.name: top if site.name not in maxima else top.to(maxima[site.name])
            for site, top in zip(self.sites, everyones)
        }

    def _tensors(self, piece: Piece, optimizer: Optimizer) -> list[Tensor]:
        """The piece's rows in its weight and in the copies of it that the optimizer keeps."""
        weight = piece.weight
        if weight.dtype not in LOW_PRECISION:
            return [weight]
        if id(weight) not in self._copies and optimizer.state.get(weight):
            self._copies[id(weight)] = copies_in_state(optimizer, weight)
        return [weight, *(optimizer.state[weight][name] for name in self._copies.get(id(weight), ()))]

    def state(self) -> dict[str, Any]:
        """Maxima that a skipped step left for the next one."""
        return {name: top.clone() for name, top in self.kept.items()}

    def load(self, values: dict[str, Any]) -> None:
        """Take up the maxima of a checkpoint."""
        self.kept = dict(values)


def _shrink(parts: Sequence[tuple[Piece, Tensor]], factors: dict[int, Tensor]) -> None:
    """Multiply the rows of heads by their factors: on a CPU those of heads that are over only, elsewhere all.

    One product over all heads takes 7.9 ms, and gathering the rows 7.1, where a sixth of the heads of 28 matrices of
    1024 x 1024 take 2.7 by themselves.
    """
    heads: list[Tensor] = []
    numbers: list[Tensor] = []
    for piece, tensor in parts:
        known = sum(i in factors for i, _ in piece.shares)
        if not known:
            continue
        if known < len(piece.shares):
            piece = dataclasses.replace(piece, shares=tuple((i, s) for i, s in piece.shares if i in factors))
        view = piece.view(tensor)
        if piece.whole or not _readable(tensor):
            view.mul_(piece.factor(factors))
            continue
        heads.append(view)
        numbers.append(piece.per_head(factors))
    if all(x.dtype == torch.float32 for x in (*heads, *numbers)) and adamw.ready():
        adamw.scale_heads(heads, numbers)
        return
    over = [(x[h], f) for x, number in zip(heads, numbers) for h, f in enumerate(number.tolist()) if f != 1]
    if over:
        torch._foreach_mul_([x for x, _ in over], [f for _, f in over])


def _readable(tensor: Tensor) -> bool:
    """Whether the host can look at its numbers without waiting."""
    return tensor.is_cpu  # a device's name takes longer


def _off(error: Exception) -> None:
    caution(
        f"qk_clip met a fault while it looked at logits and clips no more: {type(error).__name__}: {error}. Training "
        "goes on without it",
        QkeelWarning,
    )


def _split(maxima: dict[str, Tensor], found_inf: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Maxima to clip by now, and those to keep for the next step: one of them is -inf."""
    now, later = {}, {}
    for name, top in maxima.items():
        skipped, nothing = found_inf.to(top.device) != 0, torch.full_like(top, -torch.inf)
        now[name] = torch.where(skipped, nothing, top)
        later[name] = torch.where(skipped, top, nothing)
    return now, later
