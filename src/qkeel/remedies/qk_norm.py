"""Remedies that normalize queries, keys or both, in all published forms; and cosine attention. They say which norm;
`insert_norms` puts it into the model."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.errors import InvalidValueError
from qkeel.functional.logits import cosine_scale, qk_norm_init
from qkeel.options import Count, checked
from qkeel.remedies.insert_norms import ChangeNorm, NormOptions
from qkeel.remedies.spec_remedy import known_length
from qkeel.spec import Fixed, L2Norm, Learned, Sqrt
from qkeel.spec.logits import Scale
from qkeel.spec.norm import GainKind, GainNorm


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
