"""query_norm: normalise queries alone."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.kernels.contract import Refusal
from qkeel.remedies.change_norm import KINDS, NormWords, plain_scale, rescaled
from qkeel.remedies.exchange import base_spec
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, Fixed
from qkeel.spec.norm import Gain


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueryNorm(NormWords):
    """q̃ = norm(q) · gain, the other side left alone.

    With the defaults z = q̂·k: RMS norm under 1/√d, which is the unit vector under 1. kind=l2 makes that vector and sets
    the scale to 1.
    """

    gain: Gain = "none"

    name = "query_norm"
    line = "normalises queries alone"
    source = "Su 2023, kexue.fm 9859 (QNA)"
    sides = ("q",)

    def supports(self, site: AttentionSite) -> Refusal | None:
        refusal = NormWords.supports(self, site)
        return refusal or (plain_scale(self.name, base_spec(site).scale) if self.kind == "l2" else None)

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        norm = KINDS[self.kind](on="q", over=self.over, gain=self.gain)
        return spec.replace(norm=norm, scale=rescaled(spec.scale, Fixed(1.0)) if self.kind == "l2" else spec.scale)
