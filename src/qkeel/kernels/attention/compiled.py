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
        reason = _of_spec(call) or _of_tensors(call)
        if reason is None and not ready():
            reason = "the compiled attention is switched off, or cannot be used here"
        return None if reason is None else Refusal(reason)

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
    is_supported = (
        spec.normalizer.kind == "softmax"
        and spec.cap.kind != "other"
        and (position.folds or biased)
    )
    if not is_supported:
        return (
            "the compiled attention is for softmax only, with rotations or ALiBi and a soft cap, not for "
            f"{spec.normalizer.formula()}, {position.formula()}, {spec.cap.formula()}"
        )
    moves = not call.plain and (call.causal or biased or call.window is not None)
    if call.dropout or isinstance(call, BandCall) or moves:
        return "the compiled attention has no dropout, no packed sequences, and only positions 0, 1, 2, …"
    return None


def _of_tensors(call: AttentionCall) -> str | None:
    q, k, v, mask = call.q, call.k, call.v, call.mask
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    is_supported = (
        all(is_plain(x) and x.is_cpu for x in tensors)
        and q.dtype in STORED
        and not (q.shape[-1] % 8 or v.shape[-1] % 8)
        and q.numel()
        and v.numel()
        and (mask is None or mask.dtype in _MASKS)
    )
    if not is_supported:
        return (
            "the compiled attention takes plain float32, bfloat16 and float16 tensors on a CPU, with widths that are "
            f"multiples of 8, not {q.dtype} of widths {q.shape[-1]} and {v.shape[-1]}"
        )
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
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
