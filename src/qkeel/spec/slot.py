"""The base class of spec slots, and the letters for shapes in tensor annotations."""

from __future__ import annotations

import abc
import dataclasses
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Real, Shaped
from torch import Tensor

# The shapes of tensors at the interfaces of spec, kernels, ops and nn: b batch, t queries, s keys, h query heads, g key
# heads (h is a multiple of g), d head size, e size of a value, m width of the model. `#x` means that the size may also
# be 1.

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
# q, k or v.
HeadTensor = Float[Tensor, "b heads n d"]
Hidden = Float[Tensor, "b t m"]
Tokens = Real[Tensor, "b t"]
QueryMask = Bool[Tensor, "b t"]
# Tensors as passed by callers, before `make_call` converts them to the shapes above.
# Bool or float, broadcasting to [b h t s], or [b s].
AttentionMask = Shaped[Tensor, "..."]
QueryPositions = Real[Tensor, "*b t"]
KeyPositions = Real[Tensor, "*b s"]


# The interface that the object in every slot implements.

Params = dict[str, Tensor]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSizes:
    """The head counts and the head size, which determine the shapes of a spec's parameters."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


class Parameter(NamedTuple):
    """A learnable tensor of a slot, given by its shape and its initial value, which is a single number or one number
    per head."""

    shape: Shape
    start: float | tuple[float, ...]

    def tensor(self) -> Float[Tensor, "*shape"]:
        """Returns the tensor at its initial value."""
        start = self.start
        return (
            torch.tensor(start)
            if isinstance(start, tuple)
            else torch.full(self.shape, float(start))
        )


class Slot(abc.ABC):
    """An immutable part of an AttentionSpec.

    Fused kernels select their code by `kind`. A subclass that does not set `kind` itself may compute anything, so its
    kind is "other".
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "kind" not in cls.__dict__:
            type.__setattr__(cls, "kind", "other")

    def parameters(self, geometry: ParameterSizes) -> dict[str, Parameter]:
        """Returns this slot's learnable tensors by name. Most slots have none."""
        return {}

    def init_params(self, geometry: ParameterSizes) -> Params:
        """Returns this slot's learnable tensors by name, at their initial values."""
        return {
            name: parameter.tensor()
            for name, parameter in self.parameters(geometry).items()
        }

    @abc.abstractmethod
    def formula(self) -> str:
        """Returns this slot's part of the formula on one line."""
