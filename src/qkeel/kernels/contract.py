"""The interface of a kernel: it says what it cannot do, and why, before it computes."""

from __future__ import annotations

import abc
import dataclasses

from qkeel.spec.call import AttentionCall
from qkeel.spec.shapes import Outputs


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why something cannot be done exactly, and the way out."""

    reason: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.way_out}"


class Kernel(abc.ABC):
    """Computes out [b h t d'] of a call."""

    @abc.abstractmethod
    def supports(self, call: AttentionCall) -> Refusal | None:
        """None if this kernel computes the call exactly, else the reason."""

    @abc.abstractmethod
    def __call__(self, call: AttentionCall) -> Outputs:
        """Returns out [b h t d'] in q's dtype."""
