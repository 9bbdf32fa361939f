"""Attention over a latent cache: no key or value of a head is made; the up-projections go to the query and the output.

q_h·k_h,s = (W_uk^hᵀ q_h)·c_s + q_r,h·k_r,s and Σ_s p_s v_h,s = W_uv^h Σ_s p_s c_s, so a cached token is c_s and k_r,s.
A norm on the keys keeps that form if all it does is divide k_h by a size and multiply by a gain that heads share:
(g∘k_h)/size = the gain of the plain part put on q_h, that of the rotated part on k_r before it is cached, and 1/size
on the logit.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkeel.errors import RefusedError
from qkeel.functional.norms import wide
from qkeel.kernels.compiled_decode import latents
from qkeel.kernels.contract import Refusal
from qkeel.kernels.encode import encoded
from qkeel.kernels.prepare import average, row_blocks
from qkeel.spec import AttentionSpec
from qkeel.spec.call import AttentionCall
from qkeel.spec.norm import Norm
from qkeel.spec.shapes import Heads, PosQ, Queries
from qkeel.spec.slot import Params

PerKey = Float[Tensor, "b g n"]
SharedKey = Float[Tensor, "b 1 t r"]
Gain = Float[Tensor, "*gain"]
BLOCK = 1 << 21  # logits held at once
_WAY_OUT = (
    "use RMSNorm or L2Norm on q and k with gain none, dim, one_plus_dim or scalar; without a cache this norm works as "
    "it is, from keys and values made again"
)


def key_norm(spec: AttentionSpec) -> Norm | None:
    """The norm that a cached key needs its inverse size for, if any."""
    norm = spec.norm
    return norm if norm.kind in ("rms", "l2") and "k" in norm.sides else None


@functools.cache
def refuse_latents(spec: AttentionSpec) -> Refusal | None:
    """The reason why this spec's attention cannot be computed from cached latents, or None."""
    norm = spec.norm
    if not spec.position.keeps:
        return Refusal(
            f"under {spec.position.formula()} every key turns again as the text grows, and only turned ones are cached",
            "use a stretch that is fixed, such as YaRN or NTK",
        )
    if norm.sides in ("", "q"):
        return None
    if norm.kind == "other":
        return Refusal(f"nothing is known of the norm {norm.formula()} that would divide it out of a key", _WAY_OUT)
    if "v" in norm.sides:
        return Refusal("a norm on the values needs the value of every head and token", _WAY_OUT)
    if norm.kind == "layer":
        return Refusal(
            "LayerNorm takes the mean off each head's key, a second number per head and token besides the inverse "
            "root mean square, and one that does not reach the key the heads share",
            _WAY_OUT,
        )
    if norm.bias:
        return Refusal("a bias after the norm would be rotated with the key and has no place in its latent", _WAY_OUT)
    if norm.gain in ("head", "head_dim"):
        return Refusal(
            "a gain of each head's own has no place on the rotated key, which is cached once for all heads",
            f"{_WAY_OUT}. One number per head can go on the query's side: Learned(per='head') as the scale",
        )
    return None


def check_latents(spec: AttentionSpec) -> None:
    """Raise RefusedError unless attention under this spec can be computed from cached latents."""
    refusal = refuse_latents(spec)
    if refusal is not None:
        raise RefusedError(f"MLA cannot attend to cached latents: {refusal}")


def key_gain(spec: AttentionSpec, params: Params) -> Gain | None:
    """The factor on normed keys, [d] or [], None for nothing."""
    norm = key_norm(spec)
    return None if norm is None else norm.weight("k", params)


def encode(spec: AttentionSpec, q: Queries, rotated: SharedKey, at: PosQ, params: Params) -> tuple[Queries, SharedKey]:
    """The encoded q [b h t d], and the shared key's part [b 1 t r] times its gain and rotated."""
    gain = key_gain(spec, params)
    if gain is not None and gain.ndim:
        gain = gain[: rotated.shape[-1]]
    before = spec.position.order == "norm_then_rotate"
    if gain is not None and before:
        rotated = rotated * gain
    q, rotated = encoded(_query_alone(spec), q, rotated, at, at, params)
    return q, rotated if gain is None or before else rotated * gain


@functools.cache
def _query_alone(spec: AttentionSpec) -> AttentionSpec:
    """The spec that does nothing to keys besides rotating them."""
    return spec.replace(norm=spec.norm.without_keys())


def inverse_size(norm: Norm, k: Heads) -> PerKey:
    """The factor of the norm on each raw key [b h t d]: [b h t], or [b 1 t] where it is over all heads at once."""
    if norm.over == "layer":
        k = k.transpose(1, 2).flatten(2)[:, None]
    return norm.inverse(k)[..., 0]


def absorb(q: Queries, up: Float[Tensor, "h n l"], gain: Gain | None, rope_dim: int) -> Float[Tensor, "b h t latent"]:
    """[b h t l+r]: the plain part of encoded queries through W_uk^h, rows of `up` [h n l], then the rotated part."""
    rotated, plain = q[..., :rope_dim], q[..., rope_dim:]
    if gain is not None:
        plain = plain * (gain[rope_dim:] if gain.ndim else gain)
    return torch.cat([plain @ up, rotated], dim=-1)


def attend_latents(call: AttentionCall, inverse: PerKey | None, head_dim: int) -> Float[Tensor, "b h t l"]:
    """Σ_s p_s c_s [b h t l] for absorbed queries [b h t l+r], cached k [b 1 s l+r] and c, its first l numbers, as v.

    In float32 or wider, O(T) memory. `inverse` [b h|1 s] multiplies the logits before mask and cap; `head_dim` is
    that of the formula, which the scale goes by. The compiled kernel takes the calls that it can, without a gradient.
    """
    kind = wide(call.q.dtype)
    with torch.autocast(call.q.device.type, enabled=False):
        scale = call.spec.factor(call.pos_q, head_dim, call.params, kind)
        fast = latents(call, scale, inverse)
        if fast is not None:
            return fast.to(call.q.dtype)
        q, k = call.q.to(kind) * scale, call.k.to(kind)
        parts = [_block(call, q, k, inverse, rows) for rows in row_blocks(call, BLOCK)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).to(call.q.dtype)


def _block(call: AttentionCall, q: Tensor, k: Tensor, inverse: Tensor | None, rows: slice) -> Tensor:
    keys, spec = call.span(rows), call.spec
    k = k[:, :, keys]
    z = spec.position.scores(q[:, :, rows], k, call.pos_q[:, rows], call.pos_k[:, keys], call.params)
    if inverse is not None:
        z = z * inverse[:, :, None, keys].to(z.dtype)
    bias = call.bias(rows, keys)
    if bias is not None:
        z = z + bias.to(z.dtype)
    weights = spec.normalizer.weights(spec.cap.apply(z), call.visible(rows, keys), call.params)
    return average(F.dropout(weights, call.dropout) if call.dropout else weights, k[..., : call.v.shape[-1]])
