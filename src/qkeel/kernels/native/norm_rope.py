"""Norm and rotation of q or k as one compiled operator, and its shapes for torch's compiler."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qkeel.kernels.native.loader import direct, usable

NONE = 0  # the kind of a pass that only rotates


def ready() -> bool:
    """Whether the operators below can be used here and now."""
    return usable("norm_rope", _register)


# What torch.compiler.assume_constant_result sets; that function would import torch's compiler with qkeel.
ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def functions() -> ModuleType | None:
    """Two functions that cost less than an operator, for one token; None where there are none.

    encode(q, k, gain_q, gain_k, cos, sin, kind_q, kind_k, eps, in_place) gives q and k as `norm_rope_two` does; None
    for tensors other than plain ones of a CPU, under transforms and modes, and where a gradient is wanted out of place.
    in_place: write to q and k where they are all of their memory. Nobody may read them afterwards; the gradient passes.
    place(pos) is the number that is all `pos` holds, or None.
    """
    return direct("norm_rope", _register)


def norm_rope(
    x: Tensor, gain: Tensor | None, table: tuple[Tensor, Tensor] | None, kind: int, eps: float, keep_x: bool
) -> Tensor:
    """rotation(gain · norm(x)) of x [b h t d], in x's dtype and layout.

    Args:
        gain: [], [d], [h 1] or [h d]. table: cos and sin, float32 [1|b 1 1|t half]. kind: 0 no norm, 1 RMS, 2 L2,
            3 LayerNorm. eps: of the norm. keep_x: keep x for backward, else the result, from which x̂ is made anew.
    """
    cos, sin = (None, None) if table is None else table
    if not (torch.is_grad_enabled() and (x.requires_grad or (gain is not None and gain.requires_grad))):
        return torch.ops.qkeel_native.norm_rope_alone(x, gain, cos, sin, kind, eps)  # half the price of a small call
    return torch.ops.qkeel_native.norm_rope(x, gain, cos, sin, kind, eps, keep_x)[0]


Part = tuple[Tensor, Tensor | None, int]  # q or k, its gain, its kind


def norm_rope_two(q: Part, k: Part, table: tuple[Tensor, Tensor] | None, eps: float) -> tuple[Tensor, Tensor]:
    """`norm_rope` of q and of k with one table, without a gradient, for one call instead of two."""
    cos, sin = (None, None) if table is None else table
    return torch.ops.qkeel_native.norm_rope_two(q[0], k[0], q[1], k[1], cos, sin, q[2], k[2], eps)


def gain_spread(gain: Tensor) -> float:
    """min |gain| / max |gain|; 0 for a gain with zeros or NaN."""
    return torch.ops.qkeel_native.gain_spread(gain)


def _register() -> None:
    own = "qkeel_native::"
    torch.library.register_fake(own + "norm_rope", _forward_shapes)
    torch.library.register_fake(own + "norm_rope_alone", _shape)
    torch.library.register_fake(own + "norm_rope_two", lambda q, k, *_: (_shape(q), _shape(k)))
    torch.library.register_fake(own + "norm_rope_backward", _backward_shapes)


def _forward_shapes(
    x: Tensor, gain: Tensor | None, cos: Tensor | None, sin: Tensor | None, kind: int, eps: float, keep_x: bool
) -> tuple[Tensor, Tensor]:
    y = _shape(x)
    if kind == NONE:
        return y, y.new_empty(0, dtype=torch.float32)
    b, h, t = y.shape[:3]
    if y.stride(1) < y.stride(2):
        return y, y.new_empty(b, t, h, dtype=torch.float32).transpose(1, 2)
    return y, y.new_empty(b, h, t, dtype=torch.float32)


def _shape(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous())


def _backward_shapes(dy: Tensor, kept: Tensor, inverse: Tensor, gain: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    shape = (0,) if gain is None else (kept.shape[1] if gain.ndim == 2 else 1, kept.shape[3])
    return _shape(kept), kept.new_empty(shape, dtype=torch.float32)
