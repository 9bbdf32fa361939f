"""Softmax attention on a CPU in C++, with the exact largest logit and entropy of every row from the same pass.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head, e dimensions per value.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from qkeel.functional.position_biases import alibi_slopes
from qkeel.functional.statistics import KernelRows
from qkeel.kernels.contract import Kernel, Refusal
from qkeel.kernels.native.operators import STORED, attention, is_plain, ready
from qkeel.kernels.norm_rope.encode import folded
from qkeel.spec.call import AttentionCall, BandCall
from qkeel.spec.slot import Outputs

OutputAndRows = tuple[Tensor, Tensor, Tensor, Tensor]

_MASKS = (torch.bool, *STORED)


@final
class Native(Kernel):
    """Softmax attention with any mask, window and cap, rotations or ALiBi, in float32 arithmetic; compiled on first
    use."""

    def supports(self, call: AttentionCall) -> Refusal | None:
        reason = (
            _of_spec(call) or _of_tensors(call) or _of_library() or _of_gradient(call)
        )
        return (
            None
            if reason is None
            else Refusal(
                reason, "use impl='chunked' (exact, O(T) memory) or impl='auto'"
            )
        )

    def __call__(self, call: AttentionCall) -> Outputs:
        return _run(call, stats=False)[0]

    def with_rows(self, call: AttentionCall) -> tuple[Outputs, KernelRows]:
        """Returns the output, which equals that of an ordinary call bit for bit, gradient included, and detached row
        statistics."""
        out, *row_tensors = _run(call, stats=True)
        lse, top, entropy = (x.detach() for x in row_tensors)
        # The kernel's maximum drops NaN.
        return out, KernelRows(torch.where(lse.isnan(), lse, top), lse, entropy)


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
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    if not all(is_plain(x) and x.is_cpu for x in tensors):
        return "the compiled attention is for plain tensors on a CPU"
    if q.dtype not in STORED:
        return f"the compiled attention takes float32, bfloat16 and float16 (computing in float32), not {q.dtype}"
    if q.shape[-1] % 8 or v.shape[-1] % 8 or not q.numel() or not v.numel():
        return f"the compiled attention takes widths that are multiples of 8, not {q.shape[-1]} and {v.shape[-1]}"
    if mask is not None and mask.dtype not in _MASKS:
        return f"the compiled attention does not support masks of {mask.dtype}"
    return None


def _of_library() -> str | None:
    return (
        None
        if ready()
        else "the compiled attention is switched off, or cannot be used here"
    )


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
    # 0: no window, no cap.
    options = (
        scale,
        call.causal,
        call.window or 0,
        call.spec.cap.limit or 0.0,
        stats,
    )
    return attention(q, k, v, call.mask, slopes, *options)
