"""The shapes of tensors at the borders of spec, kernels, ops and nn. b sequences, t queries, s keys; h query heads, g
key heads, h a multiple of g; heads of d numbers, values of e; #: or 1."""

from __future__ import annotations

from jaxtyping import Bool, Float, Real, Shaped
from torch import Tensor

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
Heads = Float[Tensor, "b heads n d"]  # q, k or v
Hidden = Float[Tensor, "b t m"]
Tokens = Real[Tensor, "b t"]
QueryMask = Bool[Tensor, "b t"]
# As users give them, before `Visibility.call` puts them into the shapes above.
GivenMask = Shaped[Tensor, "..."]  # bool or float, broadcasting to [b h t s], or [b s]
GivenPosQ = Real[Tensor, "*b t"]
GivenPosK = Real[Tensor, "*b s"]
