"""Attention with the statistics of its logits as one compiled operator, and its shapes for torch's compiler."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkeel.kernels.native.loader import usable

Found = tuple[Tensor, Tensor, Tensor, Tensor]


def ready() -> bool:
    """Whether the operator below can be used here and now."""
    return usable("attention", _register)


def backward_ready() -> bool:
    """Whether the operator's own derivative can be used; where it is loaded it is taken."""
    return usable("attention_backward", _register_backward)


# What torch.compiler.assume_constant_result sets; that function would import torch's compiler with qkeel.
ready._dynamo_marked_constant = True  # type: ignore[attr-defined]
backward_ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


class How(NamedTuple):
    """scale: of q·k. causal: no key after the query. window: query and key are less apart; 0 is none. cap: 0 is none.

    stats: also largest logits and entropies.
    """

    scale: float
    causal: bool
    window: int
    cap: float
    stats: bool


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slopes: Tensor | None, how: How) -> Found:
    """out [b h t e] in q's dtype; float32 lse, largest logit before the cap and entropy [b h t], the last two if asked.

    Args:
        q, k, v: as they enter the product, [b h t d], [b g s d], [b g s e]; queries stand at the end of the keys.
        mask: boolean (True: may attend) or float, four dimensions that broadcast to [b h t s]. slopes: float32 [h],
            times the distance off the logit.
    """
    return torch.ops.qkeel_native.attention(q, k, v, mask, slopes, *how)


def differentiable(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, biased: bool, how: How) -> bool:
    """Whether the output has a derivative: the compiled one, or that of torch's own kernel, from the logsumexp."""
    if backward_ready():
        return True
    plain = mask is None and not biased and how.window == 0 and how.cap == 0 and q.shape[-1] == v.shape[-1]
    return plain and (not how.causal or q.shape[2] == k.shape[2])


def _register() -> None:
    torch.library.register_fake("qkeel_native::attention", _shapes)


def _register_backward() -> None:
    torch.library.register_fake("qkeel_native::attention_backward", _backward_shapes)


def _shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Found:
    b, h, t, _ = q.shape
    out = q.new_empty(b, t, h, v.shape[-1]).transpose(1, 2)
    rows, stats = (b, h, t), rest[-1]
    lse, top, entropy = (q.new_empty(rows if i == 0 or stats else (0,), dtype=torch.float32) for i in range(3))
    return out, lse, top, entropy


def _backward_shapes(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x if x.stride(-1) == 1 else x.contiguous()) for x in (q, k, v))
    return dq, dk, dv
