"""Norms of q, k and v after the projection instead of a norm before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, final

from torch import nn

from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.nn.attention import GAU, GAUBlock, SpecModule
from qkeel.nn.decoder import Block
from qkeel.nn.mla import MLA
from qkeel.remedies.base import Target, compose_all
from qkeel.remedies.insert_norms import KINDS, ChangeNorm
from qkeel.remedies.pre_norm_blocks import pre_norm_branches, swap
from qkeel.remedies.spec_remedy import ChangeSpec
from qkeel.sites.site import AttentionSite
from qkeel.spec.norm import GainKind, GainNorm


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKVNorm(ChangeNorm):
    """Normalizes q, k and v per head after the projection, as norm(x) · gain, and drops the block's norm before
    attention.

    The values are normalized per key-value head. `drop_pre_norm=false` keeps the norm before attention. In models from
    other libraries, that norm is recognised by the block's activations, and the remedy is refused if it is not found.
    qkeel's post and swin blocks have no such norm to drop. A peri block loses the norm before attention and keeps the
    norm after it.
    """

    kind: Literal["layer", "rms"] = "layer"  #: LayerNorm or RMS norm
    gain: GainKind = "dim"  #: shape of the gain; see `qkeel.spec.RMSNorm`
    drop_pre_norm: bool = True

    sides = ("q", "k", "v")
    name = "qkv_norm"
    line = "normalises queries, keys and values after the projection, and drops the norm before it"
    source = "Rybakov et al. 2024, arXiv 2410.16682, section 3"

    def norm(self) -> GainNorm:
        return KINDS[self.kind](on="qkv", gain=self.gain)

    def supports(self, site: AttentionSite) -> Refusal | None:
        # Norms of q and k after their projections serve attention whose call is not seen too, so ChangeNorm does not
        # ask for it; but which weights make the values shows in that call alone.
        refusal = ChangeSpec.supports(self, site) or ChangeNorm.supports(self, site)
        values = site.head_dim
        if isinstance(site.module, MLA):
            values = site.module.sizes.value_dim
        elif isinstance(site.module, GAU):
            values = site.module.hidden
        if (
            refusal is None
            and self.gain in ("dim", "one_plus_dim", "head_dim")
            and values != site.head_dim
        ):
            return Refusal(
                f"a gain per dimension of q and k ({site.head_dim}) does not fit values of {values}",
                "use gain none, scalar or head",
            )
        return refusal

    def apply(self, target: Target) -> Handle:
        return compose_all(self._norms_and_drops(target))

    def _norms_and_drops(self, target: Target) -> Iterator[Handle]:
        yield ChangeSpec.apply(self, target)
        if self.drop_pre_norm:
            yield from _drop_in_own_blocks(target)
            yield from self._drop_in_foreign_blocks(target)

    def _drop_in_foreign_blocks(self, target: Target) -> Iterator[Handle]:
        """Drops the norms before attention in blocks of other libraries, which show in the blocks' activations."""
        foreign = [
            site for site in target.sites if not isinstance(site.module, SpecModule)
        ]
        if not foreign:
            return
        branches = pre_norm_branches(
            dataclasses.replace(target, sites=foreign), f"{self.name} (drop_pre_norm)"
        )
        # The branches of attention, each once; the others end in the MLP.
        of_attention = {
            (branch.name, branch.function): branch
            for branch in branches
            if branch.post == "attention_post_norm"
        }
        for branch in of_attention.values():
            yield _drop(branch.block, branch.norm)


def _drop_in_own_blocks(target: Target) -> Iterator[Handle]:
    """Drops the norms before attention in qkeel's own blocks."""
    modules = {id(site.module) for site in target.sites}
    for block in target.model.modules():
        if isinstance(block, Block) and id(block.attention) in modules:
            yield _drop(block, "attention_norm")
            if block.cross_attention is not None:
                yield _drop(block, "cross_attention_norm")
        elif (
            isinstance(block, GAUBlock)
            and id(block.attention) in modules
            and block.norm_order == "pre"
        ):
            yield _drop(block, "norm")


def _drop(block: nn.Module, name: str) -> Handle:
    """Replaces the named norm of a block with the identity."""
    norm = block.get_submodule(name)
    for parameter in norm.parameters():
        # zero_grad no longer reaches it, so an optimizer would apply it in every step.
        parameter.grad = None
    return swap(block, name, nn.Identity())
