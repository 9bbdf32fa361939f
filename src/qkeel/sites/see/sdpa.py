"""Torch's fused attention functions as AttentionCalls: q, k and mask are their arguments."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from qkeel.patching.modes import Args, Kwargs
from qkeel.patching.private_operators import SDPA_KERNELS, Operator, argument_names
from qkeel.sites.calls.head_layout import Layout, fewest_keys
from qkeel.sites.calls.hidden_pairs import hides
from qkeel.sites.calls.logit_statistics import Seen
from qkeel.spec import AttentionCall, AttentionSpec, Fixed
from qkeel.spec.band_call import band_call
from qkeel.spec.call import make_call


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """The heads of a call, as far as its arguments do not show them.

    Args:
        layout: the dimensions of q and k before tokens and features, where there are not the two of [b h t d].
        keys: [b g s d] of keys [b h s d] that may be repeated for grouped queries.
    """

    layout: Callable[[Tensor, Tensor], Layout]
    keys: Callable[[Tensor], Tensor] = fewest_keys


Reader = Callable[[Args, Kwargs, Geometry], Seen]

_MHA = inspect.signature(inspect.unwrap(F.multi_head_attention_forward))


def sdpa(args: Args, kwargs: Kwargs, geometry: Geometry) -> Seen:
    """Reads a call of F.scaled_dot_product_attention."""
    return _sdpa(sdpa_arguments(args, kwargs), geometry)


def _sdpa(given: Kwargs, geometry: Geometry) -> Seen:
    q, k, causal = given["query"], given["key"], bool(given.get("is_causal", False))
    scale = given.get("scale")
    scale = 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else float(scale)
    if q.is_nested:
        return _nested(q.unbind(), k.unbind(), AttentionSpec(scale=Fixed(scale)), causal)
    return _call(q, k, scale, given.get("attn_mask"), geometry, causal=causal)


def _nested(q: Sequence[Tensor], k: Sequence[Tensor], spec: AttentionSpec, causal: bool) -> AttentionCall:
    """The call of sequences q [h t d] and k [g s d] of lengths of their own."""
    whole, ends = zip(
        *(
            (
                torch.cat(tuple(x), 1)[None],
                torch.tensor([0, *itertools.accumulate(one.shape[1] for one in x)], device="cpu"),
            )
            for x in (q, k)
        )
    )
    cu_seqlens = tuple(x.to(whole[0].device, non_blocking=True) for x in ends)
    return band_call(make_call(spec, *whole, whole[1], causal=causal), cu_seqlens=cu_seqlens)  # type: ignore[arg-type]


def _kernel(operator: Operator) -> Reader:
    """Reads a call of an operator behind F.scaled_dot_product_attention, its arguments named by its schema."""

    def read(args: Args, kwargs: Kwargs, geometry: Geometry) -> Seen:
        given = {**dict(zip(argument_names(operator), args)), **kwargs}
        return _sdpa({**given, "attn_mask": given.get("attn_mask", given.get("attn_bias"))}, geometry)

    return read


def _call(
    q: Tensor, k: Tensor, scale: float, mask: Tensor | None, geometry: Geometry, *, causal: bool
) -> AttentionCall:
    """The call of q and k [... t d]; `causal` as SDPA has it: query i sees the keys up to i, however many there are."""
    t, s = q.shape[-2], k.shape[-2]
    if q.ndim == 4:
        q4, k4 = q, k.expand(q.shape[0], *k.shape[1:])
    else:
        lead, how = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), geometry.layout(q, k)
        q4, k4 = (how.apply(x.expand(*lead, *x.shape[-2:])) for x in (q, k))
        mask = mask if mask is None else how.apply(mask.expand(*lead, t, s))
    if k4.shape[1] == q4.shape[1]:  # with fewer, no head is repeated, and to look would wait for the device
        k4 = geometry.keys(k4)
    pos = (torch.arange(t, device=q.device), torch.arange(s, device=q.device)) if causal and t != s else (None, None)
    spec = AttentionSpec(scale=Fixed(scale))
    return make_call(
        spec,
        q4,
        k4,
        k4,
        causal=causal,
        mask=hiding(mask if mask is None else mask.detach()),
        pos_q=pos[0],
        pos_k=pos[1],
    )


def hiding(mask: Shaped[Tensor, ...] | None) -> Shaped[Tensor, "#b #h #t #s"] | None:
    """The mask as [b|1 h|1 t|1 s], an additive one with -inf where it hides."""
    if mask is None:
        return None
    while mask.ndim < 4:
        mask = mask[None]
    return mask if mask.dtype == torch.bool else mask.masked_fill(hides(mask), -torch.inf)


def mha(args: Args, kwargs: Kwargs, geometry: Geometry) -> Seen:
    """Reads a call of F.multi_head_attention_forward, opaque inside: q and k are computed again from its arguments."""
    bound = _MHA.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    query, key = given["query"], given["key"]
    if query.ndim == 2:
        query, key = query[:, None], key[:, None]
    t, b, m = query.shape
    h = given["num_heads"]
    q, k = _projected(given, query, key, m)
    q = q.reshape(t, b, h, m // h).permute(1, 2, 0, 3)
    k = k.reshape(key.shape[0], b, h, m // h).permute(1, 2, 0, 3)
    if given["static_k"] is not None:
        k = given["static_k"].unflatten(0, (b, h))
    mask = mha_mask(given, (b, h, t, k.shape[2]))
    if given["bias_k"] is not None:
        k = torch.cat([k, given["bias_k"].view(1, h, 1, -1).expand(b, -1, -1, -1)], dim=2)
    if given["add_zero_attn"]:
        k = torch.cat([k, torch.zeros_like(k[:, :, :1])], dim=2)
    if mask is not None:
        mask = F.pad(mask, (0, k.shape[2] - mask.shape[-1]))
    causal = bool(given["is_causal"]) and mask is None
    return _call(q, k, 1 / math.sqrt(q.shape[-1]), mask, geometry, causal=causal)


def _projected(given: Kwargs, query: Tensor, key: Tensor, m: int) -> tuple[Tensor, Tensor]:
    bias = given["in_proj_bias"]
    if given["use_separate_proj_weight"]:
        parts = (None, None) if bias is None else (bias[:m], bias[m : 2 * m])
        return F.linear(query, given["q_proj_weight"], parts[0]), F.linear(key, given["k_proj_weight"], parts[1])
    # The whole packed matrix, so that gradients show its rows.
    weight = given["in_proj_weight"]
    return F.linear(query, weight, bias)[..., :m], F.linear(key, weight, bias)[..., m : 2 * m]


def mha_mask(given: Kwargs, shape: tuple[int, int, int, int]) -> Float[Tensor, "#b #h t s"] | None:
    """The attn_mask and key_padding_mask as one additive mask."""
    b, h, t, s = shape
    total = None
    of_keys = given["key_padding_mask"]
    of_keys = of_keys if of_keys is None else of_keys.view(b, 1, 1, s)
    for mask in (_of_pairs(given["attn_mask"], b, h, t, s), of_keys):
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask, -torch.inf)
            total = mask if total is None else total + mask
    return total


def _of_pairs(mask: Tensor | None, b: int, h: int, t: int, s: int) -> Tensor | None:
    if mask is None:
        return None
    return mask.view(b, h, t, s) if mask.ndim == 3 and mask.shape[0] == b * h else mask.expand(1, 1, t, s)


# The reader of each of torch's fused attention functions, and of the operators behind them.
SDPA: Mapping[str, Reader] = {
    "scaled_dot_product_attention": sdpa,
    "multi_head_attention_forward": mha,
    **{name: _kernel(operator) for name, operator in SDPA_KERNELS.items()},
}


_BY_PLACE = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def sdpa_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of a call, with torch's defaults for those that it leaves out.

    >>> sdpa_arguments((1, 2, 3), {"is_causal": True})["is_causal"]
    True
    """
    return {**_DEFAULTS, **dict(zip(_BY_PLACE, args)), **kwargs}
