"""Functions with flash-attn 2's names, signatures and layouts, computed in plain torch: flash-attn needs a GPU.

They prove that the adapter reads arguments right and that every alias is seen; not that an installed flash-attn has
these signatures.
"""

import functools
import math

import torch


def scores(
    q,
    k,
    scale,
    causal,
    window,
    softcap,
    slopes,
):
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


def attend(q, k, v, options):
    """Output [t h d] and logsumexps [h t], of a row without a key +inf, as flash-attn 2 has it."""
    _, capped = scores(q, k, *options)
    weights, lse = capped.softmax(-1).nan_to_num(0.0), capped.logsumexp(-1)
    out = torch.einsum(
        "hts,shd->thd", weights, v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    )
    return out, lse.masked_fill(lse == -torch.inf, torch.inf)


def maybe_contiguous(function):
    """A decorator, as some versions have it: what is watched then has a closure."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
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
    each = (
        alibi_slopes
        if alibi_slopes is not None and alibi_slopes.ndim == 2
        else [alibi_slopes] * len(q)
    )
    parts = [
        attend(*x, (softmax_scale, causal, window_size, softcap, s))
        for *x, s in zip(q, k, v, each)
    ]
    outs, sums = (torch.stack(x) for x in zip(*parts))
    return (outs, sums, None) if return_attn_probs else outs


@maybe_contiguous
def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    # Calls one that is watched itself: one attention, not two.
    how = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return flash_attn_func(*qkv.unbind(2), *how)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    how = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return flash_attn_func(q, *kv.unbind(2), *how)


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
    found = [attend(q[i:j], k[m:n], v[m:n], options) for i, j, m, n in pieces]
    rest = len(q) - a[-1]  # tokens behind the last sequence: nothing is written there
    out = torch.cat([*(x for x, _ in found), q.new_full((rest, *q.shape[1:]), 7.0)])
    lse = torch.cat([*(x for _, x in found), q.new_full((q.shape[1], rest), 1e30)], 1)
    return (out, lse, None) if return_attn_probs else out
