"""A position whose queries see only the keys near them."""

from __future__ import annotations

import dataclasses
from typing import final

from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError
from qkeel.spec.position.rotary import NoPosition, Order, Position, Rope
from qkeel.spec.shapes import Keys, Logits, PosK, PosQ, Queries
from qkeel.spec.slot import Geometry, Parameter, Params


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(Position):
    """`inner`, where query i sees the keys with |i - j| < window only: itself and window - 1 before it if causal.

    What hides keys by the distance of positions is a matter of position, so it is no sixth slot. log n counts the keys
    that a query sees: n = min(position + 1, window). The window is that of Mistral and Gemma in transformers.

    Source: Child et al. 2019, arXiv 1904.10509; Beltagy et al. 2020, arXiv 2004.05150.
    """

    window: int
    inner: Position = dataclasses.field(default_factory=Rope)
    kind = "window"

    def __post_init__(self) -> None:
        if not self.window >= 1:
            raise InvalidValueError(f"expected a window of at least 1 token, got {self.window}")
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
