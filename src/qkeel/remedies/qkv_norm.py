"""qkv_norm: norms on q, k and v after the projection instead of one before it."""

from __future__ import annotations

import dataclasses
from typing import Literal, final

from torch import nn

from qkeel.errors import InvalidTypeError, unknown
from qkeel.handle import Handle, compose
from qkeel.kernels.contract import Refusal
from qkeel.nn.block import Block
from qkeel.nn.core import SpecModule
from qkeel.nn.mla import MLA
from qkeel.remedies.base import Target
from qkeel.remedies.change_spec import PER_DIM, ChangeSpec, refuse_norm
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, LayerNorm, RMSNorm
from qkeel.spec.norm import Gain

KINDS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layer": LayerNorm, "rms": RMSNorm}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKVNorm(ChangeSpec):
    """q̃ = norm(q) · gain, k̃ and ṽ likewise, per head; the block's norm before attention is dropped.

    `drop_pre_norm=false` keeps that norm. A block that norms after attention only (post, swin) has none to drop; in a
    peri block the one before goes and the one after stays.
    """

    kind: Literal["layer", "rms"] = "layer"
    gain: Gain = "dim"
    drop_pre_norm: bool = True

    name = "qkv_norm"
    line = "normalises queries, keys and values after the projection, and drops the norm before it"
    source = "Rybakov et al. 2024, arXiv 2410.16682, section 3"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of qkv_norm", self.kind, KINDS)
        KINDS[self.kind](on="qkv", gain=self.gain)  # checks the word
        if not isinstance(self.drop_pre_norm, bool):
            raise InvalidTypeError(f"expected true or false for drop_pre_norm of qkv_norm, got {self.drop_pre_norm!r}")

    def supports(self, site: AttentionSite) -> Refusal | None:
        refusal = ChangeSpec.supports(self, site) or refuse_norm(
            site, per_dim=self.kind == "layer" or self.gain in PER_DIM
        )
        if refusal is None and not isinstance(site.module, SpecModule):
            refusal = self._refuse_foreign(site)
        if refusal is None and isinstance(site.module, MLA) and self.gain in PER_DIM:
            values = site.module.sizes.value_dim
            if values != site.head_dim:
                return Refusal(
                    f"a gain per dimension of q and k ({site.head_dim}) does not fit values of {values}",
                    "use gain none, scalar or head",
                )
        return refusal

    def _refuse_foreign(self, site: AttentionSite) -> Refusal | None:
        if self.drop_pre_norm:
            return Refusal(
                "the norm before attention can be dropped in qkeel's own blocks only",
                "use drop_pre_norm=false, or qk_norm",
            )
        if not isinstance(site.module, nn.MultiheadAttention):
            return Refusal("which weights make the values can't be told at this attention", "use qk_norm")
        return None

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        return spec.replace(norm=KINDS[self.kind](on="qkv", gain=self.gain))

    def apply(self, target: Target) -> Handle:
        handles = [ChangeSpec.apply(self, target)]
        if self.drop_pre_norm:
            modules = {id(site.module) for site in target.sites}
            blocks = [m for m in target.model.modules() if isinstance(m, Block) and id(m.attention) in modules]
            handles.extend(_drop(block) for block in blocks)
        return compose(handles)


def _drop(block: Block) -> Handle:
    norm = block.attention_norm
    block.attention_norm = nn.Identity()
    for parameter in norm.parameters():
        parameter.grad = None  # out of reach of zero_grad, so an optimizer would step by it again and again

    def undo() -> None:
        block.attention_norm = norm

    return Handle(undo)
