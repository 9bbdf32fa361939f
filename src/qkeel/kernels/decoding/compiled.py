"""Attention from a few new tokens to a long cache on a CPU in C++, for inference. Keys may be latents.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head, e dimensions per value.
"""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.kernels.contract import Kernel, Refusal
from qkeel.kernels.native.operators import OPS, reads, ready
from qkeel.kernels.norm_rope.encode import folded
from qkeel.spec.call import AttentionCall
from qkeel.spec.slot import Outputs

# Queries per key head and per query head, beyond which other kernels are faster.
ROWS, TOKENS = 128, 32
# Queries of all heads that share a latent, beyond which torch computes.
LATENT_ROWS = 512


@final
class Decode(Kernel):
    """Computes softmax(scale · q kᵀ) v for few queries and many keys, without a gradient.

    Keys and values are read once for all query heads that share them. Supports boolean masks, windows and any
    positions. The output for a query that sees no key is 0.
    """

    def supports(self, call: AttentionCall) -> Refusal | None:
        reason = _decode_refuses_tensors(call) or _decode_refuses_spec(call)
        if reason is None and not ready():
            reason = "the compiled kernel for decoding is switched off, or cannot be used here"
        return None if reason is None else Refusal(reason)

    def __call__(self, call: AttentionCall) -> Outputs:
        q, k, v, scale = folded(call)
        mask, causal, window = _visibility(call)
        # Without factors on the logits and without a cap, which only `latents` has.
        return OPS.decode.default(q, k, v, mask, None, scale, 0.0, causal, window)


def latents(
    call: AttentionCall, scale: float | Tensor, inverse: Float[Tensor, "b _ s"] | None
) -> Float[Tensor, "b h t e"] | None:
    """Returns softmax(cap(scale · inverse ∘ q kᵀ)) v in float32, without a gradient; None if torch must compute it.

    Args:
        call: a call with encoded q [b h t d] and k [b 1 s d]; v must be the first part of each key.
        scale: factor on the logits, [b|1 h|1 t|1 1] or a number.
        inverse: factors [b h|1 s] that multiply the logits before the cap.
    """
    q, k, spec = call.q, call.k, call.spec
    factors = () if inverse is None else (inverse,)
    fits = q.shape[1] // k.shape[1] * q.shape[2] <= LATENT_ROWS and all(
        x.dtype == torch.float32 for x in factors
    )
    is_softmax = (
        spec.normalizer.kind == "softmax"
        and spec.cap.kind != "other"
        and spec.position.folds
    )
    if not (fits and is_softmax) or _of_any(call, *factors) or not ready():
        return None
    wide = q.float()
    if isinstance(scale, Tensor):
        # The kernel takes a number; queries are few, so scaling them costs little.
        wide, scale = wide * scale, 1.0
    mask, causal, window = _visibility(call)
    return OPS.decode.default(
        wide, k, call.v, mask, inverse, scale, spec.cap.limit or 0.0, causal, window
    )


def _visibility(call: AttentionCall) -> tuple[Tensor | None, bool, int]:
    """Returns mask, causality and window (0: none) of a call; explicit positions are turned into a mask."""
    if call.plain:
        return call.mask, call.causal, call.window or 0
    return call.visible(slice(0, call.q.shape[2]), slice(0, call.k.shape[2])), False, 0


def _decode_refuses_tensors(call: AttentionCall) -> str | None:
    q, k = call.q, call.k
    rows = q.shape[2] * (q.shape[1] // k.shape[1])
    # With as many queries as keys nothing was cached, so this is the start of a sequence and no decoding.
    if rows > ROWS or q.shape[2] > TOKENS or k.shape[2] <= q.shape[2]:
        most = f"at most {ROWS} queries per key head, at most {TOKENS} per query head,"
        return f"decoding is for {most} and more keys than queries"
    return _of_any(call)


def _of_any(call: AttentionCall, *factors_or_none: Tensor) -> str | None:
    q, k, v = call.q, call.k, call.v
    if not all(x.is_cpu and reads(x) for x in (q, k, v)):
        return "decoding is for float32, bfloat16 and float16 on a CPU, with widths that are multiples of 8 up to 1,024"
    if call.dropout or (call.mask is not None and call.mask.dtype != torch.bool):
        return "decoding has no dropout and takes only boolean masks"
    if torch.is_grad_enabled() and any(
        x.requires_grad for x in (q, k, v, *factors_or_none, *call.params.values())
    ):
        return "decoding has no derivative"
    return None


def _decode_refuses_spec(call: AttentionCall) -> str | None:
    spec = call.spec
    if (
        spec.normalizer.kind != "softmax"
        or spec.cap.kind != "none"
        or not spec.position.folds
    ):
        return "decoding is for softmax without a cap and for positions that fold into q and k"
    return None
