"""qk_lr: a fixed factor on the learning rate of everything on the logit's way; the ablation of lalr."""

from __future__ import annotations

import dataclasses
from typing import final

import torch
from torch import Tensor

from qkeel.errors import InvalidValueError
from qkeel.handle import Handle
from qkeel.remedies.base import Remedy, Target, scale_steps


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKLearningRate(Remedy):
    """Steps of query and key weights (biases not) are `factor` times as long."""

    factor: float = 0.1

    name = "qk_lr"
    line = "a fixed, smaller learning rate for query and key weights"
    source = "the ablation of Anson & Aitchison 2025, arXiv 2511.21377, figure 1"

    def __post_init__(self) -> None:
        if not self.factor >= 0:
            raise InvalidValueError(f"expected a factor of at least 0, got {self.factor}")

    def apply(self, target: Target) -> Handle:
        slices = list({s.parameter: s for site in target.sites for s in [*site.query, *site.key]}.values())

        def factors(weights: list[Tensor]) -> list[Tensor]:
            return [torch.tensor(self.factor, dtype=w.dtype, device=w.device) for w in weights]

        return Handle(scale_steps(target, self.name, slices, factors))
