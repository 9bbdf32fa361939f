"""Positions that clip the distance: rotated as usual near the query, by a nearly constant angle far from it."""

from __future__ import annotations

import dataclasses
import math
from typing import final

import torch
from torch import Tensor

from qkeel.errors import check
from qkeel.functional.rope import check_pairs, rope_frequencies, rope_table, rotate
from qkeel.spec.position.rotary import Position
from qkeel.spec.shapes import Heads, Keys, Logits, PosK, PosQ, Queries
from qkeel.spec.slot import Params


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReRope(Position):
    """RoPE whose distance r = i - j stops growing at the window w: r where |r| < w, else ±w.

    A score depends on the pair, so keys are kept unrotated (also in a cache), and a score is one of two products:
    the usual one near the query, far from it that of q rotated to w and k as it is. Best windows: a quarter to a half
    of the training length. Training with it is published to spoil extrapolation (kexue.fm 9948).

    Source: Su 2023, kexue.fm 9708.
    """

    window: int  #: w, in tokens
    base: float = 10_000.0  #: of RoPE's frequencies
    rotary: float = 1.0  #: share of a head that is rotated
    kind = "rerope"
    folds = False
    rounded = False  # are positions beyond the window whole?

    def __post_init__(self) -> None:
        check(self.window >= 1, "a window of at least 1 token", self.window)
        check(self.base > 1, "a RoPE base above 1", self.base)
        check(0 < self.rotary <= 1, "the rotated share in (0, 1]", self.rotary)

    @property
    def leak(self) -> float:
        """The tokens of distance that count as one beyond the window."""
        return math.inf

    def check(self, head_dim: int) -> None:
        check_pairs(round(head_dim * self.rotary))

    def scores(self, q: Queries, k: Keys, pos_q: PosQ, pos_k: PosK, params: Params) -> Logits:
        distance = (pos_q[:, :, None] - pos_k[:, None, :])[:, None]
        near = self.product(self.near(q, pos_q), self.near(k, pos_k))
        ahead = self.product(self.far_query(q, pos_q), self.far_key(k, pos_k))
        behind = self.product(self.far_query(q, pos_q, -1), self.far_key(k, pos_k))
        return torch.where(distance.abs() < self.window, near, torch.where(distance > 0, ahead, behind))

    def product(self, q: Queries, k: Keys) -> Logits:
        """The product q·k [b h t s]."""
        return Position.scores(self, q, k, q, k, {})

    def near(self, x: Heads, pos: PosQ) -> Heads:
        """Returns q or k rotated as usual: for pairs inside the window."""
        return self._rotated(x, pos)

    def far_query(self, q: Queries, pos_q: PosQ, side: int = 1) -> Queries:
        """Returns q as it meets keys at least a window before it (side 1) or behind it (side -1)."""
        within = math.floor(self.window / self.leak) if self.rounded else self.window / self.leak
        return self._rotated(q, self._slowed(q, pos_q) + side * (self.window - within))

    def far_key(self, k: Keys, pos_k: PosK) -> Keys:
        """Returns k as queries outside its window meet it."""
        return self._rotated(k, self._slowed(k, pos_k)) if math.isfinite(self.leak) else k

    def _slowed(self, x: Heads, pos: Tensor) -> Tensor:
        at = pos.to(x.dtype) / self.leak
        return torch.floor(at) if self.rounded else at

    def _rotated(self, x: Tensor, pos: Tensor) -> Tensor:
        theta = rope_frequencies(round(x.shape[-1] * self.rotary), self.base)
        return rotate(x, *rope_table(pos[:, None], theta, x.dtype))

    def formula(self) -> str:
        return f"ReRoPE(window {self.window}, base {self.base:g})"


def rerope(position: Position) -> ReRope | None:
    """The position as a ReRope; None for any other, also for a subclass of it that states no kind."""
    return position if isinstance(position, ReRope) and position.kind == "rerope" else None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeakyReRope(ReRope):
    """ReRoPE whose distance goes on growing beyond the window, `factor` times slower: w + (r - w)/factor.

    Self-Extend is this with whole positions (`rounded`): ⌊i/f⌋ + w - ⌊w/f⌋ for q, ⌊j/f⌋ for k. InvLeaky ReRoPE trains
    with a factor under 1 (1/16) and tests with plain RoPE.

    Source: Su 2023, kexue.fm 9708, 9728; Self-Extend: Jin et al. 2024, arXiv 2401.01325.
    """

    factor: float = 16.0
    rounded: bool = False  # type: ignore[assignment]
    kind = "rerope"

    def __post_init__(self) -> None:
        ReRope.__post_init__(self)
        check(math.isfinite(self.factor) and self.factor > 0, "a factor above 0 for LeakyReRope", self.factor)

    @property
    def leak(self) -> float:
        return self.factor

    def formula(self) -> str:
        name = "Self-Extend" if self.rounded else "Leaky ReRoPE"
        return f"{name}(window {self.window}, 1/{self.factor:g} beyond, base {self.base:g})"
