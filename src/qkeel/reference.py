"""The oracle: attention written out, T×T, in any float dtype. Obvious before fast."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from qkeel.spec import AttentionCall, AttentionSpec
from qkeel.spec.call import make_call
from qkeel.spec.slot import Keys, Logits, Outputs, Params, Queries, Values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attended:
    """Attention's out [b h t d'], logits before cap [b h t s] (-inf where not visible), weights [b h t s]."""

    out: Outputs
    logits: Logits
    weights: Logits


def attend(
    spec: AttentionSpec,
    q: Queries,
    k: Keys,
    v: Values,
    *,
    params: Params | None = None,
    causal: bool = True,
    mask: Tensor | None = None,
    pos_q: Tensor | None = None,
    pos_k: Tensor | None = None,
) -> Attended:
    """Attention of raw q [b h t d], k, v [b g s d] under `spec`, with every intermediate result.

    It is slow and needs T×T memory on purpose, because every kernel is checked against it, preferably in float64.

    Args:
        spec: what is computed.
        q: queries [b h t d].
        k: keys [b g s d]; g divides h.
        v: values [b g s d].
        params: the parameters of the spec, from `spec.init_params`.
        causal: hide keys after the query.
        mask: True where a key is visible, or an additive bias.
        pos_q: positions of queries; by default the last t of s.
        pos_k: positions of keys; by default 0 to s - 1.
    """
    call = make_call(spec, q, k, v, params=params, causal=causal, mask=mask, pos_q=pos_q, pos_k=pos_k)
    return attend_call(call)


def attend_call(call: AttentionCall) -> Attended:
    """`attend` on a checked call."""
    spec, rows, keys = call.spec, slice(0, call.q.shape[2]), slice(0, call.k.shape[2])
    logits = spec.logits(call.q, call.k, call.pos_q, call.pos_k, call.params)
    bias, visible = call.bias(rows, keys), call.visible(rows, keys)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    weights = spec.normalizer.weights(spec.cap.apply(logits), visible, call.params)
    v = spec.values(call.v, call.params).to(weights.dtype)
    v = v.repeat_interleave(call.q.shape[1] // v.shape[1], dim=1)
    hidden = logits if visible is None else logits.masked_fill(~visible, -torch.inf)
    return Attended(out=(weights @ v).to(call.q.dtype), logits=hidden, weights=weights)
