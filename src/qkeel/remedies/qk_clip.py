"""qk_clip: shrink the weights of heads whose logits passed a threshold, after the step."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, final

import torch
from torch import Tensor

from qkeel.errors import InvalidValueError, unknown
from qkeel.functional.updates import group_max, qk_clip_gamma, repeat_groups
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import Remedy, Target
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
    key untouched. Heads under τ keep their weights bit for bit; negative, zero and missing maxima never clip.
    """

    threshold: float = 100.0
    groups: Literal["query", "group"] = "query"

    name = "qk_clip"
    line = "after each step, shrinks query and key weights of heads whose largest logit passed the threshold"
    source = "Kimi K2, arXiv 2507.20534, section 2.1"

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise InvalidValueError(f"expected a threshold above 0, got {self.threshold}")
        if self.groups not in ("query", "group"):
            raise unknown("groups of qk_clip", self.groups, ("query", "group"))

    def supports(self, site: AttentionSite) -> Refusal | None:
        if is_normed(site):
            return Refusal(
                "a norm on q or k undoes any scaling of its weights, so a clip would do nothing",
                "use one of the two; with a norm, watch its gains",
            )
        return None

    def apply(self, target: Target) -> Handle:
        optimizer = target.need_optimizer(self.name)
        tap = Tap(target.model, when_training=True)
        state = target.optimizer

        @torch.no_grad()
        def after(*_: Any) -> None:
            stats = tap.read()
            if _overflowed(state):
                return  # a GradScaler skipped this step
            for site in target.sites:
                if site.name in stats:
                    self._clip(target, site, stats[site.name].max_logit)

        hook = optimizer.register_step_post_hook(after)

        def undo() -> None:
            hook.remove()
            tap.remove()

        return Handle(undo)

    def _clip(self, target: Target, site: AttentionSite, max_logit: Tensor) -> None:
        gamma = qk_clip_gamma(max_logit, self.threshold)
        for term in site.terms:
            for piece, factor in self._shares(site, term, gamma):
                weight = target.parameter(piece.parameter)
                weight.mul_(piece.expand(factor.to(weight.dtype), weight))
                if piece.bias is not None:
                    bias = target.parameter(piece.bias)
                    bias.mul_(piece.expand(factor.to(bias.dtype), bias[:, None]).squeeze(1))

    def _shares(self, site: AttentionSite, term: LogitTerm, gamma: Tensor) -> list[tuple[HeadSlice, Tensor]]:
        """Which weights of a term take which part of γ; the last on each way is the head's own."""
        query, key = term.query[-1], term.key[-1]
        if key.n == site.n_heads:
            return [(query, gamma.sqrt()), (key, gamma.sqrt())]
        if self.groups == "query" or key.n == 1 < site.n_kv_heads:
            return [(query, gamma)]
        shared = -group_max(-gamma, key.n)  # the worst head of the group
        return [(query, repeat_groups(shared, site.n_heads).sqrt()), (key, shared.sqrt())]


def _overflowed(optimizer: Any) -> bool:
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
