"""Remedies that normalize queries, keys or both, or values too; and cosine attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, final

from torch import nn

from qkeel.errors import InvalidValueError
from qkeel.functional.logits import cosine_scale, qk_norm_init
from qkeel.handle import Handle
from qkeel.kernels.contract import Refusal
from qkeel.nn.attention import GAU, GAUBlock, SpecModule
from qkeel.nn.decoder import Block
from qkeel.nn.mla import MLA
from qkeel.options import Count, checked
from qkeel.remedies.base import Target, compose_all
from qkeel.remedies.change_norm import KINDS, ChangeNorm, NormOptions
from qkeel.remedies.change_spec import ChangeSpec, known_length
from qkeel.remedies.pre_norm_blocks import pre_norm_branches, swap
from qkeel.sites.site import AttentionSite
from qkeel.spec import Fixed, L2Norm, Learned, Sqrt
from qkeel.spec.logits import Scale
from qkeel.spec.norm import GainKind, GainNorm

# Norms of queries and keys before their product, in all published forms, and cosine attention.


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKNorm(NormOptions):
    """Normalizes q and k: q̃ = norm(q) · gain, k̃ = norm(k) · gain. The scale is unchanged.

    kind=l2 produces unit vectors, whose logits would almost vanish under the scale 1/√d. It therefore replaces the
    scale. With gain=scalar, the new scale is one learned number per layer, initialized to log₂(L² - L), where L =
    `length`, by default the training length (Henry et al. 2020). With gain=head, there is one such number per head.
    With any other gain, the new scale is √d, which is equivalent to an RMS norm with scale 1/√d.
    """

    length: int | None = None

    name = "qk_norm"
    line = "normalises queries and keys, so no logit can exceed what the norm's gains allow"
    source = (
        "Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442"
    )

    def __post_init__(self) -> None:
        NormOptions.__post_init__(self)
        if self.length is not None:
            checked(self.length, Count, f"length of {self.name}")
            # Validates the length.
            qk_norm_init(self.length)
            if not self._learned_scale:
                raise InvalidValueError(
                    f"length={self.length} sets the initial value of a learned scale, which qk_norm has only with "
                    f"kind=l2 and gain=scalar or head, got kind={self.kind}, gain={self.gain}"
                )

    @property
    def _learned_scale(self) -> bool:
        return self.kind == "l2" and self.gain in ("scalar", "head")

    def norm(self) -> GainNorm:
        norm = NormOptions.norm(self)
        return dataclasses.replace(norm, gain="none") if self._learned_scale else norm

    def unit_scale(self, train_length: int | None) -> Scale:
        if not self._learned_scale:
            return Sqrt()
        use = "qk_norm with kind=l2 starts its learned scale at log₂(L² - L)"
        length = known_length(self.length, train_length, use)
        return Learned(
            init=qk_norm_init(length), per="layer" if self.gain == "scalar" else "head"
        )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyNorm(NormOptions):
    """Normalizes keys only: k̃ = norm(k) · gain.

    By default z = q·k̂, since an RMS norm with scale 1/√d is equivalent to a unit vector with scale 1. kind=l2 produces
    this unit vector and sets the scale to 1.
    """

    gain: GainKind = "none"

    name = "key_norm"
    line = "normalises keys alone"
    source = "Su 2023, kexue.fm 9859 (KNA)"
    sides = ("k",)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryNorm(NormOptions):
    """Normalizes queries only: q̃ = norm(q) · gain.

    By default z = q̂·k, since an RMS norm with scale 1/√d is equivalent to a unit vector with scale 1. kind=l2 produces
    this unit vector and sets the scale to 1.
    """

    gain: GainKind = "none"

    name = "query_norm"
    line = "normalises queries alone"
    source = "Su 2023, kexue.fm 9859 (QNA)"
    sides = ("q",)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(ChangeNorm):
    """Logits z = λ cos(q, k), where λ = 4 ln(L/2) with L = `length`, by default the training length, or λ = `scale`."""

    length: int | None = None
    scale: float | None = None

    name = "cosine"
    line = "makes the logit the cosine of query and key times a fixed scale"
    source = "Su 2023, kexue.fm 9812 and 9859 (CosA)"

    def __post_init__(self) -> None:
        ChangeNorm.__post_init__(self)
        if self.length is not None and self.scale is not None:
            raise InvalidValueError("cosine takes either a length or scale=…, got both")
        if self.length is not None:
            # Validates the length.
            cosine_scale(self.length)

    def norm(self) -> GainNorm:
        return L2Norm()

    def unit_scale(self, train_length: int | None) -> Scale:
        if self.scale is not None:
            return Fixed(self.scale)
        otherwise = ", or the scale itself, as scale=22"
        return Fixed(
            cosine_scale(
                known_length(
                    self.length, train_length, "cosine scales by 4 ln(L/2)", otherwise
                )
            )
        )


# Norms of q, k and v after the projection instead of a norm before it.


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
            elif (
                isinstance(block, GAUBlock)
                and id(block.attention) in modules
                and block.norm_order == "pre"
            ):
                yield _drop(block, "norm")
        foreign = [
            site for site in target.sites if not isinstance(site.module, SpecModule)
        ]
        if foreign:
            branches = pre_norm_branches(
                dataclasses.replace(target, sites=foreign),
                f"{self.name} (drop_pre_norm)",
            )
            around = {
                (b.name, b.function): b
                for b in branches
                if b.post == "attention_post_norm"
            }
            for branch in around.values():
                yield _drop(branch.block, branch.norm)


def _drop(block: nn.Module, name: str) -> Handle:
    """Replaces the named norm of a block with the identity."""
    norm = block.get_submodule(name)
    for parameter in norm.parameters():
        # zero_grad no longer reaches it, so an optimizer would apply it in every step.
        parameter.grad = None
    return swap(block, name, nn.Identity())
