"""torch's fused attention, for specs whose norm, position and scale fold into q and k.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head, w window.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from qkeel.kernels.contract import Kernel, Refusal, row_blocks, without_pairs
from qkeel.kernels.norm_rope.encode import folded
from qkeel.patching.torch_state import with_tangents
from qkeel.spec.call import AttentionCall
from qkeel.spec.slot import Outputs

QKV = tuple[Tensor, Tensor, Tensor]
# Entries of a boolean mask built at once.
MASK_BLOCK = 1 << 24


@final
class Sdpa(Kernel):
    """Softmax attention without a cap, for positions that fold into q and k."""

    def supports(self, call: AttentionCall) -> Refusal | None:
        spec, mask = call.spec, call.mask
        if spec.normalizer.kind != "softmax":
            return Refusal(
                f"SDPA normalises by softmax only, not by {spec.normalizer.formula()}"
            )
        if spec.cap.kind != "none":
            return Refusal("SDPA cannot cap logits")
        if not spec.position.folds:
            return Refusal(f"{spec.position.formula()} cannot be folded into q and k")
        if with_tangents():
            return Refusal("torch's fused attention has no forward-mode derivative")
        # torch accepts a wider mask on some backends only, and cuDNN misreads it (pytorch#191612).
        if (
            mask is not None
            and mask.is_floating_point()
            and call.q.dtype.itemsize < 4
            and mask.dtype != call.q.dtype
        ):
            return Refusal(f"SDPA would round the {mask.dtype} mask to {call.q.dtype}")
        return None

    def __call__(self, call: AttentionCall) -> Outputs:
        q, k, v, scale = folded(call)
        if not (q.shape[2] and k.shape[2]):
            return without_pairs(q, k, v)
        # torch knows this mask by a flag, without a T×T tensor.
        if call.causal and call.whole:
            return _with_nan_of_an_only_key(
                _sdpa(call, (q, k, v), scale, causal=True), q, k, causal=True
            )
        # A single query in its usual place is the last position and sees every key, so causality hides nothing from
        # it.
        if (
            call.mask is None
            and call.window is None
            and (not call.causal or (call.plain and q.shape[2] == 1))
        ):
            return _with_nan_of_an_only_key(
                _sdpa(call, (q, k, v), scale), q, k, causal=False
            )
        parts = []
        for rows in row_blocks(call, MASK_BLOCK):
            keys = call.span(rows)
            if keys.start == keys.stop:
                parts.append(
                    q.new_zeros(*q.shape[:2], rows.stop - rows.start, v.shape[-1])
                )
                continue
            mask, empty = _mask(call, rows, keys, q.dtype)
            out = _sdpa(
                call, (q[:, :, rows], k[:, :, keys], v[:, :, keys]), scale, mask=mask
            )
            parts.append(out.masked_fill(empty, 0.0))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _with_nan_of_an_only_key(
    out: Tensor, q: Tensor, k: Tensor, *, causal: bool
) -> Tensor:
    """Sets the first query's output to NaN if it sees only the first key and their logit is not finite.

    torch's CPU kernel mistakes such a row for a row without keys and returns the first value. With several queries this
    is done only without gradients: in training, all queries see the first key, so a NaN in it is visible in any case.
    Exported programs, which serve every length, are not changed.
    """
    if not q.is_cpu or torch.compiler.is_exporting():
        return out
    alone = q.shape[2] == 1 == k.shape[2]
    if not alone and (torch.is_grad_enabled() or not causal):
        return out
    first = k[:, :, 0].repeat_interleave(q.shape[1] // k.shape[1], 1)
    # The logit times 0 is 0 if the logit is finite, and NaN otherwise.
    nothing = (
        ((q[:, :, 0].to(torch.float32) * first).sum(-1, keepdim=True) * 0)
        .to(out.dtype)
        .detach()
    )
    if alone:
        return out + nothing[:, :, None]
    out[:, :, 0] += nothing
    return out


def _sdpa(
    call: AttentionCall,
    qkv: QKV,
    scale: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    # The fused kernels need equal sizes of keys and values, otherwise torch takes its T×T path. Padding zeros change
    # neither scores nor values.
    width = qkv[2].shape[-1]
    size = max(qkv[0].shape[-1], width)
    q, k, v = [
        x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in qkv
    ]
    # Tracing turns sizes into tensors.
    gqa = bool(q.shape[1] != k.shape[1])
    out = sdpa(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=gqa,
    )
    return out[..., :width]


def _mask(
    call: AttentionCall, rows: slice, keys: slice, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the mask of a block, and which rows see no key.

    Such rows are allowed to see every key, and their output is set to 0 afterwards, because a row of -inf would give
    NaN gradients.
    """
    visible, bias = call.visible(rows, keys), call.bias(rows, keys)
    # Only calls with a mask, a window or causality get here.
    assert visible is not None
    empty = ~visible.any(-1, keepdim=True)
    allowed = visible | empty
    if bias is None:
        return allowed, empty
    return bias.to(dtype).masked_fill(~allowed, -torch.inf), empty
