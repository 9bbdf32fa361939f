"""The three slots after q·k: the scale, the soft cap, and the normalizer that turns logits into weights.

Shapes: b batch, t queries, s keys, h heads.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.errors import InvalidTypeError, InvalidValueError, check, check_known
from qkeel.functional import logits as F
from qkeel.functional.logits import (
    floor_log_temperature,
    gradient_scale,
    log_n,
    softcap,
)
from qkeel.functional.norms import wide, widest
from qkeel.spec.slot import (
    Logits,
    Parameter,
    ParameterSizes,
    Params,
    PosQ,
    Slot,
    Visible,
)

# Scale slot: the factor on q·k.

ScaleKind = Literal[
    "inverse_sqrt",
    "sqrt",
    "fixed",
    "gradient_max",
    "learned",
    "log_n",
    "floor_log",
    "other",
]

Factor = Float[Tensor, "*#bht1"]


class Scale(Slot):
    """A factor on q·k: a float, or a tensor that broadcasts to [b h t 1]. It never depends on the key.

    To add one, override `factor` and `formula`, and `parameters` if something in it is learned. `kind` names a scale that
    a kernel or a reader knows; of "other" it is assumed that the factor depends on the position. One that is built on
    another scale overrides `base` and `with_base`, which QK-norms ask to put their own scale in its place.
    """

    __slots__ = ()
    kind: ScaleKind = "other"

    @property
    def follows_position(self) -> bool:
        """True if the factor depends on the query's position, as log n does."""
        return self.kind in ("log_n", "floor_log", "other")

    @abc.abstractmethod
    def factor(self, pos_q: PosQ, head_dim: int, params: Params) -> float | Factor:
        """The factor for queries at pos_q [b|1 t]."""

    def constant(self, head_dim: int) -> float | None:
        """The factor if it is the same constant for all queries, or None if it is learned or depends on the
        position."""
        # A learned scale is a number too, but not the same one tomorrow.
        learned = self.parameters(
            ParameterSizes(n_heads=1, n_kv_heads=1, head_dim=head_dim)
        )
        if learned or self.follows_position:
            return None
        return float(self.factor(torch.zeros(1, 1), head_dim, {}))

    @property
    def base(self) -> Scale:
        """The scale without its position-dependent factors."""
        return self

    def with_base(self, base: Scale) -> Scale:
        """Applies this scale's position-dependent factors to another scale."""
        return base


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InverseSqrt(Scale):
    """The factor multiplier / √dim, where dim is head_dim unless it is given (as Gemma's query_pre_attn_scalar).

    >>> InverseSqrt().formula(), InverseSqrt(dim=256).formula()
    ('1/√d', '1/√256')
    """

    dim: int | None = None  #: an integer of at least 1, or None for head_dim
    multiplier: float = 1.0  #: a finite factor
    kind = "inverse_sqrt"

    def __post_init__(self) -> None:
        check(
            self.dim is None or self.dim > 0,
            "a dim above 0",
            self.dim,
        )
        check(math.isfinite(self.multiplier), "a finite multiplier", self.multiplier)

    def factor(self, pos_q: PosQ, head_dim: int, params: Params) -> float:
        return self.multiplier / math.sqrt(self.dim or head_dim)

    def formula(self) -> str:
        return f"{self.multiplier:g}/√{self.dim or 'd'}"


@dataclasses.dataclass(frozen=True, slots=True)
class Sqrt(Scale):
    """The scale √d. With unit-norm q and k, it is equivalent to RMS-normed q and k with the scale 1/√d.

    >>> Sqrt().formula()
    '√d'
    """

    kind = "sqrt"

    def factor(self, pos_q: PosQ, head_dim: int, params: Params) -> float:
        return math.sqrt(head_dim)

    def formula(self) -> str:
        return "√d"


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed(Scale):
    """A constant scale.

    >>> Fixed(1.0).formula()
    '1'
    """

    value: float  #: the finite factor on q·k
    kind = "fixed"

    def __post_init__(self) -> None:
        check(math.isfinite(self.value), "a finite scale", self.value)

    def factor(self, pos_q: PosQ, head_dim: int, params: Params) -> float:
        return float(self.value)

    def formula(self) -> str:
        return f"{self.value:.4g}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientMax(Scale):
    """The scale at which cosine attention over `keys` visible keys propagates the largest gradient, for any head size.

    See `qkeel.functional.logits.gradient_scale`.

    >>> GradientMax(keys=256).formula()
    'λ(d) of most gradient for 256 keys'
    """

    keys: float
    kind = "gradient_max"

    def __post_init__(self) -> None:
        # Validates `keys`.
        gradient_scale(self.keys, 128)

    def factor(self, pos_q: PosQ, head_dim: int, params: Params) -> float:
        return gradient_scale(self.keys, head_dim)

    def formula(self) -> str:
        return f"λ(d) of most gradient for {self.keys:g} keys"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Learned(Scale):
    """A learned scale per layer or per head. With `log`, its logarithm is stored, which `maximum` may clamp.

    >>> Learned(init=10.0, per="head").formula()
    'g_h (learned, starts at 10)'
    """

    init: float  #: the initial scale, above 0
    #: whether the layer has a single scale, or each head has its own
    per: Literal["layer", "head"] = "layer"
    log: bool = False
    maximum: float | None = None
    kind = "learned"

    def __post_init__(self) -> None:
        check(0 < self.init < math.inf, "a finite initial scale above 0", self.init)
        check_known("extent of a learned scale", self.per, ("layer", "head"))
        if self.maximum is not None and not self.log:
            raise InvalidValueError("a maximum requires log=True (Swin V2)")
        check(
            self.maximum is None or self.maximum > 0,
            "a maximum above 0",
            self.maximum,
        )

    def parameters(self, geometry: ParameterSizes) -> dict[str, Parameter]:
        value = math.log(self.init) if self.log else self.init
        return {
            "logit_scale": Parameter(
                (geometry.n_heads, 1, 1) if self.per == "head" else (), value
            )
        }

    def factor(self, pos_q: PosQ, head_dim: int, params: Params) -> Factor:
        scale = params["logit_scale"]
        if not self.log:
            return scale
        # In bfloat16, exp would change all logits by one factor of up to 1 ± 2^-9.
        scale = scale.to(wide(scale.dtype))
        return (
            scale if self.maximum is None else scale.clamp(max=math.log(self.maximum))
        ).exp()

    def formula(self) -> str:
        name = "g_h" if self.per == "head" else "g"
        if not self.log:
            return f"{name} (learned, starts at {self.init:.4g})"
        top = "" if self.maximum is None else f", at most {self.maximum:g}"
        return f"exp({name}) (learned, starts at {self.init:.4g}{top})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PositionFactor(Scale):
    """The scale `inner` times a factor that depends on the query's position."""

    inner: Scale = dataclasses.field(
        default_factory=InverseSqrt
    )  #: the scale that the factor multiplies

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Scale):
            raise InvalidTypeError(
                f"expected a Scale as inner, got {type(self.inner).__name__}"
            )

    @abc.abstractmethod
    def ratio(self, pos_q: PosQ, dtype: torch.dtype) -> Float[Tensor, "#b t"]:
        """The factor [b|1 t] for queries at pos_q."""

    def parameters(self, geometry: ParameterSizes) -> dict[str, Parameter]:
        return self.inner.parameters(geometry)

    @property
    def base(self) -> Scale:
        return self.inner.base

    def with_base(self, base: Scale) -> Scale:
        return dataclasses.replace(self, inner=self.inner.with_base(base))

    def factor(self, pos_q: PosQ, head_dim: int, params: Params) -> Factor:
        inner = self.inner.factor(pos_q, head_dim, params)
        dtype = wide(inner.dtype) if isinstance(inner, Tensor) else widest(pos_q.device)
        return inner * self.ratio(pos_q, dtype)[:, None, :, None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogN(PositionFactor):
    """The scale inner · ln(n) / ln(train_length), where n is position + 1 or a smaller window; `clip` keeps the ratio
    at 1 or more.

    If `learned` is "layer" or "head", the scale is inner · s · ln(n), where s is the parameter `log_n_scale`, which
    starts at 1/ln(train_length).

    Source: Su 2021, kexue.fm 8823; learned: scalable softmax, Nakanishi 2025, arXiv 2501.19399. The initial value of s
    is qkeel's choice; with it, the scale starts out equal to the form that is not learned.

    >>> LogN(train_length=512).formula()
    '1/√d · ln n/ln 512'
    """

    train_length: int  #: the training length in tokens, at least 2
    clip: bool = False
    learned: Literal["none", "layer", "head"] = "none"
    kind = "log_n"

    def __post_init__(self) -> None:
        PositionFactor.__post_init__(self)
        check(
            2 <= self.train_length < math.inf,
            "a finite train_length of at least 2",
            self.train_length,
        )
        check_known(
            "extent of a learned factor of log n",
            self.learned,
            ("none", "layer", "head"),
        )
        # Under clip the factor is 1 for all lengths of training.
        if self.clip and self.learned != "none":
            raise InvalidValueError(
                "clip keeps the ratio at 1 or more, where a learned factor gets no gradient; choose one of the two"
            )

    def parameters(self, geometry: ParameterSizes) -> dict[str, Parameter]:
        needed = self.inner.parameters(geometry)
        if self.learned == "none":
            return needed
        shape = (geometry.n_heads, 1, 1) if self.learned == "head" else ()
        return {
            **needed,
            "log_n_scale": Parameter(shape, 1 / math.log(self.train_length)),
        }

    def ratio(self, pos_q: PosQ, dtype: torch.dtype) -> Float[Tensor, "#b t"]:
        return log_n(pos_q + 1, self.train_length, self.clip, dtype)

    def factor(self, pos_q: PosQ, head_dim: int, params: Params) -> Factor:
        factor = PositionFactor.factor(self, pos_q, head_dim, params)
        if self.learned == "none":
            return factor
        learned = params["log_n_scale"]
        # The ratio has 1/ln L in it already, which the learned s takes the place of.
        return factor * (learned.to(wide(learned.dtype)) * math.log(self.train_length))

    def formula(self) -> str:
        if self.learned != "none":
            name = "s_h" if self.learned == "head" else "s"
            return f"{self.inner.formula()} · {name} · ln n (learned, starts at 1/ln {self.train_length})"
        ratio = f"ln n/ln {self.train_length}"
        return f"{self.inner.formula()} · {f'max(1, {ratio})' if self.clip else ratio}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FloorLogTemperature(PositionFactor):
    """The scale inner · (1 + alpha·ln(1 + ⌊(position + 1)/floor⌋)), which is Llama 4's temperature on layers without
    RoPE.

    >>> FloorLogTemperature(alpha=0.1, floor=8192).formula()
    '1/√d · (1 + 0.1 ln(1 + ⌊n/8192⌋))'
    """

    alpha: float = 0.1  #: the weight of the logarithm
    floor: int = 8192  #: a number of tokens, at least 1
    kind = "floor_log"

    def __post_init__(self) -> None:
        PositionFactor.__post_init__(self)
        check(self.floor >= 1, "a floor of at least 1", self.floor)
        check(math.isfinite(self.alpha), "a finite alpha", self.alpha)

    def ratio(self, pos_q: PosQ, dtype: torch.dtype) -> Float[Tensor, "#b t"]:
        return floor_log_temperature(pos_q, self.alpha, self.floor, dtype)

    def formula(self) -> str:
        return f"{self.inner.formula()} · (1 + {self.alpha:g} ln(1 + ⌊n/{self.floor}⌋))"


# Cap slot: a map of the logits before the normalizer.

CapKind = Literal["none", "softcap", "other"]


class Cap(Slot):
    """A monotone map of the logits. To add one, override `apply` and `formula`."""

    __slots__ = ()
    kind: CapKind = "other"
    # The c in c·tanh(z/c), or None for the identity, which includes c = infinity
    limit: float | None = None

    @abc.abstractmethod
    def apply(self, logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The capped logits."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoCap(Cap):
    """No cap: logits remain unchanged.

    >>> NoCap().formula()
    'z'
    """

    kind = "none"

    def apply(self, logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return logits

    def formula(self) -> str:
        return "z"


@dataclasses.dataclass(frozen=True, slots=True)
class Softcap(Cap):
    """The soft cap: cap · tanh(z / cap).

    >>> Softcap(50).formula()
    '50·tanh(z/50)'
    """

    cap: float
    kind = "softcap"

    @property
    def limit(self) -> float | None:  # type: ignore[override]
        """See Cap."""
        return self.cap if math.isfinite(self.cap) else None

    def __post_init__(self) -> None:
        check(self.cap > 0, "a cap above 0", self.cap)

    def apply(self, logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return softcap(logits, self.cap)

    def formula(self) -> str:
        return f"{self.cap:g}·tanh(z/{self.cap:g})"


# Normalizer slot: turns logits into weights.

NormalizerKind = Literal[
    "softmax", "sink", "sigmoid", "squared_relu", "softpick", "other"
]


class Normalizer(Slot):
    """Turns logits [b h t s] into weights. `visible` broadcasts to the logits; None means that all keys are visible.

    To add one, override `weights` and `formula`, and `parameters` if something in it is learned.
    """

    __slots__ = ()
    kind: NormalizerKind = "other"
    # True if the weights, rescaled to sum to one, are those of an ordinary softmax.
    softmax_over_keys: bool = False

    @abc.abstractmethod
    def weights(
        self, logits: Logits, visible: Visible | None, params: Params
    ) -> Logits:
        """Returns the weights [b h t s], which are 0 where a key is not visible."""

    def sink_logit(self, params: Params, device: torch.device) -> Tensor | None:
        """Returns the logit of each head's sink [h|1 1], without a gradient; None if there is no sink."""
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Softmax(Normalizer):
    """Softmax weights exp(z) / Σ exp(z).

    >>> Softmax().formula()
    'softmax(z)'
    """

    kind = "softmax"
    softmax_over_keys = True

    def weights(
        self, logits: Logits, visible: Visible | None, params: Params
    ) -> Logits:
        return F.softmax(logits, visible)

    def formula(self) -> str:
        return "softmax(z)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSink(Normalizer):
    """Weights exp(z) / (exp(s) + Σ exp(z)), where s is learned per head (gpt-oss) or constant (0 for "off by
    one").

    >>> AttentionSink().formula()
    'exp(z)/(exp(s_h) + Σ exp(z))'
    """

    learned: bool = True  #: whether s is learned, with one value per head
    init: float = 0.0  #: s, or its initial value if it is learned; below +inf
    kind = "sink"
    softmax_over_keys = True

    def __post_init__(self) -> None:
        check(self.init < math.inf, "a sink that is a number below infinity", self.init)

    def parameters(self, geometry: ParameterSizes) -> dict[str, Parameter]:
        return (
            {"sink": Parameter((geometry.n_heads, 1, 1), self.init)}
            if self.learned
            else {}
        )

    def weights(
        self, logits: Logits, visible: Visible | None, params: Params
    ) -> Logits:
        sink = (
            params["sink"]
            if self.learned
            else torch.tensor(self.init, device=logits.device)
        )
        return F.sink_softmax(logits, sink, visible)

    def sink_logit(self, params: Params, device: torch.device) -> Tensor:
        if not self.learned:
            return torch.full((1, 1), self.init, device=device)
        return params["sink"].detach().flatten()[:, None]

    def formula(self) -> str:
        return f"exp(z)/(exp({'s_h' if self.learned else f'{self.init:g}'}) + Σ exp(z))"


# The name until 0.1, which `qkeel.monitor.Sink` also has.
Sink = AttentionSink


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sigmoid(Normalizer):
    """Weights σ(z + b). The published initial value is b = -ln(training length).

    >>> Sigmoid(bias=-4.0).formula()
    'σ(z -4)'
    """

    bias: float  #: the finite bias b, or its initial value if it is learned
    learned: bool = False  #: whether b is learned, with one value per head
    kind = "sigmoid"

    def __post_init__(self) -> None:
        check(math.isfinite(self.bias), "a finite bias", self.bias)

    def parameters(self, geometry: ParameterSizes) -> dict[str, Parameter]:
        return (
            {"logit_bias": Parameter((geometry.n_heads, 1, 1), self.bias)}
            if self.learned
            else {}
        )

    def weights(
        self, logits: Logits, visible: Visible | None, params: Params
    ) -> Logits:
        bias = params["logit_bias"].to(logits.dtype) if self.learned else self.bias
        return F.sigmoid(logits, bias, visible)

    def formula(self) -> str:
        return f"σ(z {self.bias:+.4g})" + (" (bias learned)" if self.learned else "")


@dataclasses.dataclass(frozen=True, slots=True)
class SquaredReLU(Normalizer):
    """Weights relu(z)² / n, where n is the number of visible keys.

    >>> SquaredReLU().formula()
    'relu(z)²/n'
    """

    kind = "squared_relu"

    def weights(
        self, logits: Logits, visible: Visible | None, params: Params
    ) -> Logits:
        return F.squared_relu(logits, visible)

    def formula(self) -> str:
        return "relu(z)²/n"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Softpick(Normalizer):
    """Weights relu(e^z - 1) / Σ|e^z - 1|.

    >>> Softpick().formula()
    'relu(e^z - 1)/(Σ|e^z - 1| + ε)'
    """

    eps: float = 1e-8  #: a constant above 0 that is added to the sum
    kind = "softpick"

    def __post_init__(self) -> None:
        check(0 < self.eps < math.inf, "a finite eps above 0", self.eps)

    def weights(
        self, logits: Logits, visible: Visible | None, params: Params
    ) -> Logits:
        return F.softpick(logits, visible, self.eps)

    def formula(self) -> str:
        return "relu(e^z - 1)/(Σ|e^z - 1| + ε)"
