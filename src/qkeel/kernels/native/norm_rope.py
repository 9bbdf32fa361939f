"""Norm and rotation of q or k as one compiled operator, and its derivative."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.kernels.native.operator import OperatorSource

NONE = 0  # the kind of a pass that only rotates
WHOLE = 4  # added to the kind of a norm over all heads of a token, which only Triton's kernels take
Table = tuple[Float[Tensor, "b 1 t half"], Float[Tensor, "b 1 t half"]]  # cos and sin, float32; 1 for any b and t


def norm_rope(
    x: Float[Tensor, "b h t d"], gain: Tensor | None, table: Table | None, kind: int, eps: float, keep_x: bool
) -> Float[Tensor, "b h t d"]:
    """Returns rotation(gain · norm(x)), in x's dtype and layout.

    Args:
        x: q or k. gain: [], [d], [h 1] or [h d]. table: cos and sin of the rotation.
        kind: 0 no norm, 1 RMS, 2 L2, 3 LayerNorm. eps: of the norm.
        keep_x: keep x for the backward pass, else the result, from which x̂ is computed again.
    """
    cos, sin = (None, None) if table is None else table
    if not (torch.is_grad_enabled() and (x.requires_grad or (gain is not None and gain.requires_grad))):
        return torch.ops.qkeel_native.norm_rope_alone(x, gain, cos, sin, kind, eps)  # half the time of a small call
    return torch.ops.qkeel_native.norm_rope(x, gain, cos, sin, kind, eps, keep_x)[0]


def _forward_shapes(
    x: Tensor, gain: Tensor | None, cos: Tensor | None, sin: Tensor | None, kind: int, eps: float, keep_x: bool
) -> tuple[Tensor, Tensor]:
    y = same_shape(x)
    if kind == NONE:
        return y, y.new_empty(0, dtype=torch.float32)
    b, h, t = y.shape[:3]
    if y.stride(1) < y.stride(2):
        return y, y.new_empty(b, t, h, dtype=torch.float32).transpose(1, 2)
    return y, y.new_empty(b, h, t, dtype=torch.float32)


def same_shape(x: Tensor, *_: object) -> Tensor:
    """Returns an empty tensor for a result like x, whose rows are contiguous."""
    return torch.empty_like(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous())


def backward_shapes(
    dy: Tensor, kept: Tensor, inverse: Tensor, gain: Tensor | None, *_: object
) -> tuple[Tensor, Tensor]:
    """Returns empty tensors for the gradients of x, and of the gain by head or for all of them."""
    shape = (0,) if gain is None else (kept.shape[1] if gain.ndim == 2 else 1, kept.shape[3])
    return same_shape(kept), kept.new_empty(shape, dtype=torch.float32)


# norm_rope_two(q, k, gain_q, gain_k, cos, sin, kind_q, kind_k, eps): `norm_rope` of q and of k with one table, without
# a gradient, by one call instead of two. gain_spread(gain): min |gain| / max |gain|; 0 for a gain with zeros or NaN.
OPERATORS = OperatorSource(
    "norm_rope",
    {
        "norm_rope": _forward_shapes,
        "norm_rope_alone": same_shape,
        "norm_rope_two": lambda q, k, *_: (same_shape(q), same_shape(k)),
        "norm_rope_backward": backward_shapes,
    },
)
ready = OPERATORS.ready
# Python functions that cost less than an operator, for one token:
# - encode(q, k, gain_q, gain_k, cos, sin, kind_q, kind_k, eps) gives q and k as `norm_rope_two` does; None for tensors
#   other than plain ones of a CPU, under transforms and modes, and where a gradient is wanted.
# - place(pos) is the number that all of `pos` equals, or None.
functions = OPERATORS.functions
