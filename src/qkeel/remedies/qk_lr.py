"""qk_lr: a fixed factor on the learning rate of everything on the logit's way; the ablation of lalr."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import HeadWeights, Remedy, Target, check_number, refuse_untold
from qkeel.remedies.steps import HeadSteps
from qkeel.sites.site import AttentionSite


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKLearningRate(Remedy):
    """Steps of query and key weights (biases not) are `factor` times as long; 0 freezes them."""

    factor: float = 0.1

    name = "qk_lr"
    line = "a fixed, smaller learning rate for query and key weights"
    source = "the ablation of Anson & Aitchison 2025, arXiv 2511.21377, figure 1"
    on_steps = True

    def __post_init__(self) -> None:
        check_number("qk_lr", "factor", self.factor, zero=True)

    def supports(self, site: AttentionSite) -> Refusal | None:
        return refuse_untold(site)

    def apply(self, target: Target) -> Handle:
        return HeadSteps(target, self.name, HeadWeights.of(target)).scale(lambda ones: ones * self.factor)
