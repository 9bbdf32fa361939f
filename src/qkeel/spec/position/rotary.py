"""Position slot: how positions enter the score; no position, RoPE, one that fades, one that sees the keys near it."""

from __future__ import annotations

import abc
import dataclasses
from typing import Literal, final, get_args

import torch
from jaxtyping import Int64
from torch import Tensor

from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError, check, check_known
from qkeel.functional.distances import xpos_decay
from qkeel.functional.rope import Pairing, check_pairs, rope_frequencies, rope_table, rotate
from qkeel.spec.position import kept_tables
from qkeel.spec.position.rope_scaling import NoStretch, Stretch
from qkeel.spec.shapes import Keys, Logits, PosK, PosQ, Queries
from qkeel.spec.slot import Geometry, Parameter, Params, Slot

Table = tuple[Tensor, Tensor]  # cos and sin
Order = Literal["norm_then_rotate", "rotate_then_norm"]


def counted(first: int, stop: int, device: torch.device) -> Int64[Tensor, "1 n"]:
    """The positions first … stop - 1; on a GPU one tensor for all who ask for the same ones: not to be written into."""
    if torch.compiler.is_compiling() or device.type not in kept_tables.KEPT_ON:
        return torch.arange(first, stop, device=device)[None]
    return kept_tables.kept_positions(first, stop, device)


class Position(Slot):
    """A position offers `encode` (what happens to q and k alone) and `scores` (what needs the pair).

    A position that is a rotation does all its work in `encode`. One that depends on the distance in another
    way (a bias, ReRoPE) overrides `scores` and says so by `folds = False`. One that hides keys says how far it sees.
    """

    __slots__ = ()
    # "none", "rope", "alibi", "rerope", "xpos", "window", "other"; that of Kerple is the one of its two kernels.
    kind: str = "other"
    folds: bool = True
    order: Order = "norm_then_rotate"

    @property
    def keeps(self) -> bool:
        """True if an encoded key stays what it is while more come, so that a cache may hold it."""
        return self.folds

    @property
    def reach(self) -> int | None:
        """A query sees the keys less than this many tokens away; None for all."""
        return None

    @property
    def unwindowed(self) -> Position:
        """The same position without its window, if it has one."""
        return self

    @property
    def rope(self) -> Rope | None:
        """The RoPE whose tables say all that this position does to q and k; None for any other position."""
        return None

    def encoded(self) -> Position:
        """The position for q and k that are encoded already."""
        return NoPosition()

    def check(self, head_dim: int) -> None:
        """Raise if this position cannot be used with that head size."""
        return None

    def encode(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK) -> tuple[Queries, Keys]:
        """Returns q [b h t d] and k [b g s d] after rotation; pos_q [b|1 t], pos_k [b|1 s]."""
        return q, k

    def scores(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params) -> Logits:
        """Unscaled scores [b h t s] of encoded q and k; g key heads serve h / g query heads each."""
        b, h, t, d = q.shape
        g, s = k.shape[1], k.shape[2]
        if g == h:
            return q @ k.mT
        return (q.reshape(b, g, h // g * t, d) @ k.mT).view(b, h, t, s)

    @abc.abstractmethod
    def formula(self) -> str:
        """The formula by which positions enter."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoPosition(Position):
    """NoPE: the causal mask is the only hint of order."""

    kind = "none"

    def formula(self) -> str:
        return "no position"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rope(Position):
    """Rotary embedding of the first `rotary` share of each head.

    stretch: other frequencies for longer contexts (PI, NTK, YaRN, …). A larger base (ABF) is just that.

    order: the norm before the rotation or after it. The same for a norm without per-dimension gain; with one,
    norm-then-rotate is the one that keeps scores a function of the distance.
    """

    base: float = 10_000.0  #: of the frequencies base^(-2i/d)
    rotary: float = 1.0
    pairing: Pairing = "half"  #: which two numbers turn together, see functional.rope.rotate
    order: Order = "norm_then_rotate"
    stretch: Stretch = dataclasses.field(default_factory=NoStretch)
    kind = "rope"

    def __post_init__(self) -> None:
        check(self.base > 1, "a RoPE base above 1", self.base)
        check(0 < self.rotary <= 1, "the rotated share in (0, 1]", self.rotary)
        check_known("pairing", self.pairing, get_args(Pairing))
        check_known("order", self.order, get_args(Order))
        if not isinstance(self.stretch, Stretch):
            raise InvalidTypeError(f"expected a stretch such as PI(factor=8), got {self.stretch!r}")
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
        check_pairs(self._rotated(head_dim))

    def _rotated(self, head_dim: int) -> int:
        return round(int(head_dim) * self.rotary)  # a trace makes tensors of sizes

    def encode(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK) -> tuple[Queries, Keys]:
        (cos_q, sin_q), (cos_k, sin_k) = self.tables(q, k, pos_q, pos_k)
        return rotate(q, cos_q, sin_q, self.pairing), rotate(k, cos_k, sin_k, self.pairing)

    def tables(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK) -> tuple[Table, Table]:
        """The cos and sin that turn q and those that turn k, [b|1 1 t half] each, float32 or wider.

        On a GPU they are kept for the next layer and step: not to be written into.
        """
        if torch.compiler.is_compiling() or q.device.type not in kept_tables.KEPT_ON:
            return self._made(q, k, pos_q, pos_k)
        setting = self, q.shape[-1], q.dtype, k.dtype, q.device
        return kept_tables.kept(lambda: self._made(q, k, pos_q, pos_k), setting, pos_q, pos_k)

    def _made(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK) -> tuple[Table, Table]:
        # A copy from the host would make it wait for a GPU; elsewhere float64 may not be had.
        device = q.device if q.device.type == "cuda" else None
        theta = rope_frequencies(self._rotated(q.shape[-1]), self.base, device)
        frequencies = self.stretch.frequencies(theta, self.base, pos_k) if self.stretch.changes else theta
        keys = self._table(pos_k, frequencies, k)
        return (keys if pos_q is pos_k else self._table(pos_q, frequencies, q)), keys

    def _table(self, pos: Tensor, frequencies: Tensor, like: Tensor) -> Table:
        cos, sin = rope_table(pos[:, None], frequencies, like.dtype)
        m = self.stretch.magnitude
        return (cos, sin) if m == 1 else (cos * m, sin * m)

    def formula(self) -> str:
        share = "" if self.rotary == 1 else f", first {self.rotary:g} of each head"
        pairs = "" if self.pairing == "half" else f", {self.pairing.replace('_', ' ')} pairs"
        after = " before the norm" if self.order == "rotate_then_norm" else ""
        stretch = self.stretch.formula()
        return f"RoPE(base {self.base:g}{share}{pairs}{', ' if stretch else ''}{stretch}){after}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(Position):
    """`inner`, where query i sees the keys with |i - j| < window only: itself and window - 1 before it if causal.

    A window hides keys by the distance of positions, so it belongs to the slot of the position. log n counts the keys
    that a query sees: n = min(position + 1, window). The window is that of Mistral and Gemma in transformers.

    Source: Child et al. 2019, arXiv 1904.10509; Beltagy et al. 2020, arXiv 2004.05150.
    """

    window: int  #: tokens, at least 1
    inner: Position = dataclasses.field(default_factory=Rope)
    kind = "window"

    def __post_init__(self) -> None:
        check(self.window >= 1, "a window of at least 1 token", self.window)
        if not isinstance(self.inner, Position):
            raise InvalidTypeError(f"expected a position such as Rope() as inner, got {self.inner!r}")
        if self.inner.reach is not None:
            raise RefusedError(f"{self.inner.formula()} has a window already; use the smaller of the two alone")

    @property
    def folds(self) -> bool:  # type: ignore[override]
        """See Position."""
        return self.inner.folds

    @property
    def order(self) -> Order:  # type: ignore[override]
        """See Position."""
        return self.inner.order

    @property
    def keeps(self) -> bool:
        return self.inner.keeps

    @property
    def reach(self) -> int:
        return self.window

    def encoded(self) -> Position:
        return SlidingWindow(window=self.window, inner=NoPosition())

    @property
    def unwindowed(self) -> Position:
        return self.inner

    def parameters(self, geometry: Geometry) -> dict[str, Parameter]:
        return self.inner.parameters(geometry)

    def check(self, head_dim: int) -> None:
        self.inner.check(head_dim)

    def encode(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK) -> tuple[Queries, Keys]:
        return self.inner.encode(q, k, pos_q, pos_k)

    def scores(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params) -> Logits:
        return self.inner.scores(q, k, pos_q, pos_k, params)

    def formula(self) -> str:
        return f"{self.inner.formula()}, |i - j| < {self.window}"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XPos(Position):
    """Interleaved RoPE, pair n of q times ζ_n^(i/scale), of k times ζ_n^(-j/scale): scores fade as ζ_n^((i - j)/scale).

    Causal attention only: forward in time they would grow. The released code centres positions, which changes no score;
    here they are not, so that cached keys stay what they are. In float32 that holds to about 35,000 tokens.

    Source: Sun et al. 2022, arXiv 2212.10554 (LeX), torchscale.
    """

    base: float = 10_000.0  #: of RoPE's frequencies
    scale: float = 512.0  #: tokens over which scores fade by ζ
    kind = "xpos"

    def __post_init__(self) -> None:
        check(self.base > 1, "a RoPE base above 1", self.base)
        check(self.scale > 0, "a scale above 0 tokens", self.scale)

    def check(self, head_dim: int) -> None:
        check_pairs(head_dim)

    def encode(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK) -> tuple[Queries, Keys]:
        return self._turned(q, pos_q, 1.0), self._turned(k, pos_k, -1.0)

    def _turned(self, x: Tensor, pos: Tensor, sign: float) -> Tensor:
        d = x.shape[-1]
        cos, sin = rope_table(pos[:, None], rope_frequencies(d, self.base), x.dtype)
        power = sign * pos[:, None, :, None].to(x.dtype) / self.scale
        faded = xpos_decay(d).to(x) ** power
        return rotate(x, cos * faded, sin * faded, "interleaved")

    def formula(self) -> str:
        return f"xPos(base {self.base:g}, scale {self.scale:g})"
