"""A fixed factor on the learning rate of query and key weights; the ablation of lalr."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.handle import Handle
from qkeel.remedies.base import Target
from qkeel.remedies.steps.head_steps import head_steps
from qkeel.remedies.steps.head_weights import HeadWeights
from qkeel.remedies.steps.step_remedy import StepRemedy


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKLearningRate(StepRemedy):
    """Makes steps of query and key weights, not of biases, `factor` times as long; 0 freezes them."""

    factor: float = 0.1

    name, may_be_zero = "qk_lr", ("factor",)
    line = "a fixed, smaller learning rate for query and key weights"
    source = "the ablation of Anson & Aitchison 2025, arXiv 2511.21377, figure 1"
    rule = "each step: lr(W_Q) = lr(W_K) = {factor} · η, η the optimizer's rate"

    def apply(self, target: Target) -> Handle:
        steps = head_steps(target, self.name, HeadWeights.of(target))
        return steps.scale(lambda ones: ones * self.factor)
