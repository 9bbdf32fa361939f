"""attention_temperature: logits grow with the logarithm of the position, in steps."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.errors import InvalidValueError
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import check_number
from qkeel.remedies.change_scale import ChangeScale, refuse_scaled
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec
from qkeel.spec.scale import FloorLogTemperature


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTemperature(ChangeScale):
    """z ← z · (1 + alpha·ln(1 + ⌊n/floor⌋)): n keys that the query sees. alpha=0 changes nothing."""

    alpha: float = 0.1
    floor: int = 8192

    name = "attention_temperature"
    line = "scales logits by 1 + α ln(1 + ⌊n/floor⌋), a temperature for long contexts only"
    source = "Llama 4 as shipped in transformers 5.23 (attn_scale, floor_scale)"

    def __post_init__(self) -> None:
        check_number("attention_temperature", "alpha", self.alpha, zero=True)
        check_number("attention_temperature", "floor", self.floor)
        if int(self.floor) != self.floor:
            raise InvalidValueError(f"expected a whole number for floor of attention_temperature, got {self.floor}")

    def supports(self, site: AttentionSite) -> Refusal | None:
        return refuse_scaled(site) or ChangeScale.supports(self, site)

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        return spec.replace(scale=FloorLogTemperature(inner=spec.scale, alpha=self.alpha, floor=int(self.floor)))
