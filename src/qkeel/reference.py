"""The reference implementation: attention with explicit T×T matrices in any float dtype, written for clarity rather
than speed."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from qkeel.spec import AttentionCall, AttentionSpec
from qkeel.spec.call import make_call
from qkeel.spec.slot import Keys, Logits, Outputs, Params, Queries, Values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attended:
    """The result of attention: out [b h t d'], the logits before the cap [b h t s] (-inf where not visible), and the
    weights [b h t s]."""

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
    """Computes the attention that `spec` describes for raw q [b h t d] and k, v [b g s d], with all intermediate
    results.

    It is deliberately slow and needs T×T memory, because every kernel is checked against it, preferably in float64.

    Args:
        spec: what attention computes.
        q: queries [b h t d].
        k: keys [b g s d]; h must be a multiple of g.
        v: values [b g s d].
        params: the parameters of the spec, from `spec.init_params`.
        causal: whether keys after the query are hidden.
        mask: True where a key is visible, or an additive bias.
        pos_q: positions of queries; by default, the last t of the s positions.
        pos_k: positions of keys; by default, 0 to s - 1.

    >>> import torch
    >>> q = torch.ones(1, 1, 2, 4, dtype=torch.float64)
    >>> attend(AttentionSpec(), q, q, q).weights.tolist()
    [[[[1.0, 0.0], [0.5, 0.5]]]]
    """
    call = make_call(
        spec, q, k, v, params=params, causal=causal, mask=mask, pos_q=pos_q, pos_k=pos_k
    )
    return attend_call(call)


def attend_call(call: AttentionCall) -> Attended:
    """Like `attend`, but for a checked call."""
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
