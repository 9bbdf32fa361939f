"""Attention of unit vectors under a fixed scale."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.errors import InvalidValueError
from qkeel.functional.scaling import cosine_scale
from qkeel.kernels.contract import Refusal
from qkeel.remedies.attention.change_norm import ChangeNorm
from qkeel.remedies.attention.change_spec import known_length
from qkeel.remedies.attention.exchange_calls import base_spec
from qkeel.remedies.attention.refusals import refuse_norm, refuse_scale
from qkeel.remedies.base import check_number
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, Fixed, L2Norm


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
        for option, value in (("length", self.length), ("scale", self.scale)):
            if value is not None:
                check_number("cosine", option, value)
        if self.length is not None and self.scale is not None:
            raise InvalidValueError("cosine takes its scale from a length or as scale=…, got both")
        if self.length is not None:
            cosine_scale(self.length)  # checks that there is a logarithm to take

    @property
    def works_in_call(self) -> bool:
        return True

    def supports(self, site: AttentionSite) -> Refusal | None:
        return refuse_norm(site, L2Norm()) or refuse_scale(self.name, base_spec(site).scale)

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        value = self.scale
        if value is None:
            otherwise = ", or the scale itself, as scale=22"
            value = cosine_scale(known_length(self.length, train_length, "cosine scales by 4 ln(L/2)", otherwise))
        return spec.replace(norm=L2Norm(), scale=spec.scale.with_base(Fixed(value)))
