"""The logsumexps of rows, which torch's fused GPU kernels compute anyway and the operators below SDPA return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend

from qkeel.patching.modes import cudnn, flash, kernel_choice, memory_efficient


def fused_with_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor] | None:
    """Returns out and lse of the fused operator that SDPA would choose on a GPU; None if it would not choose a fused
    operator."""
    if q.shape[-1] % 8 or v.shape[-1] % 8:  # SDPA would pad such heads itself
        return None
    gqa = q.shape[1] != k.shape[1]
    chosen = kernel_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=gqa)
    fused = _FUSED.get(SDPBackend(chosen))
    if fused is None:
        return None
    operator, between = fused
    out, lse = operator(q, k, v, *between, causal, scale=scale)[:2]
    if lse.ndim == 4:  # cuDNN returns [b h t 1]
        lse = lse[..., 0]
    return out, lse[..., : q.shape[2]]  # the memory-efficient kernel pads rows to a multiple of 32


# The operator of each choice, and its arguments between v and causality: the dropout; or a bias, whether to return the
# logsumexp, and the dropout.
_FUSED: dict[SDPBackend, tuple[Callable[..., Any], tuple[object, ...]]] = {
    SDPBackend.FLASH_ATTENTION: (flash, (0.0,)),
    SDPBackend.EFFICIENT_ATTENTION: (memory_efficient, (None, True, 0.0)),
    SDPBackend.CUDNN_ATTENTION: (cudnn, (None, True, 0.0)),
}
