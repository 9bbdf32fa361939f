"""Cap slot: what happens to a logit before the normaliser."""

from __future__ import annotations

import abc
import dataclasses

from torch import Tensor

from qkeel.errors import InvalidValueError
from qkeel.functional.softcap import softcap
from qkeel.spec.slot import Slot


class Cap(Slot):
    """A monotone map of logits."""

    __slots__ = ()

    @abc.abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """The capped logits."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoCap(Cap):
    """Logits as they are."""

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def formula(self) -> str:
        return "z"


@dataclasses.dataclass(frozen=True, slots=True)
class Softcap(Cap):
    """cap · tanh(z / cap)."""

    cap: float

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise InvalidValueError(f"expected a cap above 0, got {self.cap}")

    def apply(self, logits: Tensor) -> Tensor:
        return softcap(logits, self.cap)

    def formula(self) -> str:
        return f"{self.cap:g}·tanh(z/{self.cap:g})"
