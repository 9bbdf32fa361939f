"""sigmoid: weights that do not compete."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.errors import InvalidTypeError, InvalidValueError
from qkeel.functional.scaling import sigmoid_bias
from qkeel.kernels.contract import Refusal
from qkeel.remedies.base import check_number
from qkeel.remedies.change_spec import ChangeSpec, refuse_normalizer
from qkeel.sites.site import AttentionSite
from qkeel.spec import AttentionSpec, Sigmoid


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidRemedy(ChangeSpec):
    """weights = σ(z + b), b = -ln L with L = `length`, by default the training length; learned=true: b per head."""

    length: int | None = None
    learned: bool = False

    name = "sigmoid"
    line = "replaces softmax by a sigmoid with a bias, so that keys do not compete"
    source = "Ramapuram et al. 2024, arXiv 2409.04431, equation 3"

    def __post_init__(self) -> None:
        if self.length is not None:
            check_number("sigmoid", "length", self.length)
        if not isinstance(self.learned, bool):
            raise InvalidTypeError(f"expected true or false for learned of sigmoid, got {self.learned!r}")

    def supports(self, site: AttentionSite) -> Refusal | None:
        return refuse_normalizer(site) or ChangeSpec.supports(self, site)

    def changed(self, spec: AttentionSpec, train_length: int | None) -> AttentionSpec:
        length = self.length or train_length
        if length is None:
            raise InvalidValueError(
                "sigmoid starts its bias at -ln L: say L, as length=512 in the remedy or as qkeel.apply(..., "
                "train_length=512)"
            )
        return spec.replace(normalizer=Sigmoid(bias=sigmoid_bias(length), learned=self.learned))
