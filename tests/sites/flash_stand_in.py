"""Functions with flash-attn 2's names, signatures and layouts, computed in plain torch: flash-attn needs a GPU.

They prove that the adapter reads arguments right and that every alias is seen; not that an installed flash-attn has
these signatures.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def scores(
    q: Tensor,
    k: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Logits before the cap and what the softmax takes, [h t s] of q [t h d] and k [s g d], with -inf where hidden."""
    (t, h, d), (s, g, _) = q.shape, k.shape
    z = torch.einsum("thd,shd->hts", q, k.repeat_interleave(h // g, dim=1)) * (
        1 / math.sqrt(d) if scale is None else scale
    )
    gap = torch.arange(t)[:, None] + (s - t) - torch.arange(s)
    if slopes is not None:
        z = z - slopes[:, None, None] * gap.abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(t, s, dtype=torch.bool)
    if left >= 0:
        hidden |= gap > left
    if right >= 0:
        hidden |= gap < -right
    capped = softcap * torch.tanh(z / softcap) if softcap else z
    return z.masked_fill(hidden, -torch.inf), capped.masked_fill(hidden, -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> Tensor:
    _, capped = scores(q, k, *options)
    weights = capped.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hts,shd->thd", weights, v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))


def maybe_contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator, as some versions have it: what is watched then has a closure."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    each = alibi_slopes if alibi_slopes is not None and alibi_slopes.ndim == 2 else [alibi_slopes] * len(q)
    parts = [attend(*x, (softmax_scale, causal, window_size, softcap, s)) for *x, s in zip(q, k, v, each)]
    return torch.stack(parts)


@maybe_contiguous
def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    # Calls one that is watched itself: one attention, not two.
    return flash_attn_func(*qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    return flash_attn_func(q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    a, b = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes)
    pieces = zip(a, a[1:], b, b[1:])
    return torch.cat([attend(q[i:j], k[m:n], v[m:n], options) for i, j, m, n in pieces])


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False):
    cu, m = cu_seqlens, max_seqlen
    return flash_attn_varlen_func(*qkv.unbind(1), cu, cu, m, m, dropout_p, softmax_scale, causal)


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    sizes = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, *kv.unbind(1), *sizes, dropout_p, softmax_scale, causal)
