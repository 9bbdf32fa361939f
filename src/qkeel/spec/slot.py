"""The interface of every slot's object."""

from __future__ import annotations

import abc
import dataclasses
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Params = dict[str, Tensor]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Heads and sizes a spec's parameters are made for."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


class Parameter(NamedTuple):
    """A learnable tensor that a slot needs: its shape, and the number it starts with, or one number for each head."""

    shape: Shape
    start: float | tuple[float, ...]

    def tensor(self) -> Float[Tensor, "*shape"]:
        """The tensor at its start."""
        start = self.start
        return torch.tensor(start) if isinstance(start, tuple) else torch.full(self.shape, float(start))


class Slot(abc.ABC):
    """An immutable part of an AttentionSpec.

    `kind` is its name for those who compute it in a way of their own, such as a fused kernel. It is that of the class
    that states it: a subclass that states none may compute anything, so its kind is "other".
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "kind" not in cls.__dict__:
            type.__setattr__(cls, "kind", "other")

    def parameters(self, geometry: Geometry) -> dict[str, Parameter]:
        """The learnable tensors this part needs, by name; none for most."""
        return {}

    def init_params(self, geometry: Geometry) -> Params:
        """The learnable tensors this part needs, at their initial values; empty for most."""
        return {name: parameter.tensor() for name, parameter in self.parameters(geometry).items()}

    @abc.abstractmethod
    def formula(self) -> str:
        """This part of the formula in use, one line."""
