"""qk_norm: normalise queries and keys before they meet, in any published layout."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.errors import InvalidValueError, unknown
from qkeel.functional.scaling import qk_norm_init
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import check_number
from qkeel.remedies.change_norm import KINDS, NormWords, plain_scale, rescaled
from qkeel.remedies.exchange import base_spec
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, L2Norm, Learned, Sqrt
from qkeel.spec.scale import Scale


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKNorm(NormWords):
    """q̃ = norm(q) · gain, k̃ = norm(k) · gain, the scale kept.

    kind=l2 makes unit vectors, so 1/√d would leave no logit: with gain=scalar the scale is one learned number
    per layer that starts at log₂(L² - L) (Henry et al. 2020; L = `length`, by default the training length),
    with gain=head one per head, else it is √d, the same as a gain-free RMS norm under 1/√d.
    """

    length: int | None = None

    name = "qk_norm"
    line = "normalises queries and keys, so a logit cannot outgrow its gains"
    source = "Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of qk_norm", self.kind, KINDS)
        KINDS[self.kind](over=self.over, gain="none" if self._learned_scale else self.gain)  # checks the words
        if self.length is not None:
            check_number("qk_norm", "length", self.length)
            qk_norm_init(self.length)  # checks that there is a logarithm to take
            if not self._learned_scale:
                raise InvalidValueError(
                    f"length={self.length} starts a learned scale, which qk_norm has with kind=l2 and gain=scalar or "
                    f"head only, got kind={self.kind}, gain={self.gain}"
                )

    @property
    def _learned_scale(self) -> bool:
        return self.kind == "l2" and self.gain in ("scalar", "head")

    @property
    def commutes(self) -> bool:
        return self.kind != "layer" and self.over == "head" and (self.gain in ("none", "scalar") or self._learned_scale)

    def supports(self, site: AttentionSite) -> Refusal | None:
        refusal = NormWords.supports(self, site)
        return refusal or (plain_scale(self.name, base_spec(site).scale) if self.kind == "l2" else None)

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        if self.kind != "l2":
            return spec.replace(norm=KINDS[self.kind](over=self.over, gain=self.gain))
        gain = "none" if self._learned_scale else self.gain
        scale = rescaled(spec.scale, self._scale(train_length))
        return spec.replace(norm=L2Norm(over=self.over, gain=gain), scale=scale)

    def _scale(self, train_length: int | None) -> Scale:
        """The scale of unit vectors in place of 1/√d."""
        if not self._learned_scale:
            return Sqrt()
        length = self.length or train_length
        if length is None:
            raise InvalidValueError(
                "qk_norm with kind=l2 starts its learned scale at log₂(L² - L): say L, as length=512 in the remedy "
                "or as qkeel.apply(..., train_length=512)"
            )
        return Learned(init=qk_norm_init(length), per="layer" if self.gain == "scalar" else "head")
