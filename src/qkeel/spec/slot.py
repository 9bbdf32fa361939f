"""What the slots of a spec have in common, and the shape letters of their annotations."""

from __future__ import annotations

import abc
import dataclasses
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Real, Shaped
from torch import Tensor

# The shapes of tensors at the borders of spec, kernels, ops and nn. b sequences, t queries, s keys; h query heads, g
# key heads, h a multiple of g; heads of d numbers, values of e; #: or 1.

Queries = Float[Tensor, "b h t d"]
Keys = Float[Tensor, "b g s d"]
Values = Float[Tensor, "b g s e"]
Outputs = Float[Tensor, "b h t e"]
PosQ = Real[Tensor, "#b t"]
PosK = Real[Tensor, "#b s"]
Logits = Float[Tensor, "b h t s"]
Visible = Bool[Tensor, "#b #h #t #s"]
Mask = Shaped[Tensor, "#b #h #t #s"]
PerRow = Float[Tensor, "b h t"]
HeadTensor = Float[Tensor, "b heads n d"]  # q, k or v
Hidden = Float[Tensor, "b t m"]
Tokens = Real[Tensor, "b t"]
QueryMask = Bool[Tensor, "b t"]
# As users give them, before `Visibility.call` puts them into the shapes above.
GivenMask = Shaped[Tensor, "..."]  # bool or float, broadcasting to [b h t s], or [b s]
GivenPosQ = Real[Tensor, "*b t"]
GivenPosK = Real[Tensor, "*b s"]


# The interface of every slot's object.

Params = dict[str, Tensor]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSizes:
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

    def parameters(self, geometry: ParameterSizes) -> dict[str, Parameter]:
        """The learnable tensors this part needs, by name; none for most."""
        return {}

    def init_params(self, geometry: ParameterSizes) -> Params:
        """The learnable tensors this part needs, at their initial values; empty for most."""
        return {name: parameter.tensor() for name, parameter in self.parameters(geometry).items()}

    @abc.abstractmethod
    def formula(self) -> str:
        """This part of the formula in use, one line."""
