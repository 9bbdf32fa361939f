"""The norm slot: which of q, k and v are normalised, over which axis, and with which gain.

Shapes: b batch, t tokens, h heads, d head size.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from qkeel.errors import InvalidValueError, RefusedError, check, check_known
from qkeel.functional.norms import (
    apply_gain,
    inverse_l2,
    inverse_rms,
    l2_norm,
    layer_norm,
    rms_norm,
)
from qkeel.spec.slot import HeadTensor, Parameter, ParameterSizes, Params, Shape, Slot

On = Literal["q", "k", "qk", "qkv"]
Over = Literal["head", "layer"]
GainKind = Literal["none", "dim", "one_plus_dim", "head_dim", "scalar", "head"]
NormedPart = Literal["q", "k", "v"]
# The statistic that a norm divides by. Kernels do not support "other", so torch computes it.
NormKind = Literal["none", "rms", "l2", "layer", "other"]

_PARTS: tuple[NormedPart, ...] = ("q", "k", "v")
# How each gain is written in a formula, and the gain's shape for a given number of heads and head size.
_GAINS: dict[GainKind, tuple[str, Callable[[int, int], Shape]]] = {
    "none": ("", lambda heads, dim: ()),
    "dim": (" · w", lambda heads, dim: (dim,)),
    "one_plus_dim": (" · (1 + w)", lambda heads, dim: (dim,)),
    "head_dim": (" · w_h", lambda heads, dim: (heads, dim)),
    "scalar": (" · g", lambda heads, dim: ()),
    "head": (" · g_h", lambda heads, dim: (heads, 1)),
}


class Norm(Slot):
    """Normalises q, k or v of shape [b h t d]. Kernels and audits read the attributes to decide what they compute."""

    __slots__ = ()
    kind: NormKind = "other"
    over: Over = "head"
    gain: GainKind = "none"
    eps: float = 0.0
    bias: bool = False
    # True if q and k share the same gain.
    shared: bool = False

    @property
    def sides(self) -> str:
        """The parts among q, k and v that this norm normalises, such as "qk", or "qkv" for an unknown norm."""
        return "qkv"

    @property
    def commutes_with_rotation(self) -> bool:
        """True if normalising before or after a rotation gives the same result, which requires that the norm has no
        mean, no bias and no gain per dimension."""
        is_mean_free = self.kind in ("none", "rms", "l2")
        return (
            is_mean_free and not self.bias and self.gain in ("none", "scalar", "head")
        )

    def weight(self, part: NormedPart, params: Params) -> Float[Tensor, "*gain"] | None:
        """The gain that multiplies a part after the normalisation, or None if there is no gain."""
        return None

    def inverse(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n 1"]:
        """The factor [... 1] by which the norm multiplies x (for the kinds "rms" and "l2"), in float32 or wider."""
        raise RefusedError(
            f"{type(self).__name__} does not define the factor by which it multiplies a vector"
        )

    def with_eps(self, eps: float) -> Norm:
        """The same norm with a different eps. A norm without eps is returned unchanged."""
        return self

    def without_keys(self) -> Norm:
        """The same norm without the normalisation of k. A norm that does not normalise k is returned unchanged."""
        if "k" not in self.sides:
            return self
        raise RefusedError(
            f"{type(self).__name__} cannot normalise queries only: it has no form without the norm of the keys"
        )

    @abc.abstractmethod
    def apply(self, part: NormedPart, x: HeadTensor, params: Params) -> HeadTensor:
        """Returns x normalised, or x itself if this norm does not apply to the part."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoNorm(Norm):
    """No normalisation: q and k enter the dot product unchanged.

    >>> NoNorm().formula()
    'q̃ = q, k̃ = k'
    """

    kind = "none"

    @property
    def sides(self) -> str:
        return ""

    def apply(self, part: NormedPart, x: HeadTensor, params: Params) -> HeadTensor:
        return x

    def formula(self) -> str:
        return "q̃ = q, k̃ = k"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GainNorm(Norm):
    """A normalisation with an optional gain."""

    on: On = "qk"  #: which of q, k and v are normalised
    over: Over = "head"  #: each head, or all heads of a token together (a logit then reaches √d·√(H·Hk), not √d)
    gain: GainKind = "none"  #: "dim" w [d], "one_plus_dim" 1 + w (Gemma), "head_dim" [h d], "scalar" [], "head" [h]
    eps: float = 1e-6  #: a constant of at least 0
    bias: bool = False  #: whether a bias is added, which requires gain "dim" [d] or "head_dim" [h d]
    #: the gain of v, if it differs (Gemma 4 normalises v without a gain)
    value_gain: GainKind | None = None
    shared: bool = False  #: whether q and k share the same gain

    symbol = "norm"

    @property
    def sides(self) -> str:
        return self.on

    def with_eps(self, eps: float) -> Norm:
        return dataclasses.replace(self, eps=eps)

    def without_keys(self) -> Norm:
        left = self.on.replace("k", "")
        if left == "qv":
            return Norm.without_keys(self)
        return dataclasses.replace(self, on=left) if left else NoNorm()

    def __post_init__(self) -> None:
        if self.over == "nope":
            raise RefusedError(
                "a norm over the part of a head that is not rotated leaves the rotated part, hence the logit, "
                "unbounded, and is reported to harm long contexts; use over='head', which normalises the whole head"
            )
        for kind, value, known in (
            ("part to normalise", self.on, ("q", "k", "qk", "qkv")),
            ("extent of a norm", self.over, ("head", "layer")),
            ("gain", self.gain, _GAINS),
            ("value gain", self.value_gain or "none", _GAINS),
        ):
            check_known(kind, value, known)
        check(0 <= self.eps < math.inf, "a finite eps >= 0", self.eps)
        for gain in (
            self._gain(operand)
            for operand in _PARTS
            if self.bias and operand in self.on
        ):
            if gain not in ("dim", "head_dim"):
                raise InvalidValueError(
                    f"a bias requires gain 'dim' or 'head_dim', got gain {gain!r}"
                )

    @abc.abstractmethod
    def normalise(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Normalises over the last axis, without gain or bias."""

    def apply(self, part: NormedPart, x: HeadTensor, params: Params) -> HeadTensor:
        if part not in self.on:
            return x
        if self.over == "layer":
            b, h, t, d = x.shape
            # [b h t d] becomes [b t (h d)]: one vector for each token.
            flat = self.normalise(
                x.transpose(1, 2).reshape(
                    b,
                    t,
                    h * d,
                )
            )
            y = flat.view(b, t, h, d).transpose(1, 2)
        else:
            y = self.normalise(x)
        gain = self.weight(part, params)
        if gain is not None:
            y = apply_gain(y, gain)
        if self.bias:
            bias = params[f"{self._owner(part)}_norm_bias"]
            y = y + (bias[:, None, :] if bias.ndim == 2 else bias).to(y.dtype)
        return y

    def weight(self, part: NormedPart, params: Params) -> Float[Tensor, "*gain"] | None:
        gain = self._gain(part)
        if part not in self.on or gain == "none":
            return None
        stored = params[f"{self._owner(part)}_norm"]
        return 1 + stored if gain == "one_plus_dim" else stored

    def _owner(self, part: NormedPart) -> NormedPart:
        return "q" if self.shared and part == "k" else part

    def _gain(self, part: NormedPart) -> GainKind:
        return (
            self.value_gain
            if part == "v" and self.value_gain is not None
            else self.gain
        )

    def parameters(self, geometry: ParameterSizes) -> dict[str, Parameter]:
        if self.shared and geometry.n_heads != geometry.n_kv_heads:
            raise InvalidValueError(
                f"a gain shared by q and k needs n_heads = n_kv_heads, got {geometry.n_heads} and "
                f"{geometry.n_kv_heads}; use shared=False with grouped keys"
            )
        needed: dict[str, Parameter] = {}
        for operand in _PARTS:
            # A shared gain is stored once, as that of q.
            if operand not in self.on or (self.shared and operand == "k"):
                continue
            heads = geometry.n_heads if operand == "q" else geometry.n_kv_heads
            gain = self._gain(operand)
            shape = _GAINS[gain][1](heads, geometry.head_dim)
            if gain != "none":
                needed[f"{operand}_norm"] = Parameter(
                    shape, 0.0 if gain == "one_plus_dim" else 1.0
                )
            if self.bias:
                needed[f"{operand}_norm_bias"] = Parameter(shape, 0.0)
        return needed

    def formula(self) -> str:
        over = "" if self.over == "head" else " over all heads of a token"
        lines = []
        for operand in _PARTS:
            if operand in self.on:
                bias = " + b" if self.bias else ""
                lines.append(
                    f"{operand}̃ = {self.symbol}({operand}){_GAINS[self._gain(operand)][0]}{bias}"
                )
            elif operand != "v":
                lines.append(f"{operand}̃ = {operand}")
        return ", ".join(lines) + over


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class L2Norm(GainNorm):
    """L2 norm: x / max(‖x‖₂, eps). The result has norm 1.

    >>> L2Norm().formula()
    'q̃ = L2(q), k̃ = L2(k)'
    """

    eps: float = 1e-12
    kind = "l2"
    symbol = "L2"

    def normalise(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        return l2_norm(x, self.eps)

    def inverse(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n 1"]:
        return inverse_l2(x, self.eps)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RMSNorm(GainNorm):
    """RMS norm: x / sqrt(mean(x²) + eps). The result has norm √d.

    >>> RMSNorm(gain="dim").formula()
    'q̃ = RMS(q) · w, k̃ = RMS(k) · w'
    """

    kind = "rms"
    symbol = "RMS"

    def normalise(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        return rms_norm(x, self.eps)

    def inverse(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n 1"]:
        return inverse_rms(x, self.eps)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorm(GainNorm):
    """LayerNorm without affine parameters: (x - mean) / sqrt(var + eps).

    >>> LayerNorm(gain="dim").formula()
    'q̃ = LN(q) · w, k̃ = LN(k) · w'
    """

    eps: float = 1e-5
    kind = "layer"
    symbol = "LN"

    def normalise(self, x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        return layer_norm(x, self.eps)
