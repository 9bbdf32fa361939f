"""Rotary position embeddings: RoPE, its context extensions (stretches), windows and xPos.

Shapes: b batch, t queries, s keys, h heads, d head size; `half` is the number of rotated pairs.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Literal, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    RefusedError,
    check,
    check_known,
)
from qkeel.functional import rope as f
from qkeel.functional.logits import qk_products
from qkeel.functional.position_biases import xpos_decay
from qkeel.functional.rope import (
    Pairing,
    check_pairs,
    rope_frequencies,
    rope_table,
    rotate,
)
from qkeel.spec.slot import (
    Keys,
    Logits,
    Parameter,
    ParameterSizes,
    Params,
    PosK,
    PosQ,
    Queries,
    Slot,
)

# Stretches: RoPE frequencies for contexts longer than the training length.

Frequencies = Float[Tensor, "half"]


class Stretch(abc.ABC):
    """RoPE frequencies that replace θ_i = base^(-2i/d), in training or at test time.

    `changes` is False only if the frequencies equal RoPE's own. `follows_length` is True if they depend on the number
    of tokens, so that rotated keys cannot be cached while the sequence grows. `magnitude` is a factor on cos and sin.
    """

    __slots__ = ()
    changes: bool = True
    follows_length: bool = False
    magnitude: float = 1.0

    @abc.abstractmethod
    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        """Returns the frequencies [half] that replace RoPE's own [half]. The key positions [b|1 s] are not read back to
        the host."""

    @abc.abstractmethod
    def formula(self) -> str:
        """Returns the formula on one line."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class NoStretch(Stretch):
    """RoPE's own frequencies.

    >>> NoStretch().changes
    False
    """

    changes = False

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        return theta

    def formula(self) -> str:
        return ""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PI(Stretch):
    """Position interpolation, with the frequencies θ / factor. Source: Chen et al. 2023, arXiv 2306.15595.

    >>> Rope(stretch=PI(factor=8)).formula()
    'RoPE(base 10000, PI ×8)'
    """

    factor: float  #: test length / training length, at least 1

    def __post_init__(self) -> None:
        _check(self, factor=self.factor)

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        return f.interpolate(theta, self.factor)

    def formula(self) -> str:
        return f"PI ×{self.factor:g}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NTK(Stretch):
    """NTK-aware frequencies. The kinds are "old" (base · factor), "exact", "fixed", and "mixed", which uses `power`.

    The formulas are in `qkeel.functional.rope`. Source: kexue.fm 9706. transformers uses the base of "exact".

    >>> NTK(factor=8).formula()
    'NTK old ×8'
    """

    factor: float  #: test length / training length, at least 1
    kind: Literal["old", "exact", "fixed", "mixed"] = "old"  #: the published variant
    power: float = 0.625  #: the power of kind "mixed"

    def __post_init__(self) -> None:
        _check(self, factor=self.factor)
        check_known("kind of NTK", self.kind, ("old", "exact", "fixed", "mixed"))
        check(
            0 <= self.power < math.inf,
            "a finite power of at least 0 for NTK-mixed",
            self.power,
        )

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        if self.kind in ("old", "exact"):
            return f.ntk(theta, self.factor, exact=self.kind == "exact")
        return f.ntk_mixed(
            theta,
            self.factor,
            1.0 if self.kind == "fixed" else self.power,
        )

    def formula(self) -> str:
        power = f", power {self.power:g}" if self.kind == "mixed" else ""
        return f"NTK {self.kind} ×{self.factor:g}{power}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DynamicNTK(Stretch):
    """NTK "exact" with a factor that depends on the current length n: s = max(n, L)/L, base · (factor·s - factor +
    1)^(d/(d-2)).

    It equals RoPE up to the training length L. Each length has different frequencies, so caches hold unrotated keys.
    Source: emozilla 2023, as in transformers ("dynamic").

    >>> DynamicNTK(train_length=512).formula()
    'dynamic NTK from 512 tokens on, ×1'
    """

    train_length: int  #: the training length L in tokens, at least 2
    factor: float = 1.0  #: a factor of at least 1
    follows_length = True

    def __post_init__(self) -> None:
        _check(self, factor=self.factor, train_length=self.train_length)

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        # A tensor, so that no length is read back from a device.
        length = (
            pos_k.amax() + 1 if pos_k.numel() else torch.ones((), device=pos_k.device)
        )
        share = length.to(theta.dtype).clamp_min(self.train_length) / self.train_length
        return f.ntk(
            theta.to(length.device),
            self.factor * share - (self.factor - 1),
            exact=True,
        )

    def formula(self) -> str:
        return f"dynamic NTK from {self.train_length} tokens on, ×{self.factor:g}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class YaRN(Stretch):
    """YaRN, which interpolates slow pairs and keeps fast ones. cos and sin are multiplied by 0.1 ln factor + 1, or by
    `attention_factor`.

    ramp="code" is the ramp of the released code (and of transformers), "paper" the printed one; see
    `qkeel.functional.rope.yarn`.
    Source: Peng et al. 2023, arXiv 2309.00071.

    >>> YaRN(factor=8, train_length=512).formula()
    'YaRN ×8 from 512 tokens, code ramp, cos and sin ×1.208'
    """

    factor: float  #: test length / training length, at least 1
    train_length: int  #: the training length in tokens, at least 2
    #: pairs with more turns than this in training keep their frequency
    fast: float = 32.0
    #: pairs with fewer turns than this are interpolated by the full factor
    slow: float = 1.0
    ramp: f.Ramp = "code"
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check(self, factor=self.factor, train_length=self.train_length)
        check_known("ramp of YaRN", self.ramp, get_args(f.Ramp))
        check(
            0 < self.slow < self.fast < math.inf,
            "finite turns with 0 < slow < fast",
            f"slow={self.slow}, fast={self.fast}",
        )
        factor = self.attention_factor
        check(factor is None or factor > 0, "an attention_factor above 0", factor)

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        return f.yarn(
            theta,
            self.factor,
            self.train_length,
            base=base,
            fast=self.fast,
            slow=self.slow,
            ramp=self.ramp,
        )

    @property
    def magnitude(self) -> float:  # type: ignore[override]
        """The factor on cos and sin."""
        return (
            f.yarn_magnitude(self.factor)
            if self.attention_factor is None
            else self.attention_factor
        )

    def formula(self) -> str:
        details = f"{self.ramp} ramp, cos and sin ×{self.magnitude:.4g}"
        return f"YaRN ×{self.factor:g} from {self.train_length} tokens, {details}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Llama3(Stretch):
    """The frequencies of Llama 3.1; see `qkeel.functional.rope.llama3`.

    >>> Llama3(factor=8, train_length=8192).formula()
    'Llama 3 ×8 from 8192 tokens'
    """

    factor: float  #: test length / training length, at least 1
    train_length: int  #: the training length in tokens, at least 2
    low: float = 1.0  #: pairs with fewer turns than this in training are slowed by the full factor
    high: float = 4.0  #: pairs with more turns than this keep their frequency

    def __post_init__(self) -> None:
        _check(self, factor=self.factor, train_length=self.train_length)
        check(
            0 < self.low < self.high < math.inf,
            "finite turns with 0 < low < high",
            f"low={self.low}, high={self.high}",
        )

    def frequencies(self, theta: Frequencies, base: float, pos_k: PosK) -> Frequencies:
        return f.llama3(theta, self.factor, self.train_length, self.low, self.high)

    def formula(self) -> str:
        return f"Llama 3 ×{self.factor:g} from {self.train_length} tokens"


def _check(stretch: Stretch, *, factor: float, train_length: int = 2) -> None:
    name = type(stretch).__name__
    check(
        math.isfinite(factor) and factor >= 1,
        f"a factor of at least 1 (test length / train length) for {name}",
        factor,
    )
    check(
        train_length >= 2,
        f"a train_length of at least 2 tokens for {name}",
        train_length,
    )


# Position slot: how positions enter the logits. This file has NoPE, RoPE, sliding windows and xPos; position.py has the
# others.

# The tables of cos and sin.
CosSin = tuple[Tensor, Tensor]
Order = Literal["norm_then_rotate", "rotate_then_norm"]


class Position(Slot):
    """How positions enter the logits. `encode` changes q and k separately, whereas `scores` may depend on the pair.

    A rotation does all its work in `encode`. A position that depends on the pair in any other way (a bias, ReRoPE)
    overrides `scores` and sets `folds = False`. A position that hides keys sets `reach`.
    """

    __slots__ = ()
    # One of "none", "rope", "alibi", "rerope", "xpos", "window" and "other", or "log" or "power" for Kerple.
    kind: str = "other"
    folds: bool = True
    order: Order = "norm_then_rotate"
    # True if `scores` adds a function of the positions to q·k.
    biased: bool = False

    @property
    def keeps(self) -> bool:
        """True if a cache may hold encoded keys, because they do not change as the sequence grows."""
        return self.folds

    @property
    def reach(self) -> int | None:
        """The window size (a query sees only keys fewer than this many tokens away), or None if all keys are seen."""
        return None

    @property
    def unwindowed(self) -> Position:
        """The same position without its window, if it has one."""
        return self

    @property
    def rope(self) -> Rope | None:
        """This position itself if it is a RoPE, otherwise None."""
        return None

    def encoded(self) -> Position:
        """The position to use with q and k that are already encoded."""
        return NoPosition()

    def check(self, head_dim: int) -> None:
        """Raises an exception if this position does not support the head size."""
        return None

    def encode(
        self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK
    ) -> tuple[Queries, Keys]:
        """Returns q [b h t d] and k [b g s d] after the rotation for pos_q [b|1 t] and pos_k [b|1 s]."""
        return q, k

    def scores(
        self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params
    ) -> Logits:
        """The unscaled scores [b h t s] of encoded q and k, where each of the g key heads serves h / g query heads."""
        return qk_products(q, k)

    @abc.abstractmethod
    def formula(self) -> str:
        """Returns the formula on one line."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoPosition(Position):
    """NoPE: the order of tokens enters only through the causal mask.

    >>> NoPosition().formula()
    'no position'
    """

    kind = "none"

    def formula(self) -> str:
        return "no position"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rope(Position):
    """Rotary embedding applied to the first fraction `rotary` of each head's dimensions.

    `order` places the norm before or after the rotation. The two orders are equivalent for a norm without a gain per
    dimension. With such a gain, the scores are a function of the distance only with norm_then_rotate. To raise the base
    (ABF), set `base`.

    >>> Rope(rotary=0.25).rotated(64)
    16
    """

    base: float = 10_000.0  #: the base of the frequencies base^(-2i/d)
    rotary: float = 1.0  #: the fraction of each head that is rotated, in (0, 1]
    #: which two elements form a rotated pair, see functional.rope.rotate
    pairing: Pairing = "half"
    order: Order = "norm_then_rotate"
    stretch: Stretch = dataclasses.field(
        default_factory=NoStretch
    )  #: the frequencies for longer contexts (PI, NTK, …)
    kind = "rope"

    def __post_init__(self) -> None:
        check(1 < self.base < math.inf, "a finite RoPE base above 1", self.base)
        check(0 < self.rotary <= 1, "the rotated share in (0, 1]", self.rotary)
        check_known("pairing", self.pairing, get_args(Pairing))
        check_known("order", self.order, get_args(Order))
        if not isinstance(self.stretch, Stretch):
            raise InvalidTypeError(
                f"expected a stretch such as PI(factor=8), got {self.stretch!r}"
            )
        if self.order == "rotate_then_norm" and self.stretch.magnitude != 1:
            raise InvalidValueError(
                f"a norm after the rotation cancels the factor {self.stretch.magnitude:.4g} on cos and sin; use "
                "order='norm_then_rotate' (the same for norms without a gain per dimension), or attention_factor=1"
            )

    @property
    def keeps(self) -> bool:
        return not self.stretch.follows_length

    @property
    def rope(self) -> Rope | None:
        return self if self.kind == "rope" else None

    def check(self, head_dim: int) -> None:
        check_pairs(self.rotated(head_dim))

    def rotated(self, head_dim: int) -> int:
        """Returns how many of a head's dimensions are rotated."""
        # Tracing turns sizes into tensors.
        return round(int(head_dim) * self.rotary)

    def encode(
        self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK
    ) -> tuple[Queries, Keys]:
        (cos_q, sin_q), (cos_k, sin_k) = self.tables(
            q,
            k,
            pos_q,
            pos_k,
        )
        return rotate(q, cos_q, sin_q, self.pairing), rotate(
            k, cos_k, sin_k, self.pairing
        )

    def tables(
        self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK
    ) -> tuple[CosSin, CosSin]:
        """The tables (cos, sin) for q and for k, [b|1 1 t half] each, in float32 or wider."""
        # Tables are built directly on CUDA, because a copy from the host would wait. Other devices may lack float64.
        device = q.device if q.device.type == "cuda" else None
        theta = rope_frequencies(
            self.rotated(q.shape[-1]),
            self.base,
            device,
        )
        frequencies = (
            self.stretch.frequencies(theta, self.base, pos_k)
            if self.stretch.changes
            else theta
        )
        # Built once where q and k share positions, which is nearly always.
        keys = self._table(pos_k, frequencies, k)
        return (keys if pos_q is pos_k else self._table(pos_q, frequencies, q)), keys

    def _table(self, pos: Tensor, frequencies: Tensor, like: Tensor) -> CosSin:
        cos, sin = rope_table(pos[:, None], frequencies, like.dtype)
        m = self.stretch.magnitude
        return (cos, sin) if m == 1 else (cos * m, sin * m)

    def formula(self) -> str:
        share = "" if self.rotary == 1 else f", first {self.rotary:g} of each head"
        pairs = (
            ""
            if self.pairing == "half"
            else f", {self.pairing.replace('_', ' ')} pairs"
        )
        after = " before the norm" if self.order == "rotate_then_norm" else ""
        stretch = self.stretch.formula()
        return f"RoPE(base {self.base:g}{share}{pairs}{', ' if stretch else ''}{stretch}){after}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(Position):
    """The position `inner` with a window, so that query i sees only keys with |i - j| < window.

    In causal attention, these are the query's own key and the window - 1 keys before it. A window hides keys by their
    distance, so it belongs to the position slot. The n in log n is the number of keys that a query sees, min(position +
    1, window). Mistral and Gemma use this window in transformers.

    Source: Child et al. 2019, arXiv 1904.10509; Beltagy et al. 2020, arXiv 2004.05150.

    >>> SlidingWindow(window=128).formula()
    'RoPE(base 10000), |i - j| < 128'
    """

    window: int  #: the number of tokens, at least 1
    inner: Position = dataclasses.field(default_factory=Rope)
    kind = "window"

    def __post_init__(self) -> None:
        check(self.window >= 1, "a window of at least 1 token", self.window)
        if not isinstance(self.inner, Position):
            raise InvalidTypeError(
                f"expected a position such as Rope() as inner, got {self.inner!r}"
            )
        if self.inner.reach is not None:
            raise RefusedError(
                f"{self.inner.formula()} already has a window; use only the smaller of the two windows"
            )

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """Whether `inner` folds."""
        return self.inner.folds

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """Whether `inner` adds to q·k."""
        return self.inner.biased

    @property
    def order(self) -> Order:  # type: ignore[override]
        """The order of `inner`."""
        return self.inner.order

    @property
    def keeps(self) -> bool:
        return self.inner.keeps

    @property
    def reach(self) -> int:
        return self.window

    def encoded(self) -> Position:
        # The rotation is in the encoded keys; the window still has to hide some of them.
        return SlidingWindow(window=self.window, inner=NoPosition())

    @property
    def unwindowed(self) -> Position:
        return self.inner

    def parameters(self, geometry: ParameterSizes) -> dict[str, Parameter]:
        return self.inner.parameters(geometry)

    def check(self, head_dim: int) -> None:
        self.inner.check(head_dim)

    def encode(
        self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK
    ) -> tuple[Queries, Keys]:
        return self.inner.encode(q, k, pos_q, pos_k)

    def scores(
        self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params
    ) -> Logits:
        return self.inner.scores(q, k, pos_q, pos_k, params)

    def formula(self) -> str:
        return f"{self.inner.formula()}, |i - j| < {self.window}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XPos(Position):
    """Interleaved RoPE with decay. The pairs of q are multiplied by ζ_n^(i/scale) and those of k by ζ_n^(-j/scale), so
    that scores decay with i - j.

    It is only for causal attention, because scores would grow for keys after the query. The released code centres the
    positions, which changes no score. qkeel does not centre them, so cached keys stay valid, in float32 up to about
    35,000 tokens.

    Source: Sun et al. 2022, arXiv 2212.10554 (LeX), torchscale.

    >>> XPos().formula()
    'xPos(base 10000, scale 512)'
    """

    base: float = 10_000.0  #: the base of RoPE's frequencies
    scale: float = 512.0  #: the number of tokens over which scores decay by ζ
    kind = "xpos"

    def __post_init__(self) -> None:
        check(1 < self.base < math.inf, "a finite RoPE base above 1", self.base)
        check(0 < self.scale < math.inf, "a finite scale above 0 tokens", self.scale)

    def check(self, head_dim: int) -> None:
        check_pairs(head_dim)

    def encode(
        self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK
    ) -> tuple[Queries, Keys]:
        return self._turned(q, pos_q, 1.0), self._turned(k, pos_k, -1.0)

    def _turned(self, x: Tensor, pos: Tensor, sign: float) -> Tensor:
        d = x.shape[-1]
        cos, sin = rope_table(
            pos[:, None],
            rope_frequencies(d, self.base),
            x.dtype,
        )
        # ζ^(i/scale) on q and ζ^(-j/scale) on k make ζ^((i - j)/scale) in the score.
        power = sign * pos[:, None, :, None].to(x.dtype) / self.scale
        faded = xpos_decay(d).to(x) ** power
        return rotate(x, cos * faded, sin * faded, "interleaved")

    def formula(self) -> str:
        return f"xPos(base {self.base:g}, scale {self.scale:g})"
