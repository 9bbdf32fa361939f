"""Norms behind attention and MLP besides those before them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import final

from torch import nn

from qkeel.handle import Handle
from qkeel.nn.block import Block
from qkeel.remedies.base import Remedy, Target, compose_all
from qkeel.remedies.blocks.residual_blocks import Branch, pre_norm_branches
from qkeel.remedies.steps.join_optimizer import join


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeriNorm(Remedy):
    """Branches x + N'(F(N(x))) in place of x + F(N(x)), N' an RMS norm with a gain that starts at 1. The new norms
    are `attention_post_norm` and `mlp_post_norm` of the block; their gains join the optimizer."""

    name = "peri_norm"
    line = "adds norms behind attention and MLP of a pre-norm block"
    source = "Peri-LN, arXiv 2502.02732; Gemma 2, arXiv 2408.00118"

    def apply(self, target: Target) -> Handle:
        return compose_all(part for b in pre_norm_branches(target, self.name) for part in _added(b, target))


def _added(branch: Branch, target: Target) -> Iterator[Handle]:
    like = next(branch.block.get_submodule(branch.norm).parameters(), next(branch.block.parameters()))
    norm = nn.RMSNorm(branch.width, eps=1e-6, device=like.device, dtype=like.dtype)
    norm.train(branch.block.training)
    yield branch.post_norm(norm)
    name = ".".join(part for part in (branch.name, branch.post, "weight") if part)
    yield join(target.optimizer, {name: norm.weight}, like)
    block = branch.block
    if isinstance(block, Block) and block.norm_order == "pre":
        block.norm_order = "peri"
        yield Handle(lambda: setattr(block, "norm_order", "pre"))
