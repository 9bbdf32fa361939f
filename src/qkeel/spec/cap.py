"""Cap slot: what happens to a logit before the normaliser."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from qkeel.errors import check
from qkeel.functional.softcap import softcap
from qkeel.spec.slot import Slot

CapKind = Literal["none", "softcap", "other"]


class Cap(Slot):
    """A monotone map of logits."""

    __slots__ = ()
    kind: CapKind = "other"
    limit: float | None = None  # c where the map is c·tanh(z/c); None where it is the identity, as at c = infinity

    @abc.abstractmethod
    def apply(self, logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """The capped logits."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoCap(Cap):
    """Logits as they are."""

    kind = "none"

    def apply(self, logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return logits

    def formula(self) -> str:
        return "z"


@dataclasses.dataclass(frozen=True, slots=True)
class Softcap(Cap):
    """The soft cap: cap · tanh(z / cap)."""

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
