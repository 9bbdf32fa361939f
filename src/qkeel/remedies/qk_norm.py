"""Norms of queries and keys, or of one of them, before their product, in any published layout; cosine attention."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.errors import InvalidValueError
from qkeel.functional.scaling import cosine_scale, qk_norm_init
from qkeel.options import Count, checked
from qkeel.remedies.attention.change_norm import ChangeNorm, NormOptions
from qkeel.remedies.attention.change_spec import known_length
from qkeel.spec import Fixed, L2Norm, Learned, Sqrt
from qkeel.spec.norm import Gain, GainNorm
from qkeel.spec.scale import Scale


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QKNorm(NormOptions):
    """Norms q̃ = norm(q) · gain, k̃ = norm(k) · gain, the scale kept.

    kind=l2 makes unit vectors, so 1/√d would leave no logit: with gain=scalar the scale is one learned number
    per layer that starts at log₂(L² - L) (Henry et al. 2020; L = `length`, by default the training length),
    with gain=head one per head, else it is √d, the same as a gain-free RMS norm under 1/√d.
    """

    length: int | None = None

    name = "qk_norm"
    line = "normalises queries and keys, so a logit cannot outgrow its gains"
    source = "Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442"

    def __post_init__(self) -> None:
        NormOptions.__post_init__(self)
        if self.length is not None:
            checked(self.length, Count, f"length of {self.name}")
            qk_norm_init(self.length)  # checks that there is a logarithm to take
            if not self._learned_scale:
                raise InvalidValueError(
                    f"length={self.length} starts a learned scale, which qk_norm has with kind=l2 and gain=scalar or "
                    f"head only, got kind={self.kind}, gain={self.gain}"
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
        return Learned(init=qk_norm_init(length), per="layer" if self.gain == "scalar" else "head")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeyNorm(NormOptions):
    """A norm k̃ = norm(k) · gain, queries left alone. With the defaults z = q·k̂: RMS norm under 1/√d, which is the
    unit vector under 1. kind=l2 makes that vector and sets the scale to 1."""

    gain: Gain = "none"

    name = "key_norm"
    line = "normalises keys alone"
    source = "Su 2023, kexue.fm 9859 (KNA)"
    sides = ("k",)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryNorm(NormOptions):
    """A norm q̃ = norm(q) · gain, keys left alone. With the defaults z = q̂·k: RMS norm under 1/√d, which is the unit
    vector under 1. kind=l2 makes that vector and sets the scale to 1."""

    gain: Gain = "none"

    name = "query_norm"
    line = "normalises queries alone"
    source = "Su 2023, kexue.fm 9859 (QNA)"
    sides = ("q",)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(ChangeNorm):
    """Logits z = λ cos(q, k), λ = 4 ln(L/2) with L = `length`, by default the training length; or λ = `scale`."""

    length: int | None = None
    scale: float | None = None

    name = "cosine"
    line = "makes the logit the cosine of query and key times a fixed scale"
    source = "Su 2023, kexue.fm 9812 and 9859 (CosA)"

    def __post_init__(self) -> None:
        ChangeNorm.__post_init__(self)
        if self.length is not None and self.scale is not None:
            raise InvalidValueError("cosine takes its scale from a length or as scale=…, got both")
        if self.length is not None:
            cosine_scale(self.length)  # checks that there is a logarithm to take

    def norm(self) -> GainNorm:
        return L2Norm()

    def unit_scale(self, train_length: int | None) -> Scale:
        if self.scale is not None:
            return Fixed(self.scale)
        otherwise = ", or the scale itself, as scale=22"
        return Fixed(cosine_scale(known_length(self.length, train_length, "cosine scales by 4 ln(L/2)", otherwise)))
