"""Position encodings other than RoPE (ALiBi, Kerple, ReRoPE), and methods that adapt a trained position.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d head size. i is a query's position, j a key's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, final

import torch
from torch import Tensor

from qkeel.errors import InvalidValueError, RefusedError, check, check_known
from qkeel.functional.position_biases import alibi_slopes, kerple_log, kerple_power
from qkeel.functional.rope import check_pairs, rope_frequencies, rope_table, rotate
from qkeel.spec.logits import LogN, Scale
from qkeel.spec.norm import Norm
from qkeel.spec.rope import (
    NTK,
    PI,
    DynamicNTK,
    Position,
    Rope,
    SlidingWindow,
    Stretch,
    YaRN,
)
from qkeel.spec.slot import (
    HeadTensor,
    Keys,
    Logits,
    Parameter,
    ParameterSizes,
    Params,
    PosK,
    PosQ,
    Queries,
)

# Positions that add a bias to the logit, which is a function of the distance |i - j|.


@final
@dataclasses.dataclass(frozen=True, slots=True)
class ALiBi(Position):
    """Logits z - m_h |i - j|, where m_h = 2^(-8h/H) is fixed for each head. Source: Press et al. 2022, arXiv
    2108.12409.

    >>> ALiBi().formula()
    'ALiBi (- 2^(-8h/H)·|i - j|)'
    """

    kind = "alibi"
    folds = False
    biased = True

    def scores(
        self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params
    ) -> Logits:
        # Added after the scale, as published: the bias does not shrink with √d.
        slopes = alibi_slopes(q.shape[1]).to(q)[:, None, None]
        return Position.scores(self, q, k, pos_q, pos_k, params) - slopes * _apart(
            pos_q, pos_k
        ).to(q.dtype)

    def formula(self) -> str:
        return "ALiBi (- 2^(-8h/H)·|i - j|)"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kerple(Position):
    """Logits z plus a learned function of the distance, per head: -p ln(1 + a|i - j|) (kind "log") or -a|i - j|^p (kind
    "power").

    The initial values are evenly spaced over the heads, a in (0, 1) and p in (0, 2). In the source, they are drawn at
    random.
    Source: Chi et al. 2022, arXiv 2205.09921.

    >>> Kerple(kind="power").formula()
    'KERPLE (- a_h|i - j|^p_h)'
    """

    kind: Literal["log", "power"] = "log"  # type: ignore[assignment]
    folds = False
    biased = True

    def __post_init__(self) -> None:
        check_known("kind of Kerple", self.kind, ("log", "power"))

    def parameters(self, geometry: ParameterSizes) -> dict[str, Parameter]:
        n = geometry.n_heads
        # Midpoints of n equal parts: at the ends, a head would start without a bias.
        even = tuple((h + 0.5) / n for h in range(n))
        return {
            "kerple_a": Parameter((n,), even),
            "kerple_p": Parameter((n,), tuple(2 * x for x in reversed(even))),
        }

    def scores(
        self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params
    ) -> Logits:
        a, p = (
            params[name].to(q.dtype)[:, None, None] for name in ("kerple_a", "kerple_p")
        )
        kernel = kerple_log if self.kind == "log" else kerple_power
        return Position.scores(self, q, k, pos_q, pos_k, params) + kernel(
            _apart(pos_q, pos_k).to(q.dtype), a, p
        )

    def formula(self) -> str:
        return f"KERPLE ({'- p_h ln(1 + a_h|i - j|)' if self.kind == 'log' else '- a_h|i - j|^p_h'})"


def _apart(pos_q: Tensor, pos_k: Tensor) -> Tensor:
    """|i - j| as a tensor [b|1 1 t s]."""
    return (pos_q[:, :, None] - pos_k[:, None, :]).abs()[:, None]


# Positions that clip the distance. They use the normal rotation near the query and a nearly constant angle far from it.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReRope(Position):
    """RoPE whose distance r = i - j stops growing at the window w: the distance is r where |r| < w, and ±w elsewhere.

    The score depends on the pair, so keys stay unrotated, even in a cache. Each score is one of two products: near the
    query the normal one, and far from it that of q, rotated to position w, and the unrotated k. The best windows are a
    quarter to a half of the training length. Training with ReRoPE is reported to impair extrapolation (kexue.fm 9948).

    Source: Su 2023, kexue.fm 9708.

    >>> ReRope(window=128).formula()
    'ReRoPE(window 128, base 10000)'
    """

    window: int  #: the window w, in tokens
    base: float = 10_000.0  #: the base of RoPE's frequencies
    rotary: float = 1.0  #: the fraction of each head that is rotated
    kind = "rerope"
    folds = False
    # True if positions beyond the window are rounded to integers.
    rounded = False

    def __post_init__(self) -> None:
        check(self.window >= 1, "a window of at least 1 token", self.window)
        check(1 < self.base < math.inf, "a finite RoPE base above 1", self.base)
        check(0 < self.rotary <= 1, "the rotated share in (0, 1]", self.rotary)

    @property
    def leak(self) -> float:
        """The number of tokens beyond the window that count as one token of distance."""
        return math.inf

    def check(self, head_dim: int) -> None:
        check_pairs(round(head_dim * self.rotary))

    def scores(
        self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params
    ) -> Logits:
        # Three products and a choice: no rotation of q and k alone gives a clipped distance.
        distance = (pos_q[:, :, None] - pos_k[:, None, :])[:, None]
        near = self.product(self.near(q, pos_q), self.near(k, pos_k))
        ahead = self.product(self.far_query(q, pos_q), self.far_key(k, pos_k))
        behind = self.product(
            self.far_query(
                q,
                pos_q,
                -1,
            ),
            self.far_key(k, pos_k),
        )
        return torch.where(
            distance.abs() < self.window,
            near,
            torch.where(distance > 0, ahead, behind),
        )

    def product(self, q: Queries, k: Keys) -> Logits:
        """The product q·k [b h t s]."""
        # The plain product reads no positions, so that any tensors may stand for them.
        return Position.scores(self, q, k, q, k, {})

    def near(self, x: HeadTensor, pos: PosQ) -> HeadTensor:
        """Returns q or k with the normal rotation, for pairs inside the window."""
        return self._rotated(x, pos)

    def far_query(self, q: Queries, pos_q: PosQ, side: int = 1) -> Queries:
        """Returns q for keys that are at least a window before it (side 1) or after it (side -1)."""
        within = (
            math.floor(self.window / self.leak)
            if self.rounded
            else self.window / self.leak
        )
        return self._rotated(q, self._slowed(q, pos_q) + side * (self.window - within))

    def far_key(self, k: Keys, pos_k: PosK) -> Keys:
        """Returns k for queries that are at least a window away from it."""
        return (
            # An infinite leak stops all positions at 0, where a rotation does nothing.
            self._rotated(k, self._slowed(k, pos_k)) if math.isfinite(self.leak) else k
        )

    def _slowed(self, x: HeadTensor, pos: Tensor) -> Tensor:
        at = pos.to(x.dtype) / self.leak
        return torch.floor(at) if self.rounded else at

    def _rotated(self, x: Tensor, pos: Tensor) -> Tensor:
        theta = rope_frequencies(round(x.shape[-1] * self.rotary), self.base)
        return rotate(
            x,
            *rope_table(
                pos[:, None],
                theta,
                x.dtype,
            ),
        )

    def formula(self) -> str:
        return f"ReRoPE(window {self.window}, base {self.base:g})"


def rerope(position: Position) -> ReRope | None:
    """Returns the position if it is a ReRope that fused kernels support, or None for other positions and for unknown
    subclasses."""
    return (
        position if isinstance(position, ReRope) and position.kind == "rerope" else None
    )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeakyReRope(ReRope):
    """ReRoPE whose distance keeps growing beyond the window, but `factor` times more slowly: w + (r - w)/factor.

    Self-Extend is the variant with integer positions (`rounded`): ⌊i/f⌋ + w - ⌊w/f⌋ for q, ⌊j/f⌋ for k. InvLeaky ReRoPE
    trains with a factor below 1 (1/16) and is tested with ordinary RoPE.

    Source: Su 2023, kexue.fm 9708, 9728; Self-Extend: Jin et al. 2024, arXiv 2401.01325.

    >>> LeakyReRope(window=128, factor=16).formula()
    'Leaky ReRoPE(window 128, 1/16 beyond, base 10000)'
    """

    factor: float = 16.0
    rounded: bool = False  # type: ignore[assignment]
    kind = "rerope"

    def __post_init__(self) -> None:
        ReRope.__post_init__(self)
        check(
            math.isfinite(self.factor) and self.factor > 0,
            "a factor above 0 for LeakyReRope",
            self.factor,
        )

    @property
    def leak(self) -> float:
        return self.factor

    def formula(self) -> str:
        name = "Self-Extend" if self.rounded else "Leaky ReRoPE"
        return f"{name}(window {self.window}, 1/{self.factor:g} beyond, base {self.base:g})"


# Methods that adapt a trained spec to longer contexts. They change the position or the scale and keep the weights.

OptionValue = float | int | str | bool
Options = Mapping[str, OptionValue]

# Maps each name to what the method does and its source. "log_n" changes the scale, all others the position.
METHODS: dict[str, str] = {
    "none": "as trained",
    "pi": "position interpolation, θ / factor [arXiv 2306.15595]",
    "ntk": "NTK-aware, base × factor [kexue.fm 9706: NTK-old]",
    "ntk_fixed": "NTK with pairs counted from 1 instead of 0 [kexue.fm 9706]",
    "ntk_mixed": "between interpolation and NTK-fixed, power=0.625 [kexue.fm 9706]",
    "dynamic_ntk": "NTK by the current length, from train_length on [transformers]",
    "abf": "a larger base= and continued training [arXiv 2309.16039]",
    "yarn": "interpolation of the slow pairs only, logits × (0.1 ln factor + 1)² [arXiv 2309.00071]",
    "rerope": "distances clipped at window= (half of train_length) [kexue.fm 9708]",
    "leaky_rerope": "distances beyond window= grow 1/factor as fast [kexue.fm 9708]",
    "rope": "plain RoPE in place of the clipped RoPE used in training (InvLeaky) [kexue.fm 9728]",
    "window": "only the last window= (train_length) keys are seen [arXiv 2004.05150]",
    "self_extend": "leaky_rerope at integer positions [arXiv 2401.01325]",
    "log_n": "logits × max(1, ln n / ln train_length) at test time [kexue.fm 9706]",
}
# The options of each method, in addition to factor and train_length.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "ntk_mixed": ("power",),
    "abf": ("base",),
    "yarn": ("ramp", "fast", "slow"),
    "rerope": ("window",),
    "leaky_rerope": ("window", "leak"),
    "self_extend": ("window", "leak"),
    "window": ("window",),
}
_NTK: dict[str, Literal["old", "fixed", "mixed"]] = {
    "ntk": "old",
    "ntk_fixed": "fixed",
    "ntk_mixed": "mixed",
}


def position_for(
    position: Position,
    norm: Norm,
    method: str,
    factor: float,
    train_length: int | None,
    options: Options,
) -> Position:
    """Returns the position that replaces a trained one under `method`; see `AttentionSpec.extrapolate`."""
    check_known("extrapolation method", method, METHODS)
    sound = math.isfinite(factor) and factor >= 1
    check(
        sound,
        f"a factor of at least 1 (test length / train length) for {method}",
        factor,
    )
    for name in options:
        check_known(f"option of {method}", name, _OPTIONS.get(method, ()))
    if method in ("none", "log_n"):
        return position
    if method == "window":
        return _seeing(position, train_length, options)
    if isinstance(position, SlidingWindow):
        # A window within the training length contains only trained distances, so its rotation is kept.
        inner = position_for(
            position.inner, norm, method, factor, train_length, options
        )
        trained = position.window <= _length(method, train_length)
        return position if trained else dataclasses.replace(position, inner=inner)
    if method == "rope":
        if isinstance(position, ReRope):
            return Rope(base=position.base, rotary=position.rotary)
        if isinstance(position, Rope) and not position.stretch.changes:
            return position
        raise RefusedError(
            f"rope undoes the clipping of ReRope and LeakyReRope; this spec has {position.formula()}"
        )
    if not isinstance(position, Rope) or position.stretch.changes:
        raise RefusedError(
            f"{method} changes the rotation of an unmodified RoPE; this spec has {position.formula()}"
        )
    if method == "abf":
        return dataclasses.replace(
            position, base=float(options.get("base", position.base * factor))
        )
    if method in ("rerope", "leaky_rerope", "self_extend"):
        return _clipped(position, method, factor, train_length, options)
    stretch = _stretch(method, factor, train_length, options)
    if stretch.magnitude != 1 and position.order == "rotate_then_norm":
        # A norm after the rotation would cancel the factor on cos and sin. If the norm commutes, moving it before the
        # rotation gives the same scores.
        if not norm.commutes_with_rotation:
            raise RefusedError(
                f"YaRN's factor on cos and sin would be cancelled by the norm after the rotation ({norm.formula()}), "
                "which does not commute with it; use pi, ntk or rerope"
            )
        position = dataclasses.replace(position, order="norm_then_rotate")
    return dataclasses.replace(position, stretch=stretch)


def _seeing(position: Position, train_length: int | None, options: Options) -> Position:
    window = (
        int(options["window"])
        if "window" in options
        else _length("window", train_length)
    )
    if train_length is not None and window > train_length:
        raise InvalidValueError(
            f"expected a window of at most the training length, got {window} of {train_length}: keys further away were "
            "never seen in training"
        )
    inner = position.inner if isinstance(position, SlidingWindow) else position
    # A window in training has hidden what lies beyond it, so it only gets narrower.
    narrow = window if position.reach is None else min(window, position.reach)
    return SlidingWindow(window=narrow, inner=inner)


def scale_for(scale: Scale, method: str, train_length: int | None) -> Scale:
    """Returns the scale that replaces a trained one under `method`."""
    if method != "log_n":
        return scale
    if isinstance(scale, LogN):
        raise RefusedError(f"the scale already contains log_n: {scale.formula()}")
    return LogN(inner=scale, train_length=_length(method, train_length), clip=True)


def _stretch(
    method: str, factor: float, train_length: int | None, options: Options
) -> Stretch:
    if method == "pi":
        return PI(factor=factor)
    if method in _NTK:
        return NTK(
            factor=factor, kind=_NTK[method], power=float(options.get("power", 0.625))
        )
    if method == "dynamic_ntk":
        return DynamicNTK(train_length=_length(method, train_length))
    return YaRN(factor=factor, train_length=_length(method, train_length), **options)  # type: ignore[arg-type]


def _clipped(
    rope: Rope, method: str, factor: float, train_length: int | None, options: Options
) -> Position:
    if rope.pairing != "half":
        raise RefusedError(
            f"{method} needs RoPE that pairs the two halves of a head, but this spec has {rope.formula()}"
        )
    window = (
        int(options["window"])
        if "window" in options
        else _length(method, train_length) // 2
    )
    if train_length is not None and window >= train_length:
        raise InvalidValueError(
            f"expected a window under the training length, got {window} of {train_length}: distances between the "
            "two were never trained (kexue.fm 9708: accuracy falls to 8 %); a quarter to a half of the training length "
            "is best"
        )
    if method == "rerope":
        return ReRope(window=window, base=rope.base, rotary=rope.rotary)
    leak, rounded = float(options.get("leak", 2 * factor)), method == "self_extend"
    return LeakyReRope(
        window=window, base=rope.base, rotary=rope.rotary, factor=leak, rounded=rounded
    )


def _length(method: str, train_length: int | None) -> int:
    if train_length is None:
        raise InvalidValueError(
            f"{method} needs the training length: spec.extrapolate({method!r}, train_length=512)"
        )
    return train_length
