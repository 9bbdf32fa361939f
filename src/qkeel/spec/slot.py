"""What every slot's object offers."""

from __future__ import annotations

import abc
import dataclasses

from torch import Tensor

Params = dict[str, Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Heads and sizes a spec's parameters are made for."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


class Slot(abc.ABC):
    """An immutable part of an AttentionSpec."""

    __slots__ = ()

    def init_params(self, geometry: Geometry) -> Params:
        """The learnable tensors this part needs, at their initial values; empty for most."""
        return {}

    @abc.abstractmethod
    def formula(self) -> str:
        """This part of the formula in use, one line."""
