"""Position slot: how positions enter the score."""

from __future__ import annotations

import abc
import dataclasses
from typing import Literal, get_args

from torch import Tensor

from qkeel.errors import InvalidTypeError, InvalidValueError, unknown
from qkeel.functional.rope import Pairing, rope_frequencies, rope_table, rotate
from qkeel.spec.slot import Params, Slot
from qkeel.spec.stretch import NoStretch, Stretch

Order = Literal["norm_then_rotate", "rotate_then_norm"]


class Position(Slot):
    """A position offers `encode` (what happens to q and k alone) and `scores` (what needs the pair).

    A position that is a rotation does all its work in `encode`. One that depends on the distance in another
    way (a bias, ReRoPE) overrides `scores` and says so by `folds = False`. One that hides keys says how far it sees.
    """

    __slots__ = ()
    folds: bool = True
    order: Order = "norm_then_rotate"

    @property
    def keeps(self) -> bool:
        """Whether an encoded key stays what it is while more come, so that a cache may hold it."""
        return self.folds

    @property
    def reach(self) -> int | None:
        """A query sees the keys less than this many tokens away; None for all."""
        return None

    def encoded(self) -> Position:
        """The position for q and k that are encoded already."""
        return NoPosition()

    def check(self, head_dim: int) -> None:
        """Raise if this position cannot be used with that head size."""
        return None

    def encode(self, q: Tensor, k: Tensor, pos_q: Tensor, pos_k: Tensor) -> tuple[Tensor, Tensor]:
        """q [b h t d] and k [b g s d] after rotation; pos_q [b|1 t], pos_k [b|1 s]."""
        return q, k

    def scores(self, q: Tensor, k: Tensor, pos_q: Tensor, pos_k: Tensor, params: Params) -> Tensor:
        """Unscaled scores [b h t s] of encoded q and k; g key heads serve h / g query heads each."""
        b, h, t, d = q.shape
        g, s = k.shape[1], k.shape[2]
        if g == h:
            return q @ k.mT
        return (q.reshape(b, g, h // g * t, d) @ k.mT).view(b, h, t, s)

    @abc.abstractmethod
    def formula(self) -> str:
        """How positions enter."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoPosition(Position):
    """NoPE: the causal mask is the only hint of order."""

    def formula(self) -> str:
        return "no position"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rope(Position):
    """Rotary embedding of the first `rotary` share of each head.

    stretch: other frequencies for longer contexts (PI, NTK, YaRN, …). A larger base (ABF) is just that.

    order: the norm before the rotation or after it. The same for a norm without per-dimension gain; with one,
    norm-then-rotate is the one that keeps scores a function of the distance.
    """

    base: float = 10_000.0
    rotary: float = 1.0
    pairing: Pairing = "half"
    order: Order = "norm_then_rotate"
    stretch: Stretch = dataclasses.field(default_factory=NoStretch)

    def __post_init__(self) -> None:
        if not self.base > 1:
            raise InvalidValueError(f"expected a RoPE base above 1, got {self.base}")
        if not 0 < self.rotary <= 1:
            raise InvalidValueError(f"expected the rotated share in (0, 1], got {self.rotary}")
        if self.pairing not in get_args(Pairing):
            raise unknown("pairing", self.pairing, get_args(Pairing))
        if self.order not in ("norm_then_rotate", "rotate_then_norm"):
            raise unknown("order", self.order, ("norm_then_rotate", "rotate_then_norm"))
        if not isinstance(self.stretch, Stretch):
            raise InvalidTypeError(f"expected a stretch such as PI(factor=8), got {self.stretch!r}")
        if self.order == "rotate_then_norm" and self.stretch.magnitude != 1:
            raise InvalidValueError(
                f"a norm after the rotation cancels the factor {self.stretch.magnitude:.4g} on cos and sin; use "
                "order='norm_then_rotate' (the same for norms without a gain per dimension), or attention_factor=1"
            )

    @property
    def keeps(self) -> bool:
        """See Position."""
        return not self.stretch.follows_length

    def check(self, head_dim: int) -> None:
        rope_frequencies(round(head_dim * self.rotary), self.base)

    def encode(self, q: Tensor, k: Tensor, pos_q: Tensor, pos_k: Tensor) -> tuple[Tensor, Tensor]:
        (cos_q, sin_q), (cos_k, sin_k) = self.tables(q, k, pos_q, pos_k)
        return rotate(q, cos_q, sin_q, self.pairing), rotate(k, cos_k, sin_k, self.pairing)

    def tables(
        self, q: Tensor, k: Tensor, pos_q: Tensor, pos_k: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """cos and sin that turn q and those that turn k, [b|1 1 t half] each, float32 or wider."""
        # A copy from the host would make it wait for a GPU; elsewhere float64 may not be had.
        device = q.device if q.device.type == "cuda" else None
        theta = rope_frequencies(round(q.shape[-1] * self.rotary), self.base, device)
        frequencies = self.stretch.frequencies(theta, self.base, pos_k)
        keys = self._table(pos_k, frequencies, k)
        return (keys if pos_q is pos_k else self._table(pos_q, frequencies, q)), keys

    def _table(self, pos: Tensor, frequencies: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rope_table(pos[:, None], frequencies, like.dtype)
        m = self.stretch.magnitude
        return (cos, sin) if m == 1 else (cos * m, sin * m)

    def formula(self) -> str:
        share = "" if self.rotary == 1 else f", first {self.rotary:g} of each head"
        pairs = "" if self.pairing == "half" else f", {self.pairing.replace('_', ' ')} pairs"
        after = " before the norm" if self.order == "rotate_then_norm" else ""
        stretch = self.stretch.formula()
        return f"RoPE(base {self.base:g}{share}{pairs}{', ' if stretch else ''}{stretch}){after}"
