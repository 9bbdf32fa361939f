"""Norms on q, k and v after the projection instead of one before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, final

from torch import nn

from qkeel.handle import Handle
from qkeel.heads.site import AttentionSite
from qkeel.kernels.contract import Refusal
from qkeel.nn.block import Block
from qkeel.nn.gau import GAU, GAUBlock
from qkeel.nn.mla import MLA
from qkeel.nn.spec_module import SpecModule
from qkeel.remedies.attention.change_norm import KINDS, ChangeNorm
from qkeel.remedies.attention.change_spec import ChangeSpec
from qkeel.remedies.base import Target, compose_all
from qkeel.remedies.blocks.residual_blocks import pre_norm_branches, swap
from qkeel.spec.norm import Gain, GainNorm


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKVNorm(ChangeNorm):
    """Norms q̃ = norm(q) · gain, k̃ and ṽ likewise, per head; the block's norm before attention is dropped.

    Values are those that attention multiplies by its weights, of the model's key-value heads. `drop_pre_norm=false`
    keeps the norm before attention; on other people's models that norm is found by what flows through the block, and
    refused where it is not. Of qkeel's own blocks one that norms after attention only (post, swin) has none to drop;
    in a peri block the one before goes and the one after stays.
    """

    kind: Literal["layer", "rms"] = "layer"  #: LayerNorm or RMS norm
    gain: Gain = "dim"  #: its shape, see `qkeel.spec.RMSNorm`
    drop_pre_norm: bool = True

    sides = ("q", "k", "v")
    name = "qkv_norm"
    line = "normalises queries, keys and values after the projection, and drops the norm before it"
    source = "Rybakov et al. 2024, arXiv 2410.16682, section 3"

    def norm(self) -> GainNorm:
        return KINDS[self.kind](on="qkv", gain=self.gain)

    def supports(self, site: AttentionSite) -> Refusal | None:
        refusal = ChangeSpec.supports(self, site) or ChangeNorm.supports(self, site)
        values = site.head_dim
        if isinstance(site.module, MLA):
            values = site.module.sizes.value_dim
        elif isinstance(site.module, GAU):
            values = site.module.hidden
        if refusal is None and self.gain in ("dim", "one_plus_dim", "head_dim") and values != site.head_dim:
            return Refusal(
                f"a gain per dimension of q and k ({site.head_dim}) does not fit values of {values}",
                "use gain none, scalar or head",
            )
        return refusal

    def apply(self, target: Target) -> Handle:
        return compose_all(self._all(target))

    def _all(self, target: Target) -> Iterator[Handle]:
        yield ChangeSpec.apply(self, target)
        if not self.drop_pre_norm:
            return
        modules = {id(site.module) for site in target.sites}
        for block in target.model.modules():
            if isinstance(block, Block) and id(block.attention) in modules:
                yield _drop(block, "attention_norm")
                if block.cross_attention is not None:
                    yield _drop(block, "cross_attention_norm")
            elif isinstance(block, GAUBlock) and id(block.attention) in modules and block.norm_order == "pre":
                yield _drop(block, "norm")
        foreign = [site for site in target.sites if not isinstance(site.module, SpecModule)]
        if foreign:
            branches = pre_norm_branches(dataclasses.replace(target, sites=foreign), f"{self.name} (drop_pre_norm)")
            around = {(b.name, b.function): b for b in branches if b.post == "attention_post_norm"}
            for branch in around.values():
                yield _drop(branch.block, branch.norm)


def _drop(block: nn.Module, name: str) -> Handle:
    """Puts the identity in the place of a block's norm of that name."""
    norm = block.get_submodule(name)
    for parameter in norm.parameters():
        parameter.grad = None  # out of reach of zero_grad, so an optimizer would step by it again and again
    return swap(block, name, nn.Identity())
