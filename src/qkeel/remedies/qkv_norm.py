"""qkv_norm: norms on q, k and v after the projection instead of one before it."""

from __future__ import annotations

import dataclasses
from typing import Literal, final

from torch import nn

from qkeel.errors import unknown
from qkeel.handle import Handle, compose
from qkeel.kernels.contract import Refusal
from qkeel.nn.block import Block
from qkeel.remedies.base import Target
from qkeel.remedies.change_spec import ChangeSpec
from qkeel.sites.find import is_normed
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, LayerNorm, RMSNorm
from qkeel.spec.norm import Gain

KINDS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layer": LayerNorm, "rms": RMSNorm}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKVNorm(ChangeSpec):
    """Norm on q, k and v per head; the block's norm before attention is dropped (drop_pre_norm)."""

    kind: Literal["layer", "rms"] = "layer"
    gain: Gain = "dim"
    drop_pre_norm: bool = True

    name = "qkv_norm"
    line = "normalises queries, keys and values after the projection, and drops the norm before it"
    source = "Rybakov et al. 2024, arXiv 2410.16682, section 3"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of qkv_norm", self.kind, KINDS)

    def supports(self, site: AttentionSite) -> Refusal | None:
        if is_normed(site):
            return Refusal("q and k are normed already", "remove that norm first, or leave it be")
        return ChangeSpec.supports(self, site)

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

    def undo() -> None:
        block.attention_norm = norm

    return Handle(undo)
