"""F.scaled_dot_product_attention on qkeel's kernels, with the same arguments, shapes and errors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from qkeel.functional.statistics import KernelRows
from qkeel.kernels.attention.compiled import Native
from qkeel.kernels.choose import choose
from qkeel.kernels.decoding.compiled import Decode
from qkeel.kernels.native.operators import is_plain
from qkeel.patching.modes import Kwargs
from qkeel.spec.attention import AttentionSpec
from qkeel.spec.call import AttentionCall, make_call
from qkeel.spec.logits import Fixed
from qkeel.spec.slot import AttentionMask, Outputs


def scaled_dot_product_attention(
    query: Float[Tensor, "*batch t d"],
    key: Float[Tensor, "*keys s d"],
    value: Float[Tensor, "*keys s e"],
    attn_mask: AttentionMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Float[Tensor, "*batch t e"]:
    """Returns softmax(scale · q kᵀ + mask) v, as a drop-in replacement for torch's function; public as
    `qkeel.nn.functional_attention`.

    On a CPU, supported calls use qkeel's compiled attention, which gives a watched model's largest logits and entropies
    at no extra cost. All other calls (dropout, autocast, float64, subclasses, torch.func, torch.compile, a GPU) go to
    torch's function. Watching, bounds, clipping and remedies work the same way with both.

    Args:
        query: the queries [... t d].
        key: the keys [... s d].
        value: the values [... s e].
        attn_mask: a boolean mask (True = may attend) or a mask that is added to the logits; it broadcasts to [... t s].
        dropout_p: probability of dropping a weight.
        is_causal: query i sees the keys up to i, regardless of the number of keys; cannot be combined with a mask.
        scale: factor on the logits, 1/√d by default.
        enable_gqa: allows more query heads than key heads; their number must be a multiple of the number of key heads.

    Returns:
        The output [... t e], in torch's memory layout, which is that of the query if it leaves no gaps.

    Raises:
        Exception: whatever torch's function raises.

    Example:
        >>> q = torch.ones(1, 2, 3, 8)
        >>> torch.equal(scaled_dot_product_attention(q, q, q, is_causal=True), q)
        True
    """
    arguments = (query, key, value)
    options: Kwargs = {
        "attn_mask": attn_mask,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
    }
    # Function modes should see this function. Tensor subclasses, above all nested tensors, only know torch's.
    if has_torch_function_variadic(*arguments) and all(map(is_plain, arguments)):
        return handle_torch_function(
            scaled_dot_product_attention, arguments, *arguments, **options
        )
    kernel, call = _compiled_call(
        {"query": query, "key": key, "value": value, **options}
    )
    if kernel is not None and call is not None:
        return _laid_out(kernel(call), query)
    return F.scaled_dot_product_attention(*arguments, **options)


def attention_with_rows(arguments: Kwargs) -> tuple[Outputs, KernelRows | None]:
    """Computes attention from all arguments by name; also returns row statistics if the compiled kernel ran, otherwise
    None."""
    kernel, call = _compiled_call(arguments)
    if isinstance(kernel, Native) and call is not None:
        out, rows = kernel.with_rows(call)
        return _laid_out(out, arguments["query"]), rows
    return scaled_dot_product_attention(**arguments), None


def _compiled_call(
    arguments: Kwargs,
) -> tuple[Callable[[AttentionCall], Tensor] | None, AttentionCall | None]:
    """Returns the compiled kernel and its call, or None and None if torch's function must compute it."""
    q, k, v, mask, causal = (
        arguments[name] for name in ("query", "key", "value", "attn_mask", "is_causal")
    )
    if torch.compiler.is_compiling() or not (
        is_plain(q) and q.is_cpu and _fit(q, k, v, mask, arguments["enable_gqa"])
    ):
        return None, None
    # Random numbers, the error and the rounding are to be those of torch.
    if (
        arguments["dropout_p"]
        or (causal and mask is not None)
        or torch.is_autocast_enabled("cpu")
    ):
        return None, None
    t, s, scale = q.shape[2], k.shape[2], arguments["scale"]
    # With fewer keys than queries, torch's alignment to the first key is none that qkeel has.
    if (
        (causal and s < t)
        or not (q.numel() and v.numel())
        or not (scale is None or math.isfinite(scale))
    ):
        return None, None
    # torch aligns the first query with the first key.
    if causal and s > t:
        k, v = k[:, :, :t], v[:, :, :t]
    spec = _spec(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    # The kernel takes masks of four dimensions.
    mask = mask if mask is None else mask[(None,) * (4 - mask.ndim)]
    call = make_call(spec, q, k, v, causal=causal, mask=mask)
    kernel = choose(call)
    return (kernel, call) if isinstance(kernel, (Native, Decode)) else (None, None)


def _laid_out(out: Tensor, query: Tensor) -> Tensor:
    """Arranges the dimensions of out [b h t e] in memory in the same order as the query's."""
    if out.shape[-1] != query.shape[-1]:
        # Torch computes such attention as plain matrix products.
        return out.contiguous()
    # A caller may go on with a view that only this layout allows.
    order = sorted(range(4), key=lambda i: (-query.stride(i), i))
    back = sorted(range(4), key=order.__getitem__)
    return out.permute(order).contiguous().permute(back)


def _fit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> bool:
    """True if the shapes and dtypes are those of attention over a batch of heads, and torch accepts them too."""
    if not (
        q.ndim == k.ndim == v.ndim == 4
        and q.dtype == k.dtype == v.dtype
        and q.dtype in _DTYPES
    ):
        return False
    if not (
        q.device == k.device == v.device
        and q.shape[0] == k.shape[0]
        and k.shape[:3] == v.shape[:3]
    ):
        return False
    heads, groups = q.shape[1], k.shape[1]
    if q.shape[3] != k.shape[3] or not (
        heads == groups or (gqa and groups and heads % groups == 0)
    ):
        return False
    if mask is None:
        return True
    full_shape = (q.shape[0], heads, q.shape[2], k.shape[2])[4 - mask.ndim :]
    fits = mask.ndim <= 4 and all(
        n in (1, size) for n, size in zip(mask.shape, full_shape)
    )
    return fits and mask.device == q.device and mask.dtype in (torch.bool, q.dtype)


# Validated once per scale, not in every call.
@functools.cache
def _spec(scale: float) -> AttentionSpec:
    return AttentionSpec(scale=Fixed(scale))


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
