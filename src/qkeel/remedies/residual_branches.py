"""Remedies for the branches of residual blocks: norms on their outputs, and dropout of their outputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import final

from torch import nn
from torch.nn import functional as F

from qkeel.errors import check
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.nn.decoder import Block
from qkeel.remedies.added_parameters import join
from qkeel.remedies.base import Remedy, Target, compose_all, inside
from qkeel.remedies.pre_norm_blocks import (
    Branch,
    ModuleOutput,
    of_first,
    ordered,
    pre_norm_branches,
    swap,
)
from qkeel.sites.site import AttentionSite


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwinNorm(Remedy):
    """Replaces both branches x + F(N(x)) with x + N(F(x)), using the same norms.

    A branch then adds at most its gain to the residual stream, whatever its weights are. The norms keep their parameter
    objects and are renamed to the block's `attention_post_norm` and `mlp_post_norm`.
    """

    name = "swin_norm"
    line = "moves the norms of a pre-norm block from before attention and MLP to after them"
    source = "Swin V2, arXiv 2111.09883, section 3.2; Chameleon, arXiv 2405.09818, section 2.3; OLMo 2, arXiv 2501.00656"
    rule = "branches x + N(F(x)) in place of x + F(N(x)), with the same norms N"

    def holds(self, site: AttentionSite) -> Refusal | None:
        if site.spec.norm.sides == "qkv":
            return Refusal(
                "qkv_norm drops the norm before attention, which this remedy moves",
                "use one of the two",
            )
        return None

    def apply(self, target: Target) -> Handle:
        return compose_all(
            part
            for b in pre_norm_branches(target, self.name)
            for part in _norm_behind(b)
        )


def _norm_behind(branch: Branch) -> Iterator[Handle]:
    norm = branch.block.get_submodule(branch.norm)
    yield swap(branch.block, branch.norm, nn.Identity())
    yield branch.post_norm(norm)
    # Last: until then the block still computes its own order.
    yield ordered(branch.block, "swin")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeriNorm(Remedy):
    """Replaces both branches x + F(N(x)) with x + N'(F(N(x))), where N' is an RMS norm with a gain that starts at 1.

    The new norms are the block's `attention_post_norm` and `mlp_post_norm`. Their gains are added to the optimizer.
    """

    name = "peri_norm"
    line = "adds norms after attention and MLP of a pre-norm block"
    source = "Peri-LN, arXiv 2502.02732; Gemma 2, arXiv 2408.00118"
    rule = (
        "branches x + N'(F(N(x))) in place of x + F(N(x)), N' an RMS norm with a gain"
    )

    def apply(self, target: Target) -> Handle:
        return compose_all(
            part
            for b in pre_norm_branches(target, self.name)
            for part in _added(b, target)
        )


def _added(branch: Branch, target: Target) -> Iterator[Handle]:
    near = next(
        branch.block.get_submodule(branch.norm).parameters(),
        next(branch.block.parameters()),
    )
    norm = nn.RMSNorm(branch.width, eps=1e-6, device=near.device, dtype=near.dtype)
    norm.train(branch.block.training)
    yield branch.post_norm(norm)
    yield join(
        target.optimizer,
        {inside(branch.name, f"{branch.post}.weight"): norm.weight},
        near,
    )
    yield ordered(branch.block, "peri")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dropout(Remedy):
    """Applies dropout after attention and after the MLP: x + m ∘ F(N(x)) / (1 - rate).

    m ~ Bernoulli(1 - rate) for each entry, drawn from PyTorch's global generator. Evaluation is unchanged. If a
    branch's output is normed (swin, peri), dropout is applied before that norm; Chameleon's authors found that the two
    work poorly together.

    Source: Chameleon, arXiv 2405.09818, section 2.3 (7B: rate 0.1); Srivastava et al. 2014, JMLR 15.
    """

    rate: float = 0.1  #: probability that an entry is dropped

    name, may_be_zero = "dropout", ("rate",)
    line = "drops entries of the outputs of attention and MLP at random in training"
    source = "Chameleon, arXiv 2405.09818, section 2.3; Srivastava et al. 2014, JMLR 15"
    rule = "branches x + m ∘ F(N(x)) / (1 - {rate}), m ~ Bernoulli(1 - {rate}) for each entry, in training"

    def __post_init__(self) -> None:
        Remedy.__post_init__(self)
        check(self.rate < 1, "a rate under 1 for dropout", self.rate)

    def apply(self, target: Target) -> Handle:
        return compose_all(
            Handle(
                module.register_forward_hook(
                    functools.partial(_dropped, self.rate)
                ).remove
            )
            for module in _branches(target, self.name)
        )


def _branches(target: Target, remedy: str) -> list[nn.Module]:
    """Returns the attention and MLP of each block around a site.

    qkeel's own blocks may have any norm order; other blocks must be pre-norm."""
    around = {id(site.module) for site in target.sites}
    blocks = [
        m
        for m in target.model.modules()
        if isinstance(m, Block) and id(m.attention) in around
    ]
    attentions = [
        branch
        for block in blocks
        for branch in (block.attention, block.cross_attention)
        if branch is not None
    ]
    if len(attentions) == len(around):
        return [*attentions, *(block.mlp for block in blocks)]
    return [
        b.block.get_submodule(b.function) for b in pre_norm_branches(target, remedy)
    ]


def _dropped(
    rate: float, module: nn.Module, inputs: object, output: ModuleOutput
) -> ModuleOutput:
    """A forward hook that applies dropout to the first output."""
    return of_first(output, lambda x: F.dropout(x, rate, module.training))
