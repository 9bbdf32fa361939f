"""Attention with the statistics of its logits as one compiled operator, and its shapes for torch's compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from qkeel.kernels.native.loader import usable

Found = tuple[Tensor, Tensor, Tensor, Tensor]


def ready() -> bool:
    """Whether the operator below can be used here and now."""
    return usable("attention", _register)


# What torch.compiler.assume_constant_result sets; that function would import torch's compiler with qkeel.
ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    cap: float,
    stats: bool,
) -> Found:
    """out [b h t e] in q's dtype; float32 lse, largest logit before the cap and entropy [b h t], the last two if asked.

    Args:
        q, k, v: as they enter the product, [b h t d], [b g s d], [b g s e]; queries stand at the end of the keys.
        mask: boolean (True: may attend) or float, four dimensions that broadcast to [b h t s]. slopes: float32 [h],
            times the distance off the logit. window: query and key must be less apart; 0 is none. cap: 0 is none.
    """
    return torch.ops.qkeel_native.attention(q, k, v, mask, slopes, scale, causal, window, cap, stats)


def differentiable(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, biased: bool, causal: bool, window: int, cap: float
) -> bool:
    """Whether the output has a derivative: that of torch's own kernel, from the logsumexp."""
    plain = mask is None and not biased and window == 0 and cap == 0 and q.shape[-1] == v.shape[-1]
    return plain and (not causal or q.shape[2] == k.shape[2])


def _register() -> None:
    torch.library.register_fake("qkeel_native::attention", _shapes)


def _shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    cap: float,
    stats: bool,
) -> Found:
    b, h, t, _ = q.shape
    out = q.new_empty(b, t, h, v.shape[-1]).transpose(1, 2)
    rows = [q.new_empty(b, h, t, dtype=torch.float32)]
    rows += [q.new_empty((b, h, t) if stats else (0,), dtype=torch.float32) for _ in range(2)]
    return out, rows[0], rows[1], rows[2]
