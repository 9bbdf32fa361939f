"""The norms before attention and MLP, put behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import final

from torch import nn

from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import Remedy, Target, compose_all
from qkeel.remedies.blocks.residual_blocks import Branch, ordered, pre_norm_branches, swap
from qkeel.sites.site import AttentionSite


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwinNorm(Remedy):
    """Branches x + N(F(x)) in place of x + F(N(x)), in both branches, with the same norms.

    A branch then adds at most its gain to the residual stream, whatever its weights. The norms' parameters stay the
    same objects; their names change to `attention_post_norm` and `mlp_post_norm` of the block.
    """

    name, stacks = "swin_norm", True
    line = "moves the norms of a pre-norm block behind attention and MLP"
    source = (
        "Swin V2, arXiv 2111.09883, section 3.2; Chameleon, arXiv 2405.09818, section 2.3; OLMo 2, arXiv 2501.00656"
    )
    rule = "branches x + N(F(x)) in place of x + F(N(x)), with the same norms N"

    def holds(self, site: AttentionSite) -> Refusal | None:
        if site.spec.norm.sides == "qkv":
            return Refusal("qkv_norm drops the norm before attention, which this remedy moves", "use one of the two")
        return None

    def apply(self, target: Target) -> Handle:
        return compose_all(part for b in pre_norm_branches(target, self.name) for part in _norm_behind(b))


def _norm_behind(branch: Branch) -> Iterator[Handle]:
    norm = branch.block.get_submodule(branch.norm)
    yield swap(branch.block, branch.norm, nn.Identity())
    yield branch.post_norm(norm)
    yield ordered(branch.block, "swin")
