"""Attention of unit vectors under a fixed scale."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.errors import InvalidValueError
from qkeel.functional.scaling import cosine_scale
from qkeel.remedies.attention.change_norm import ChangeNorm
from qkeel.remedies.attention.change_spec import known_length
from qkeel.spec import Fixed, L2Norm
from qkeel.spec.norm import GainNorm
from qkeel.spec.scale import Scale


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
