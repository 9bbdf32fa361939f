"""softcap: cap · tanh(z / cap) on the logits."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import check_number
from qkeel.remedies.change_spec import ChangeSpec
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, NoCap, Softcap


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SoftcapRemedy(ChangeSpec):
    """Bends logits so that none exceeds `cap`; what is before the cap may still grow."""

    cap: float = 50.0

    name = "softcap"
    line = "bends logits with cap·tanh(z/cap); what is before the cap may still grow"
    source = "Gemma 2, arXiv 2408.00118"

    def __post_init__(self) -> None:
        check_number("softcap", "cap", self.cap)

    def supports(self, site: AttentionSite) -> Refusal | None:
        if not isinstance(site.spec.cap, NoCap):
            return Refusal(f"logits are capped already ({site.spec.cap.formula()})", "remove that cap first")
        return ChangeSpec.supports(self, site)

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        return spec.replace(cap=Softcap(self.cap))
