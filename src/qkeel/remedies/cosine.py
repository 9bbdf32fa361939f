"""cosine: attention of unit vectors under a fixed scale."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.errors import InvalidValueError
from qkeel.functional.scaling import cosine_scale
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import check_number
from qkeel.remedies.change_norm import ChangeNorm, plain_scale, rescaled
from qkeel.remedies.change_spec import refuse_norm
from qkeel.remedies.exchange import base_spec
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, Fixed, L2Norm


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(ChangeNorm):
    """z = λ cos(q, k), λ = 4 ln(L/2) with L = `length`, by default the training length; or λ = `scale` itself."""

    length: int | None = None
    scale: float | None = None

    name = "cosine"
    line = "makes the logit the cosine of query and key times a fixed scale"
    source = "Su 2023, kexue.fm 9812 and 9859 (CosA)"

    def __post_init__(self) -> None:
        for option in ("length", "scale"):
            if getattr(self, option) is not None:
                check_number("cosine", option, getattr(self, option))
        if self.length is not None and self.scale is not None:
            raise InvalidValueError("cosine takes its scale from a length or as scale=…, got both")
        if self.length is not None:
            cosine_scale(self.length)  # checks that there is a logarithm to take

    @property
    def commutes(self) -> bool:
        return True

    def supports(self, site: AttentionSite) -> Refusal | None:
        return refuse_norm(site, per_dim=False) or plain_scale(self.name, base_spec(site).scale)

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        length = self.length or train_length
        if self.scale is None and length is None:
            raise InvalidValueError(
                "cosine scales by 4 ln(L/2): say L, as length=512 in the remedy or as qkeel.apply(..., "
                "train_length=512), or the scale itself, as scale=22"
            )
        value = cosine_scale(length) if self.scale is None else self.scale  # type: ignore[arg-type]
        return spec.replace(norm=L2Norm(), scale=rescaled(spec.scale, Fixed(value)))
