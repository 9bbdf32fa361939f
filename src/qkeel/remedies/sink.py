"""sink: a place for attention to go that has no value."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.errors import InvalidTypeError
from qkeel.kernels.contract import Refusal
from qkeel.remedies.change_spec import ChangeSpec, refuse_normalizer
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, Sink


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SinkRemedy(ChangeSpec):
    """weights = e^z / (e^s + Σ e^z), s learned per head from `init`; learned=false: the constant, 0 is "off by one"."""

    learned: bool = True
    init: float = 0.0

    name = "sink"
    line = "adds a sink to the softmax, so that a query may look at nothing"
    source = "gpt-oss as shipped in transformers 5.23; Miller 2023, Attention is off by one"

    def __post_init__(self) -> None:
        if not isinstance(self.learned, bool):
            raise InvalidTypeError(f"expected true or false for learned of sink, got {self.learned!r}")
        if isinstance(self.init, bool) or not isinstance(self.init, (int, float)):
            raise InvalidTypeError(f"expected a number for init of sink, got {self.init!r}")
        Sink(init=float(self.init))  # checks the number

    def supports(self, site: AttentionSite) -> Refusal | None:
        return refuse_normalizer(site) or ChangeSpec.supports(self, site)

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        return spec.replace(normalizer=Sink(learned=self.learned, init=float(self.init)))
