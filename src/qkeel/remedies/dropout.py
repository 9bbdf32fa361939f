"""Random dropout, in training, of entries that attention and MLP add to the residual stream."""

from __future__ import annotations

import dataclasses
import functools
from typing import final

from torch import nn
from torch.nn import functional as F

from qkeel.errors import InvalidValueError
from qkeel.handle import Handle
from qkeel.nn.block import Block
from qkeel.remedies.base import Remedy, Target, compose_all
from qkeel.remedies.blocks.residual_blocks import ModuleOutput, of_first, pre_norm_branches


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dropout(Remedy):
    """Branches x + m ∘ F(N(x)) / (1 - rate), m ~ Bernoulli(1 - rate) for each entry, after attention and after the MLP.

    In evaluation nothing changes. The masks come from PyTorch's global generator. A branch whose output is normed
    (swin, peri) is dropped before that norm; Chameleon's authors found that the two do badly in combination.

    Source: Chameleon, arXiv 2405.09818, section 2.3 (7B: rate 0.1); Srivastava et al. 2014, JMLR 15.
    """

    rate: float = 0.1  #: probability that an entry is dropped

    name, may_be_zero = "dropout", ("rate",)
    line = "drops entries of the outputs of attention and MLP at random in training"
    source = "Chameleon, arXiv 2405.09818, section 2.3; Srivastava et al. 2014, JMLR 15"
    rule = "branches x + m ∘ F(N(x)) / (1 - {rate}), m ~ Bernoulli(1 - {rate}) for each entry, in training"

    def __post_init__(self) -> None:
        Remedy.__post_init__(self)
        if self.rate >= 1:
            raise InvalidValueError(f"expected a rate under 1 for dropout, got {self.rate}")

    def apply(self, target: Target) -> Handle:
        return compose_all(
            Handle(module.register_forward_hook(functools.partial(_dropped, self.rate)).remove)
            for module in _branches(target, self.name)
        )


def _branches(target: Target, remedy: str) -> list[nn.Module]:
    """Attention and MLP of every block around a site; qkeel's own blocks in any norm order, others pre-norm."""
    around = {id(site.module) for site in target.sites}
    own = [m for m in target.model.modules() if isinstance(m, Block) and id(m.attention) in around]
    attentions = [branch for block in own for branch in (block.attention, block.cross_attention) if branch is not None]
    if len(attentions) == len(around):
        return [*attentions, *(block.mlp for block in own)]
    return [b.block.get_submodule(b.function) for b in pre_norm_branches(target, remedy)]


def _dropped(rate: float, module: nn.Module, inputs: object, output: ModuleOutput) -> ModuleOutput:
    """The forward hook."""
    return of_first(output, lambda x: F.dropout(x, rate, module.training))
