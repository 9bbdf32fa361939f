"""Softmax attention on a CPU in C++: exact largest logit and entropy of every row in the same pass."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from qkeel.functional.distances import alibi_slopes
from qkeel.functional.rows import KernelRows
from qkeel.functional.stats import LogitBracket
from qkeel.kernels.contract import Kernel, Refusal, folded
from qkeel.kernels.native.attention import Found, How, attention, differentiable, ready
from qkeel.spec.bias import ALiBi
from qkeel.spec.call import AttentionCall
from qkeel.spec.cap import NoCap, Softcap
from qkeel.spec.normalizer import Softmax
from qkeel.spec.position import Position
from qkeel.spec.window import SlidingWindow

_STORED = (torch.float32, torch.bfloat16, torch.float16)
_MASKS = (torch.bool, torch.float64, *_STORED)


@final
class Native(Kernel):
    """Compiled on first use. Softmax with any mask, window and cap; rotations and ALiBi; float32 arithmetic."""

    def supports(self, call: AttentionCall) -> Refusal | None:
        reason = _of_spec(call) or _of_tensors(call) or _of_gradient(call)
        if reason is None and not ready():
            reason = "the compiled attention is switched off, or cannot be used here and now"
        return None if reason is None else Refusal(reason, "use impl='chunked' (exact, O(T) memory) or impl='auto'")

    def __call__(self, call: AttentionCall) -> Tensor:
        return _run(call, stats=False)[0]

    def with_rows(self, call: AttentionCall) -> tuple[Tensor, KernelRows]:
        """out, its bits and its gradient those of a call without, and what the pass finds of each row, detached."""
        out, *found = _run(call, stats=True)
        lse, top, entropy = (x.detach() for x in found)
        return out, KernelRows(torch.where(lse.isnan(), lse, top), lse, entropy)  # a largest number passes NaN over

    def bracketed(self, call: AttentionCall) -> tuple[Tensor, LogitBracket]:
        """out, and the exact largest logit and mean entropy of each head over the rows that count and see a key."""
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


def _inner(call: AttentionCall) -> Position:
    position = call.spec.position
    return position.inner if isinstance(position, SlidingWindow) else position


def _how(call: AttentionCall, scale: float, stats: bool) -> How:
    cap = call.spec.cap
    return How(scale, call.causal, call.window or 0, cap.cap if isinstance(cap, Softcap) else 0.0, stats)


def _of_spec(call: AttentionCall) -> str | None:
    spec, position = call.spec, _inner(call)
    if type(spec.normalizer) is not Softmax:
        return f"the compiled attention normalises by softmax only, not by {spec.normalizer.formula()}"
    if type(spec.cap) not in (NoCap, Softcap):
        return f"the compiled attention does not know the cap {spec.cap.formula()}"
    biased = type(position) is ALiBi
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


def _of_gradient(call: AttentionCall) -> str | None:
    if not torch.is_grad_enabled():
        return None
    if call.mask is not None and call.mask.requires_grad:
        return "the compiled attention has no derivative by its mask"
    if not any(x.requires_grad for x in (call.q, call.k, call.v, *call.params.values())):
        return None
    if not differentiable(call.q, call.k, call.v, call.mask, type(_inner(call)) is ALiBi, _how(call, 1.0, False)):
        return "the compiled attention has a derivative for whole sequences without mask, window, bias and cap only"
    return None


def _run(call: AttentionCall, stats: bool) -> Found:
    q, k, v, scale = folded(call)
    slopes = alibi_slopes(q.shape[1]).to(torch.float32) if type(_inner(call)) is ALiBi else None
    return attention(q, k, v, call.mask, slopes, _how(call, scale, stats))
