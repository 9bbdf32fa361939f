"""qk_clip: shrink the weights of heads whose logits passed a threshold, after the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from qkeel.errors import unknown
from qkeel.functional.updates import group_max, qk_clip_gamma, repeat_groups
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import HeadWeights, Remedy, Target, check_number
from qkeel.remedies.steps import merge_lines
from qkeel.sites.find import is_normed
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
    key untouched. A weight that layers share is scaled once, by the smallest of their factors.

    Heads under τ keep their weights bit for bit; negative, zero, missing, infinite and NaN maxima never clip.
    Only forwards in training mode count, all of those since the last step that was taken. Where a GradScaler
    skips a step there is no clip, and its maxima count for the next one.
    """

    threshold: float = 100.0
    groups: Literal["query", "group"] = "query"

    name = "qk_clip"
    line = "after each step, shrinks query and key weights of heads whose largest logit passed the threshold"
    source = "Kimi K2, arXiv 2507.20534, section 2.1"

    def __post_init__(self) -> None:
        check_number("qk_clip", "threshold", self.threshold)
        if self.groups not in ("query", "group"):
            raise unknown("groups of qk_clip", self.groups, ("query", "group"))

    def holds(self, site: AttentionSite) -> Refusal | None:
        if is_normed(site):
            return Refusal(
                "a norm on q or k undoes any scaling of its weights, so a clip would do nothing",
                "use one of the two; with a norm, watch its gains",
            )
        if site.reparametrised:
            return Refusal(
                "the weight that makes the logit is computed from another, so scaling what is stored would not "
                "scale the logit",
                "use one of the two",
            )
        return None

    def apply(self, target: Target) -> Handle:
        optimizer = target.need_optimizer(self.name)
        HeadWeights.of(target).check_held(optimizer, self.name)
        clip = _Clip(self, target)
        hook = optimizer.register_step_post_hook(clip.after_step)

        def undo() -> None:
            hook.remove()
            clip.tap.remove()

        return Handle(undo, state=clip.state, load=clip.load)

    def shares(self, site: AttentionSite, term: LogitTerm, gamma: Tensor) -> list[tuple[HeadSlice, Tensor]]:
        """Which weights of a term take which part of γ; the last on each way is the head's own."""
        query, key = term.query[-1], term.key[-1]
        if key.n == site.n_heads:
            return [(query, gamma.sqrt()), (key, gamma.sqrt())]
        if self.groups == "query" or key.n == 1 < site.n_kv_heads:
            return [(query, gamma)]
        shared = -group_max(-gamma, key.n)  # the worst head of the group
        return [(query, repeat_groups(shared, site.n_heads).sqrt()), (key, shared.sqrt())]


class _Clip:
    """One application of qk_clip: the tap that collects maxima and what happens after a step."""

    def __init__(self, remedy: QKClip, target: Target) -> None:
        self.remedy = remedy
        self.target = target
        self.tap = Tap(target.model, when_training=True, parts=True)
        self.kept: dict[str, Tensor] = {}  # maxima of a step that a GradScaler skipped, else -inf

    @torch.no_grad()
    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Clip by the maxima since the last step that was taken."""
        found_inf = getattr(optimizer, "found_inf", None)
        maxima = {name: stats.max_logit for name, stats in self.tap.read().items()}
        for name, kept in self.kept.items():
            maxima[name] = torch.maximum(maxima[name], kept.to(maxima[name])) if name in maxima else kept
        self.kept = {}
        if found_inf is not None:
            # A fused optimizer runs its hooks though a GradScaler let nothing move. The choice is made on the device.
            maxima, self.kept = _split(maxima, torch.as_tensor(found_inf))
        self._clip(maxima)

    def _clip(self, maxima: dict[str, Tensor]) -> None:
        weights: dict[int, tuple[nn.Parameter, list[tuple[HeadSlice, Tensor]]]] = {}
        for site in self._over(maxima):
            top = maxima[site.name]
            # An infinite maximum is a breakdown, not a size: γ = 0 would kill the head for good.
            gamma = qk_clip_gamma(top.masked_fill(top.isinf(), -torch.inf), self.remedy.threshold)
            for term in site.terms:
                for piece, factor in self.remedy.shares(site, term, gamma):
                    for name in (piece.parameter, piece.bias):
                        if name is not None:
                            p = self.target.parameter(name)
                            weights.setdefault(id(p), (p, []))[1].append((piece, factor.to(p.dtype)))
        for p, shares in weights.values():
            p.mul_(merge_lines(shares, p))

    def _over(self, maxima: dict[str, Tensor]) -> Sequence[AttentionSite]:
        """The sites to scale. On a CPU those with a head over the threshold; reading that costs nothing there.

        Elsewhere all of them: a multiplication by 1 leaves weights bit for bit, and waiting for the device would
        cost more.
        """
        sites = [site for site in self.target.sites if site.name in maxima]
        if not sites or any(maxima[site.name].device.type != "cpu" for site in sites):
            return sites
        tops = torch.stack([maxima[site.name].nan_to_num(nan=-torch.inf, posinf=torch.inf).amax() for site in sites])
        return [site for site, over in zip(sites, (tops > self.remedy.threshold).tolist()) if over]

    def state(self) -> dict[str, Any]:
        """Maxima that a skipped step left for the next one."""
        return {name: top.clone() for name, top in self.kept.items()}

    def load(self, values: dict[str, Any]) -> None:
        """Take up the maxima of a checkpoint."""
        self.kept = dict(values)


def _split(maxima: dict[str, Tensor], found_inf: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Maxima to clip by now, and those to keep for the next step: one of them is -inf."""
    now, later = {}, {}
    for name, top in maxima.items():
        skipped, nothing = found_inf.to(top.device) != 0, torch.full_like(top, -torch.inf)
        now[name] = torch.where(skipped, nothing, top)
        later[name] = torch.where(skipped, top, nothing)
    return now, later
