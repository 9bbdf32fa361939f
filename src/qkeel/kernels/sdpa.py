"""torch's fused attention, whenever norm, position and scale fold into q and k."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from qkeel.kernels.contract import Kernel, Refusal, row_blocks
from qkeel.spec.call import AttentionCall
from qkeel.spec.cap import NoCap
from qkeel.spec.normalizer import Softmax

MASK_BLOCK = 1 << 24  # entries of a boolean mask built at once


@final
class Sdpa(Kernel):
    """Softmax attention without cap whose position is a rotation."""

    def supports(self, call: AttentionCall) -> Refusal | None:
        spec, out = call.spec, "use impl='chunked' (exact, O(T) memory) or impl='auto'"
        if not isinstance(spec.normalizer, Softmax):
            return Refusal(f"SDPA normalises by softmax only, not by {spec.normalizer.formula()}", out)
        if not isinstance(spec.cap, NoCap):
            return Refusal("SDPA cannot cap logits", out)
        if not spec.position.folds:
            return Refusal(f"{spec.position.formula()} does not fold into q and k", out)
        return None

    def __call__(self, call: AttentionCall) -> Tensor:
        q, k, v, scale = folded(call)
        if _causal_flag(call):
            return _sdpa(q, k, v, scale, call, is_causal=True)
        if call.mask is None and (not call.causal or (call.plain and q.shape[2] == 1)):
            return _sdpa(q, k, v, scale, call)
        parts = []
        for rows in row_blocks(call, MASK_BLOCK):
            keys = slice(0, call.last_key(rows))
            if keys.stop == 0:
                parts.append(q.new_zeros(*q.shape[:2], rows.stop - rows.start, v.shape[-1]))
                continue
            mask, empty = _mask(call, rows, keys, q.dtype)
            out = _sdpa(q[:, :, rows], k[:, :, keys], v[:, :, keys], scale, call, attn_mask=mask)
            parts.append(out.masked_fill(empty, 0.0))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def folded(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, float]:
    """q, k, v as a plain softmax kernel takes them, in the caller's dtype, and the scale left to it."""
    q, k = call.encoded()
    scale = call.spec.factor(call.pos_q, q.shape[-1], call.params, q.dtype)
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    dtype = call.q.dtype
    return q.to(dtype), k.to(dtype), call.spec.values(call.v, call.params), scale


def _causal_flag(call: AttentionCall) -> bool:
    return call.causal and call.plain and call.mask is None and call.q.shape[2] == call.k.shape[2]


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    call: AttentionCall,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    return sdpa(
        q,
        k,
        v,
        attn_mask=attn_mask,
        dropout_p=call.dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _mask(call: AttentionCall, rows: slice, keys: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The mask of a block, and the rows that see nothing.

    Such rows are let see everything (their output is set to 0 afterwards): a row of -inf alone would make NaN
    gradients.
    """
    visible, bias = call.visible(rows, keys), call.bias(rows, keys)
    assert visible is not None  # a mask or causality brought us here
    empty = ~visible.any(-1, keepdim=True)
    seen = visible | empty
    if bias is None:
        return seen, empty
    return bias.to(dtype).masked_fill(~seen, -torch.inf), empty


def with_logsumexp(call: AttentionCall) -> tuple[Tensor, Tensor] | None:
    """Output and row logsumexp [b h t] from the one fused call, or None where torch does not hand it out.

    torch's CPU flash kernel computes the logsumexp anyway and returns it from the operator below SDPA; its
    gradients are those of SDPA, the logsumexp itself has none.
    """
    q, k, v, scale = folded(call)
    whole = call.mask is None and (not call.causal or _causal_flag(call))
    if q.device.type != "cpu" or not whole or call.dropout or q.shape[-1] != v.shape[-1]:
        return None
    causal = call.causal
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse
