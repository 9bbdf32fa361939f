"""The tolerance of every test of a kernel, taken from data."""

from __future__ import annotations

import torch
from torch import Tensor

from qkeel import reference

from .cases import Call, positions, widened


def borders_rounded(call: Call, visible: Tensor) -> Tensor:
    """Out of the low-precision oracle: float64 within, rounded to the call's dtype wherever a kernel must store.

    That is: q, k as they enter the dot product (a factor per query included), v, the weights, out.
    """
    dtype, wide = call.q.dtype, widened(call)
    (pos_q, pos_k), (q, k) = positions(wide), wide.encoded()
    factor = wide.spec.factor(pos_q, q.shape[-1], wide.params, q.dtype)
    if isinstance(factor, Tensor):
        q, factor = q * factor, 1.0
    q, k = q.to(dtype).double(), k.to(dtype).double()
    logits = wide.spec.position.scores(q * factor, k, pos_q, pos_k, wide.params)
    if wide.mask is not None and wide.mask.is_floating_point():
        logits = logits + wide.mask.masked_fill(wide.mask == -torch.inf, 0.0)
    weights = wide.spec.normalizer.weights(
        wide.spec.cap.apply(logits), visible, wide.params
    )
    v = (
        wide.spec.values(wide.v, wide.params)
        .to(dtype)
        .double()
        .repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    )
    return (weights.to(dtype).double() @ v).to(dtype)


def allowed_error(call: Call, truth: reference.Attended) -> float:
    """2 × (the low-precision oracle's own error + rounding), the largest over the output.

    Own error: of `borders_rounded`, and of the oracle run in the call's dtype. Rounding: of one result, and of the
    largest logit in float32 times the largest value.
    """
    size, values = truth.out.abs().max().item(), call.v.abs().max().item()
    logit = truth.logits.masked_fill(truth.logits == -torch.inf, 0.0).abs().max().item()
    own = max(
        (borders_rounded(call, truth.logits > -torch.inf).double() - truth.out)
        .abs()
        .max()
        .item(),
        (call.attended().out.double() - truth.out).abs().max().item(),
    )
    return 2 * (
        own
        + torch.finfo(call.q.dtype).eps * size
        + torch.finfo(torch.float32).eps * logit * values
    )
