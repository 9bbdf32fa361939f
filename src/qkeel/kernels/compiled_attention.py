"""The compiled CPU kernels: attention over whole sequences, and decoding of a few tokens.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head, e dimensions per value.
"""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.functional.position_biases import alibi_slopes
from qkeel.functional.statistics import KernelRows, LogitBracket
from qkeel.kernels.contract import Kernel, Refusal
from qkeel.kernels.encode import folded
from qkeel.kernels.native.operators import OPS, STORED, attention, is_plain, reads, ready
from qkeel.spec.call import AttentionCall, BandCall
from qkeel.spec.slot import Outputs

# Softmax attention on a CPU in C++, with the exact largest logit and entropy of every row from the same pass.

OutputAndRows = tuple[Tensor, Tensor, Tensor, Tensor]

_MASKS = (torch.bool, torch.float64, *STORED)


@final
class Native(Kernel):
    """Softmax attention with any mask, window and cap, rotations or ALiBi, in float32 arithmetic; compiled on first
    use."""

    def supports(self, call: AttentionCall) -> Refusal | None:
        reason = _of_spec(call) or _of_tensors(call) or _of_library() or _of_gradient(call)
        return None if reason is None else Refusal(reason, "use impl='chunked' (exact, O(T) memory) or impl='auto'")

    def __call__(self, call: AttentionCall) -> Outputs:
        return _run(call, stats=False)[0]

    def with_logsumexp(self, call: AttentionCall) -> tuple[Outputs, Tensor]:
        """Returns the output, which equals that of an ordinary call, and the detached logsumexp of each row."""
        out, lse, *_ = _run(call, stats=False)
        return out, lse.detach()

    def with_rows(self, call: AttentionCall) -> tuple[Outputs, KernelRows]:
        """Returns the output, which equals that of an ordinary call bit for bit, gradient included, and detached row
        statistics."""
        out, *found = _run(call, stats=True)
        lse, top, entropy = (x.detach() for x in found)
        return out, KernelRows(torch.where(lse.isnan(), lse, top), lse, entropy)  # the kernel's maximum drops NaN

    def bracketed(self, call: AttentionCall) -> tuple[Outputs, LogitBracket]:
        """Returns the output, and the exact largest logit and mean entropy per head over counted rows that see a
        key."""
        out, (top, lse, entropy) = self.with_rows(call)
        if call.query_mask is not None:
            over = call.query_mask[:, None] & (lse != -torch.inf)
            n = over.sum((0, 2))
            top, entropy = top.masked_fill(~over, -torch.inf), entropy.masked_fill(~over, 0.0)
        elif call.mask is not None or (call.causal and call.q.shape[2] > call.k.shape[2]):
            n = (lse != -torch.inf).sum((0, 2))
        else:
            n = torch.full_like(lse[0, :, 0], lse.shape[0] * lse.shape[2])
        return out, LogitBracket.exact(top.amax((0, 2)), entropy.sum((0, 2)) / n.clamp_min(1))


def _biased(call: AttentionCall) -> bool:
    return call.spec.position.unwindowed.kind == "alibi"


def _of_spec(call: AttentionCall) -> str | None:
    spec, position, biased = call.spec, call.spec.position.unwindowed, _biased(call)
    if spec.normalizer.kind != "softmax":
        return f"the compiled attention normalises by softmax only, not by {spec.normalizer.formula()}"
    if spec.cap.kind == "other":
        return f"the compiled attention does not support the cap {spec.cap.formula()}"
    if not (position.folds or biased):
        return f"{position.formula()} is neither a rotation nor ALiBi"
    if isinstance(call, BandCall):
        return "the compiled attention supports windows on both sides, but not packed sequences"
    if not call.plain and (call.causal or biased or call.window is not None):
        return "the compiled attention only takes positions 0, 1, 2, …"
    if call.dropout:
        return "the compiled attention has no dropout"
    return None


def _of_tensors(call: AttentionCall) -> str | None:
    q, k, v, mask = call.q, call.k, call.v, call.mask
    given = (q, k, v) if mask is None else (q, k, v, mask)
    if not all(is_plain(x) and x.is_cpu for x in given):
        return "the compiled attention is for plain tensors on a CPU"
    if q.dtype not in STORED:
        return f"the compiled attention takes float32, bfloat16 and float16 (computing in float32), not {q.dtype}"
    if q.shape[-1] % 8 or v.shape[-1] % 8 or not q.numel() or not v.numel():
        return f"the compiled attention takes widths that are multiples of 8, not {q.shape[-1]} and {v.shape[-1]}"
    if mask is not None and mask.dtype not in _MASKS:
        return f"the compiled attention does not support masks of {mask.dtype}"
    return None


def _of_library() -> str | None:
    return None if ready() else "the compiled attention is switched off, or cannot be used here"


def _of_gradient(call: AttentionCall) -> str | None:
    if not torch.is_grad_enabled():
        return None
    if call.mask is not None and call.mask.requires_grad:
        return "the compiled attention has no derivative with respect to its mask"
    return None


def _run(call: AttentionCall, stats: bool) -> OutputAndRows:
    """Returns the output [b h t e] in q's dtype and, in float32, the lse, the largest logit before the cap and the
    entropy of each row [b h t].

    The last two are empty unless `stats` is True.
    """
    q, k, v, scale = folded(call)
    slopes = alibi_slopes(q.shape[1]).to(torch.float32) if _biased(call) else None
    how = scale, call.causal, call.window or 0, call.spec.cap.limit or 0.0, stats  # 0: no window, no cap
    return attention(q, k, v, call.mask, slopes, *how)


# Attention from a few new tokens to a long cache on a CPU in C++, for inference. Keys may be latents.

ROWS, TOKENS = 128, 32  # queries per key head and per query head, beyond which other kernels are faster
LATENT_ROWS = 512  # queries of all heads that share a latent, beyond which torch computes


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
        return None if reason is None else Refusal(reason, "use impl='chunked' (exact, O(T) memory) or impl='auto'")

    def __call__(self, call: AttentionCall) -> Outputs:
        q, k, v, scale = folded(call)
        mask, causal, window = _visibility(call)
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
    fits = q.shape[1] // k.shape[1] * q.shape[2] <= LATENT_ROWS and all(x.dtype == torch.float32 for x in factors)
    known = spec.normalizer.kind == "softmax" and spec.cap.kind != "other" and spec.position.folds
    if not (fits and known) or _of_any(call, *factors) or not ready():
        return None
    wide = q.float()
    if isinstance(scale, Tensor):
        wide, scale = wide * scale, 1.0
    mask, causal, window = _visibility(call)
    return OPS.decode.default(wide, k, call.v, mask, inverse, scale, spec.cap.limit or 0.0, causal, window)


def _visibility(call: AttentionCall) -> tuple[Tensor | None, bool, int]:
    """Returns mask, causality and window (0: none) of a call; explicit positions are turned into a mask."""
    if call.plain:
        return call.mask, call.causal, call.window or 0
    return call.visible(slice(0, call.q.shape[2]), slice(0, call.k.shape[2])), False, 0


def _decode_refuses_tensors(call: AttentionCall) -> str | None:
    q, k = call.q, call.k
    rows = q.shape[2] * (q.shape[1] // k.shape[1])
    if rows > ROWS or q.shape[2] > TOKENS or k.shape[2] <= q.shape[2]:
        most = f"at most {ROWS} queries per key head, at most {TOKENS} per query head,"
        return f"decoding is for {most} and more keys than queries"
    return _of_any(call)


def _of_any(call: AttentionCall, *more: Tensor) -> str | None:
    q, k, v = call.q, call.k, call.v
    if not all(x.is_cpu and reads(x) for x in (q, k, v)):
        return "decoding is for float32, bfloat16 and float16 on a CPU, with widths that are multiples of 8 up to 1,024"
    if call.dropout or (call.mask is not None and call.mask.dtype != torch.bool):
        return "decoding has no dropout and takes only boolean masks"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *more, *call.params.values())):
        return "decoding has no derivative"
    return None


def _decode_refuses_spec(call: AttentionCall) -> str | None:
    spec = call.spec
    if spec.normalizer.kind != "softmax" or spec.cap.kind != "none" or not spec.position.folds:
        return "decoding is for softmax without a cap and for positions that fold into q and k"
    return None
