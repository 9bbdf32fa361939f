"""log_n: logits grow with the logarithm of how many keys a query sees."""

from __future__ import annotations

import dataclasses
from typing import Literal, final

from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import check_number
from qkeel.remedies.change_scale import ChangeScale, refuse_scaled
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, LogN


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogNRemedy(ChangeScale):
    """z ← z · ln(n)/ln(L): n keys that the query sees, L = `length`, by default the training length.

    clip=true never lowers a logit: max(1, ln n/ln L), for models trained without it. In own modules n = position + 1.
    learned=head or layer: z ← z · s · ln(n), s learned and 1/ln(L) at the start (scalable softmax).
    """

    length: int | None = None
    clip: bool = False
    learned: Literal["none", "layer", "head"] = "none"

    name = "log_n"
    line = "scales logits by ln n/ln L, so that attention stays as sharp over more keys"
    source = "Su 2021, kexue.fm 8823 and 9859; scalable softmax: Nakanishi 2025, arXiv 2501.19399"

    def __post_init__(self) -> None:
        if self.length is not None:
            check_number("log_n", "length", self.length)
        if not isinstance(self.clip, bool):
            raise InvalidTypeError(f"expected true or false for clip of log_n, got {self.clip!r}")
        # Checks that there is a logarithm to divide by, and the words.
        LogN(train_length=2 if self.length is None else self.length, clip=self.clip, learned=self.learned)

    def supports(self, site: AttentionSite) -> Refusal | None:
        return refuse_scaled(site) or ChangeScale.supports(self, site)

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        length = self.length or train_length
        if length is None:
            raise InvalidValueError(
                "log_n divides by ln L: say L, as length=512 in the remedy or as qkeel.apply(..., train_length=512)"
            )
        return spec.replace(scale=LogN(inner=spec.scale, train_length=length, clip=self.clip, learned=self.learned))
