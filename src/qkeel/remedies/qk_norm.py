"""qk_norm: normalise queries and keys before they meet, in any published layout."""

from __future__ import annotations

import dataclasses
from typing import Literal, final

from qkeel.errors import InvalidValueError, unknown
from qkeel.functional.scaling import qk_norm_init
from qkeel.kernels.contract import Refusal
from qkeel.remedies.change_spec import ChangeSpec
from qkeel.sites.find import is_normed
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, L2Norm, LayerNorm, Learned, RMSNorm, Sqrt
from qkeel.spec.norm import Gain, GainNorm, Over

KINDS: dict[str, type[GainNorm]] = {"rms": RMSNorm, "layer": LayerNorm, "l2": L2Norm}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKNorm(ChangeSpec):
    """q̃ = norm(q) · gain, k̃ = norm(k) · gain, the scale kept.

    kind=l2 makes unit vectors, so 1/√d would leave no logit: with gain=scalar the scale is one learned number
    per layer that starts at log₂(L² - L) (Henry et al. 2020; L = `length`, by default the training length),
    with gain=head one per head, else it is √d, the same as a gain-free RMS norm under 1/√d.
    """

    kind: Literal["rms", "layer", "l2"] = "rms"
    over: Over = "head"
    gain: Gain = "dim"
    length: int | None = None

    name = "qk_norm"
    line = "normalises queries and keys, so a logit cannot outgrow its gains"
    source = "Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of qk_norm", self.kind, KINDS)
        KINDS[self.kind](over=self.over, gain="none" if self._scalar_l2 else self.gain)  # checks the words
        if self.length is not None and self.length < 2:
            raise InvalidValueError(f"expected a length of at least 2, got {self.length}")

    @property
    def _scalar_l2(self) -> bool:
        return self.kind == "l2" and self.gain in ("scalar", "head")

    def supports(self, site: AttentionSite) -> Refusal | None:
        if is_normed(site):
            return Refusal("q and k are normed already", "remove that norm first, or leave it be")
        return ChangeSpec.supports(self, site)

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        if self.kind != "l2":
            return spec.replace(norm=KINDS[self.kind](over=self.over, gain=self.gain))
        if not self._scalar_l2:
            return spec.replace(norm=L2Norm(over=self.over, gain=self.gain), scale=Sqrt())
        length = self.length or train_length
        if length is None:
            raise InvalidValueError(
                "qk_norm with kind=l2 starts its learned scale at log₂(L² - L): say L, as length=512 in the remedy "
                "or as qkeel.apply(..., train_length=512)"
            )
        per = "layer" if self.gain == "scalar" else "head"
        return spec.replace(norm=L2Norm(over=self.over), scale=Learned(init=qk_norm_init(length), per=per))
