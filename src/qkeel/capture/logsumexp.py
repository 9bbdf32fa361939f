"""A call of F.scaled_dot_product_attention whose kernel hands out the logsumexp of its rows.

Torch's fused operators compute the logsumexp for their backward pass, and the public function drops it. A row's largest
logit is never above its logsumexp, so whoever asks only whether a logit passed a threshold gets the answer for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from qkeel.capture.readers import sdpa_arguments
from qkeel.patching.modes import number_of_modes
from qkeel.patching.torch_state import flash_on_cpu, transformed_now

_FLASH: int = SDPBackend.FLASH_ATTENTION.value
_PLAIN = (Tensor, nn.Parameter)


def attention_with_logsumexp(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """The output [b h t e] of a call and the logsumexp [b h t] of its scaled and masked logits, in nats.

    It runs the operator that torch would choose, so the output and its gradients are the same bits. None, with nothing
    computed, if torch would choose an operator without a logsumexp (dropout, a mask that wants a gradient, values
    narrower than keys), if a mask adds numbers, so that the logsumexp bounds another logit, on devices other than a
    CPU, and where a mode, a transform, autocast or a subclass of Tensor may change what the public function does.

    >>> x = torch.randn(1, 2, 5, 8)
    >>> out, lse = attention_with_logsumexp((x, x, x), {"is_causal": True})
    >>> torch.equal(out, nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)), lse.shape
    (True, torch.Size([1, 2, 5]))
    """
    arguments = sdpa_arguments(args, kwargs)
    q, k, v = arguments["query"], arguments["key"], arguments["value"]
    mask, scale = arguments["attn_mask"], arguments["scale"]
    dropout, is_causal = arguments["dropout_p"], arguments["is_causal"]
    # Each call asks, so there is no loop.
    if not (q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    if type(q) not in _PLAIN or type(k) not in _PLAIN or type(v) not in _PLAIN:
        return None
    if mask is not None and (type(mask) is not Tensor or mask.dtype is not torch.bool):
        return None
    # The operator is below these in the dispatcher's order, so they would miss the call or not convert its inputs.
    if number_of_modes() or transformed_now() or torch.is_autocast_enabled("cpu"):
        return None
    try:
        choice = torch._fused_sdp_choice(
            q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=arguments["enable_gqa"]
        )  # fmt: skip
    except RuntimeError:  # the public function raises it where the program expects it
        return None
    if choice != _FLASH:
        return None
    # As the public function converts it.
    if mask is not None:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    return flash_on_cpu(q, k, v, dropout, is_causal, attn_mask=mask, scale=scale)
