"""softpick: rectified weights that need no sink."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.kernels.contract import Refusal
from qkeel.remedies.change_spec import ChangeSpec, refuse_normalizer
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, Softpick


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SoftpickRemedy(ChangeSpec):
    """weights = relu(e^z - 1) / (Σ|e^z - 1| + ε): rows sum to at most 1, a query may look at nothing."""

    name = "softpick"
    line = "replaces softmax by a rectified one whose rows sum to at most 1"
    source = "Zuhri et al. 2025, arXiv 2504.20966, equation 5"

    def supports(self, site: AttentionSite) -> Refusal | None:
        return refuse_normalizer(site) or ChangeSpec.supports(self, site)

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        return spec.replace(normalizer=Softpick())
