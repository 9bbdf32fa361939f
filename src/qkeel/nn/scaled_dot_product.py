"""F.scaled_dot_product_attention with qkeel's kernels under it: the same arguments, shapes and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from qkeel.functional.statistics.rows import KernelRows
from qkeel.kernels.choose import choose
from qkeel.kernels.compiled_attention import Native
from qkeel.kernels.compiled_decode import Decode
from qkeel.kernels.native.operator import is_plain
from qkeel.spec.attention import AttentionSpec
from qkeel.spec.call import AttentionCall, make_call
from qkeel.spec.scale import Fixed


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v, as torch's function of this name; in qkeel it is `qkeel.nn.functional_attention`.

    On a CPU it is the compiled attention where that takes the call, which a watched model's largest logits and
    entropies cost nothing more of; everything else (dropout, float64, subclasses, torch.func, a GPU) goes to torch's
    function, whose fused operator a watched model's logsumexps come from. It is seen, bounded, clipped and changed by
    remedies as torch's is.

    >>> q = torch.ones(1, 2, 3, 8)
    >>> torch.equal(scaled_dot_product_attention(q, q, q, is_causal=True), q)
    True

    Args:
        query: [... t d]. key, value: [... s d], [... s e].
        attn_mask: boolean (True = may attend) or added to the logits, broadcast to [... t s].
        dropout_p: probability of dropping a weight.
        is_causal: query i sees the keys up to i, however many there are; not together with a mask.
        scale: of the logits, 1/√d by default.
        enable_gqa: the query heads are a multiple of the key heads.

    Returns: [... t e].

    Raises: what torch's function raises.
    """
    given = (query, key, value)
    how: dict[str, Any] = {
        "attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa
    }  # fmt: skip
    if has_torch_function_variadic(*given):
        return handle_torch_function(scaled_dot_product_attention, given, *given, **how)
    kernel, call = _own(*given, **how)
    if kernel is not None and call is not None:
        return kernel(call)
    return F.scaled_dot_product_attention(*given, **how)


def attention_with_rows(*args: object, **kwargs: object) -> tuple[Tensor, KernelRows | None]:
    """The same, and what the compiled attention found of each row; None where another kernel computed it."""
    kernel, call = _own(*args, **kwargs)  # type: ignore[arg-type]
    if isinstance(kernel, Native) and call is not None:
        return kernel.with_rows(call)
    return scaled_dot_product_attention(*args, **kwargs), None  # type: ignore[arg-type]


def attention_with_logsumexp(*args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
    """The same, and the logsumexp of each row [b h t]; None where another kernel than the compiled one computed it."""
    kernel, call = _own(*args, **kwargs)  # type: ignore[arg-type]
    if isinstance(kernel, Native) and call is not None:
        return kernel.with_logsumexp(call)
    return scaled_dot_product_attention(*args, **kwargs), None  # type: ignore[arg-type]


def _own(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Callable[[AttentionCall], Tensor] | None, AttentionCall | None]:
    """The compiled kernel for a call and the call; None where torch's own function is the one to compute it."""
    if not (is_plain(query) and query.is_cpu and _fit(query, key, value, attn_mask, enable_gqa)):
        return None, None
    if dropout_p or (is_causal and attn_mask is not None) or torch.is_autocast_enabled("cpu"):
        return None, None
    if is_causal and key.shape[2] != query.shape[2]:  # torch aligns the first query to the first key
        if key.shape[2] < query.shape[2]:
            return None, None
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    spec = AttentionSpec(scale=Fixed(1 / math.sqrt(query.shape[-1]) if scale is None else scale))
    call = make_call(spec, query, key, value, causal=is_causal, mask=attn_mask)
    kernel = choose(call)
    return (kernel, call) if isinstance(kernel, (Native, Decode)) else (None, None)


def _fit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> bool:
    """Returns whether the shapes and dtypes are those of attention over one batch of heads, and torch takes them."""
    if not (q.ndim == k.ndim == v.ndim == 4 and q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES):
        return False
    if not (q.device == k.device == v.device and q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3]):
        return False
    heads, groups = q.shape[1], k.shape[1]
    if q.shape[3] != k.shape[3] or not (heads == groups or (gqa and groups and heads % groups == 0)):
        return False
    return mask is None or (mask.device == q.device and mask.dtype in (torch.bool, q.dtype) and 2 <= mask.ndim <= 4)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
