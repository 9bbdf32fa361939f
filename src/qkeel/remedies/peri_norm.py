"""Norms behind attention and MLP in addition to those before them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import final

from torch import nn

from qkeel.handle import Handle
from qkeel.remedies.base import Remedy, Target, compose_all, inside
from qkeel.remedies.blocks.residual_blocks import Branch, ordered, pre_norm_branches
from qkeel.remedies.steps.join_optimizer import join


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeriNorm(Remedy):
    """Branches x + N'(F(N(x))) in place of x + F(N(x)), N' an RMS norm with a gain that starts at 1. The new norms
    are `attention_post_norm` and `mlp_post_norm` of the block; their gains join the optimizer."""

    name, stacks = "peri_norm", True
    line = "adds norms behind attention and MLP of a pre-norm block"
    source = "Peri-LN, arXiv 2502.02732; Gemma 2, arXiv 2408.00118"
    rule = "branches x + N'(F(N(x))) in place of x + F(N(x)), N' an RMS norm with a gain"

    def apply(self, target: Target) -> Handle:
        return compose_all(part for b in pre_norm_branches(target, self.name) for part in _added(b, target))


def _added(branch: Branch, target: Target) -> Iterator[Handle]:
    like = next(branch.block.get_submodule(branch.norm).parameters(), next(branch.block.parameters()))
    norm = nn.RMSNorm(branch.width, eps=1e-6, device=like.device, dtype=like.dtype)
    norm.train(branch.block.training)
    yield branch.post_norm(norm)
    yield join(target.optimizer, {inside(branch.name, f"{branch.post}.weight"): norm.weight}, like)
    yield ordered(branch.block, "peri")
