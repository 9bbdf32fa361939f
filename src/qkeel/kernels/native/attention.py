"""Attention with the statistics of its logits as one compiled operator, and its derivative."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from qkeel.kernels.native.operator import OperatorSource

Found = tuple[Tensor, Tensor, Tensor, Tensor]


class How(NamedTuple):
    """The options of the operator.

    scale: of q·k. causal: no key after the query. window: query and key are less apart; 0 is none. cap: 0 is none.
    stats: also largest logits and entropies.
    """

    scale: float
    causal: bool
    window: int
    cap: float
    stats: bool


def attention(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    mask: Tensor | None,
    slopes: Float[Tensor, " h"] | None,
    how: How,
) -> Found:
    """Returns out [b h t e] in q's dtype; float32 lse, largest logit before the cap and entropy [b h t].

    The last two are empty without `how.stats`.

    Args:
        q, k, v: as they enter the product; the last query is aligned to the last key.
        mask: boolean (True: may attend) or float, four dimensions that broadcast to [b h t s].
        slopes: float32; times the distance, they are subtracted from the logits. how: the options.
    """
    return torch.ops.qkeel_native.attention(q, k, v, mask, slopes, *how)


def differentiable(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, biased: bool, how: How) -> bool:
    """Returns whether the output has a derivative: the compiled one, or that of torch's kernel, from the logsumexp."""
    if backward_ready():
        return True
    plain = mask is None and not biased and how.window == 0 and how.cap == 0 and q.shape[-1] == v.shape[-1]
    return plain and (not how.causal or q.shape[2] == k.shape[2])


def _shapes(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Found:
    b, h, t, _ = q.shape
    out = q.new_empty(b, t, h, v.shape[-1]).transpose(1, 2)
    rows, stats = (b, h, t), rest[-1]
    lse, top, entropy = (q.new_empty(rows if i == 0 or stats else (0,), dtype=torch.float32) for i in range(3))
    return out, lse, top, entropy


def _backward_shapes(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x if x.stride(-1) == 1 else x.contiguous()) for x in (q, k, v))
    return dq, dk, dv


OPERATORS = OperatorSource("attention", {"attention": _shapes})
BACKWARD = OperatorSource("attention_backward", {"attention_backward": _backward_shapes})
ready, backward_ready = OPERATORS.ready, BACKWARD.ready
