"""Attention of a few new tokens to a long cache as one compiled operator, for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qkeel.kernels.native.loader import usable
from qkeel.spec.call import AttentionCall

ROWS = 32  # queries per key head: beyond these torch's matrix products win
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 1024  # WIDEST in the source


def ready() -> bool:
    """Whether the operator below can be used here and now."""
    return usable("decode", _register)


# As `torch.compiler.assume_constant_result` sets it; see norm_rope.
ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def decoded(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
    """softmax(scale · q kᵀ) v of encoded q [b h t d], k and v [b g s d], out [b h t d']; None where torch has to.

    It is for few queries per key head and no gradient; float32, bfloat16 and float16 on a CPU; head sizes that are
    multiples of 8; boolean masks, windows and positions of any kind. A query that sees no key gets 0.
    """
    rows = q.shape[2] * (q.shape[1] // k.shape[1])
    few = rows <= ROWS and k.shape[2] > q.shape[2] and not call.dropout
    if not (few and _plain(q) and _plain(k) and _plain(v)) or _learns(q, k, v):
        return None
    mask, causal, window = call.mask, call.causal, call.window or 0
    if (mask is not None and mask.dtype != torch.bool) or not ready():
        return None
    if not call.plain:
        mask, causal, window = call.visible(slice(0, q.shape[2]), slice(0, k.shape[2])), False, 0
    return torch.ops.qkeel_native.decode(q, k, v, mask, scale, causal, window)


def _plain(x: Tensor) -> bool:
    fits = x.device.type == "cpu" and x.dtype in _DTYPES and x.shape[-1] % 8 == 0 and 0 < x.shape[-1] <= _WIDEST
    return fits and type(x) in (Tensor, torch.nn.Parameter) and x.numel() > 0


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _register() -> None:
    torch.library.register_fake("qkeel_native::decode", _shape)


def _shape(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    b, h, t, _d = q.shape
    return q.new_empty(b, t, h, v.shape[3]).transpose(1, 2)
