"""Normalizer slot: logits to weights."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Literal

import torch

from qkeel.errors import check
from qkeel.functional import normalizers as F
from qkeel.spec.shapes import Logits, Visible
from qkeel.spec.slot import Geometry, Parameter, Params, Slot

NormalizerKind = Literal["softmax", "sink", "sigmoid", "squared_relu", "softpick", "other"]


class Normalizer(Slot):
    """Turns logits [b h t s] into weights; `visible` broadcasts to them, None means all."""

    __slots__ = ()
    kind: NormalizerKind = "other"
    softmax_over_keys: bool = False  # are the weights, made to sum to one, those of a plain softmax?

    @abc.abstractmethod
    def weights(self, logits: Logits, visible: Visible | None, params: Params) -> Logits:
        """Weights, 0 where not visible."""


@dataclasses.dataclass(frozen=True, slots=True)
class Softmax(Normalizer):
    """Softmax weights exp(z) / Σ exp(z)."""

    kind = "softmax"
    softmax_over_keys = True

    def weights(self, logits: Logits, visible: Visible | None, params: Params) -> Logits:
        return F.softmax(logits, visible)

    def formula(self) -> str:
        return "softmax(z)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sink(Normalizer):
    """Weights exp(z) / (exp(s) + Σ exp(z)): s learned per head (gpt-oss), or the constant 0 ("off by one")."""

    learned: bool = True  #: whether s is learned, per head
    init: float = 0.0  #: s, at the start where it is learned; below +inf
    kind = "sink"
    softmax_over_keys = True

    def __post_init__(self) -> None:
        check(self.init < math.inf, "a sink that is a number below infinity", self.init)

    def parameters(self, geometry: Geometry) -> dict[str, Parameter]:
        return {"sink": Parameter((geometry.n_heads, 1, 1), self.init)} if self.learned else {}

    def weights(self, logits: Logits, visible: Visible | None, params: Params) -> Logits:
        sink = params["sink"] if self.learned else torch.tensor(self.init, device=logits.device)
        return F.sink_softmax(logits, sink, visible)

    def formula(self) -> str:
        return f"exp(z)/(exp({'s_h' if self.learned else f'{self.init:g}'}) + Σ exp(z))"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sigmoid(Normalizer):
    """σ(z + b); b = -ln(training length) is the published start."""

    bias: float  #: b, finite
    learned: bool = False  #: whether b is learned, per head
    kind = "sigmoid"

    def __post_init__(self) -> None:
        check(math.isfinite(self.bias), "a finite bias", self.bias)

    def parameters(self, geometry: Geometry) -> dict[str, Parameter]:
        return {"logit_bias": Parameter((geometry.n_heads, 1, 1), self.bias)} if self.learned else {}

    def weights(self, logits: Logits, visible: Visible | None, params: Params) -> Logits:
        bias = params["logit_bias"].to(logits.dtype) if self.learned else self.bias
        return F.sigmoid(logits, bias, visible)

    def formula(self) -> str:
        return f"σ(z {self.bias:+.4g})" + (" (bias learned)" if self.learned else "")


@dataclasses.dataclass(frozen=True, slots=True)
class SquaredReLU(Normalizer):
    """Weights relu(z)² / n."""

    kind = "squared_relu"

    def weights(self, logits: Logits, visible: Visible | None, params: Params) -> Logits:
        return F.squared_relu(logits, visible)

    def formula(self) -> str:
        return "relu(z)²/n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Softpick(Normalizer):
    """Weights relu(e^z - 1) / Σ|e^z - 1|."""

    eps: float = 1e-8  #: above 0, added to the sum
    kind = "softpick"

    def __post_init__(self) -> None:
        check(self.eps > 0, "eps above 0", self.eps)

    def weights(self, logits: Logits, visible: Visible | None, params: Params) -> Logits:
        return F.softpick(logits, visible, self.eps)

    def formula(self) -> str:
        return "relu(e^z - 1)/(Σ|e^z - 1| + ε)"
