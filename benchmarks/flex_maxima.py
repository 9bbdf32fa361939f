"""Attention whose kernel also returns each row's largest logit: FlexAttention's auxiliary outputs, on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qkeel.errors import RefusedError
from qkeel.kernels.contract import Refusal
from qkeel.kernels.encode import folded
from qkeel.spec.call import AttentionCall
from qkeel.spec.shapes import Outputs, PerRow

OUT = "use qkeel.attention(..., stats='max'), which takes any call on any device"


def refusal(call: AttentionCall) -> Refusal | None:
    """None if `attend_with_maxima` takes the call, else the reason."""
    spec = call.spec
    if call.q.device.type != "cuda":
        return Refusal("FlexAttention returns the largest logits on a CUDA device only", OUT)
    if spec.normalizer.kind != "softmax" or spec.cap.kind != "none" or not spec.position.folds:
        return Refusal("FlexAttention is used here for softmax without a cap, positions folded into q and k", OUT)
    if call.mask is not None or call.dropout or not call.plain:
        return Refusal("FlexAttention is used here without a mask, dropout or positions of the caller's own", OUT)
    return None


def attend_with_maxima(call: AttentionCall) -> tuple[Outputs, PerRow, PerRow]:
    """Returns out [b h t d], lse [b h t] and the largest logit of each query row [b h t], from one fused kernel.

    Not chosen by itself: FlexAttention's kernel is the slower one on recent GPUs. The first call compiles. lse and
    maxima are detached; rows that see no key have -inf.

    Raises:
        RefusedError: see `refusal`.
    """
    refused = refusal(call)
    if refused is not None:
        raise RefusedError(str(refused))
    return attend(compiled(), call)


def attend(flex: Callable[..., Any], call: AttentionCall) -> tuple[Outputs, PerRow, PerRow]:
    """The same by that flex_attention."""
    from torch.nn.attention.flex_attention import AuxRequest

    q, k, v, scale = folded(call)
    out, aux = flex(
        q,
        k,
        v,
        block_mask=visible(call),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True, max_scores=True),
    )
    return out, aux.lse.detach(), aux.max_scores.detach()


def visible(call: AttentionCall) -> Any:
    """FlexAttention's block mask of a call: causal, a window, both, or None; made once for calls of these shapes."""
    if call.window is None and not call.causal:
        return None
    return _mask(call.q.shape[2], call.k.shape[2], call.window, call.causal, call.q.device)


@functools.lru_cache(maxsize=8)
def _mask(t: int, s: int, window: int | None, causal: bool, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    back = s - t

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        away = row + back - key
        seen = away >= 0 if causal else away > -t - s
        return seen if window is None else seen & (away < window) & (away > -window)

    return create_block_mask(sees, None, None, t, s, device=device)


@functools.cache
def compiled() -> Callable[..., Any]:
    """Returns flex_attention as one kernel."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)
