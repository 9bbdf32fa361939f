"""Softmax attention on a CPU in C++: exact largest logit and entropy of every row in the same pass."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from qkeel.functional.distances import alibi_slopes
from qkeel.functional.statistics.logit_stats import LogitBracket
from qkeel.functional.statistics.rows import KernelRows
from qkeel.kernels.contract import Kernel, Refusal
from qkeel.kernels.encode import folded
from qkeel.kernels.native.attention import Found, How, attention, differentiable, ready
from qkeel.spec.call import AttentionCall
from qkeel.spec.shapes import Outputs

_STORED = (torch.float32, torch.bfloat16, torch.float16)
_MASKS = (torch.bool, torch.float64, *_STORED)


@final
class Native(Kernel):
    """Compiled on first use. Softmax with any mask, window and cap; rotations and ALiBi; float32 arithmetic."""

    def supports(self, call: AttentionCall) -> Refusal | None:
        reason = _of_spec(call) or _of_tensors(call) or _of_library() or _of_gradient(call)
        return None if reason is None else Refusal(reason, "use impl='chunked' (exact, O(T) memory) or impl='auto'")

    def __call__(self, call: AttentionCall) -> Outputs:
        return _run(call, stats=False)[0]

    def with_rows(self, call: AttentionCall) -> tuple[Outputs, KernelRows]:
        """Returns out, equal to the bit with its gradient to a plain call's, and detached statistics of each row."""
        out, *found = _run(call, stats=True)
        lse, top, entropy = (x.detach() for x in found)
        return out, KernelRows(torch.where(lse.isnan(), lse, top), lse, entropy)  # a largest number passes NaN over

    def bracketed(self, call: AttentionCall) -> tuple[Outputs, LogitBracket]:
        """Returns out, and the exact largest logit and mean entropy of each head over counted rows that see a key."""
        out, (top, lse, entropy) = self.with_rows(call)
        if call.query_mask is not None:
            over = call.query_mask[:, None] & (lse != -torch.inf)
            n = over.sum((0, 2))
            top, entropy = top.masked_fill(~over, -torch.inf), entropy.masked_fill(~over, 0.0)
        elif call.mask is not None or (call.causal and call.q.shape[2] > call.k.shape[2]):
            n = (lse != -torch.inf).sum((0, 2))
        else:
            n = torch.full_like(lse[0, :, 0], lse.shape[0] * lse.shape[2])
        most = top.amax((0, 2))
        sure = torch.ones_like(most, dtype=torch.bool)
        mean = entropy.sum((0, 2)) / n.clamp_min(1)
        return out, LogitBracket(lower=most, upper=most, entropy=mean, certified=sure)


def _biased(call: AttentionCall) -> bool:
    return call.spec.position.unwindowed.kind == "alibi"


def _how(call: AttentionCall, scale: float, stats: bool) -> How:
    return How(scale, call.causal, call.window or 0, call.spec.cap.limit or 0.0, stats)


def _of_spec(call: AttentionCall) -> str | None:
    spec, position, biased = call.spec, call.spec.position.unwindowed, _biased(call)
    if spec.normalizer.kind != "softmax":
        return f"the compiled attention normalises by softmax only, not by {spec.normalizer.formula()}"
    if spec.cap.kind == "other":
        return f"the compiled attention does not know the cap {spec.cap.formula()}"
    if not (position.folds or biased):
        return f"{position.formula()} is neither a rotation nor ALiBi"
    if not call.plain and (call.causal or biased or call.window is not None):
        return "the compiled attention takes positions 0, 1, 2, … only"
    if call.dropout:
        return "the compiled attention drops no weights"
    return None


def _of_tensors(call: AttentionCall) -> str | None:
    q, k, v, mask = call.q, call.k, call.v, call.mask
    given = (q, k, v) if mask is None else (q, k, v, mask)
    if not all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in given):
        return "the compiled attention is for plain tensors on a CPU"
    if q.dtype not in _STORED:
        return f"the compiled attention computes in float32 on float32, bfloat16 and float16, not on {q.dtype}"
    if q.shape[-1] % 8 or v.shape[-1] % 8 or not q.numel() or not v.numel():
        return f"the compiled attention takes widths that are multiples of 8, not {q.shape[-1]} and {v.shape[-1]}"
    if mask is not None and mask.dtype not in _MASKS:
        return f"the compiled attention does not read masks of {mask.dtype}"
    return None


def _of_library() -> str | None:
    return None if ready() else "the compiled attention is switched off, or cannot be used here and now"


def _of_gradient(call: AttentionCall) -> str | None:
    if not torch.is_grad_enabled():
        return None
    if call.mask is not None and call.mask.requires_grad:
        return "the compiled attention has no derivative by its mask"
    if not any(x.requires_grad for x in (call.q, call.k, call.v, *call.params.values())):
        return None
    if not differentiable(call.q, call.k, call.v, call.mask, _biased(call), _how(call, 1.0, False)):
        return "the compiled attention has a derivative for whole sequences without mask, window, bias and cap only"
    return None


def _run(call: AttentionCall, stats: bool) -> Found:
    q, k, v, scale = folded(call)
    slopes = alibi_slopes(q.shape[1]).to(torch.float32) if _biased(call) else None
    return attention(q, k, v, call.mask, slopes, _how(call, scale, stats))
