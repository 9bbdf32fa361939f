"""FlexAttention on a GPU: windows and soft caps in one fused kernel, which also returns the largest logits.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head, w window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from qkeel.kernels.contract import Kernel, Refusal
from qkeel.kernels.norm_rope.encode import folded
from qkeel.patching.torch_state import transformed, with_tangents
from qkeel.spec.call import AttentionCall
from qkeel.spec.logits import Cap
from qkeel.spec.slot import Outputs, PerRow

_DEVICE = "cuda"


@final
class Flex(Kernel):
    """Softmax attention on a GPU, with or without a soft cap, causality and a window.

    The first call of each kind takes some seconds to compile. Calls with equal lengths, window and causality share
    their block mask. "auto" never chooses this kernel, since it has not been timed on a GPU.
    """

    def supports(self, call: AttentionCall) -> Refusal | None:
        spec, way_out = call.spec, "use impl='auto'"
        is_supported = (
            call.q.device.type == _DEVICE
            and spec.normalizer.kind == "softmax"
            and spec.cap.kind != "other"
            and spec.position.folds
            and type(call) is AttentionCall
            and call.mask is None
            and not call.dropout
            and call.plain
            and call.q.shape[2]
            and call.k.shape[2]
        )
        if not is_supported:
            return Refusal(
                "FlexAttention is used on a GPU only, for softmax with positions folded into q and k, without a mask, "
                "packed sequences, dropout or explicit positions",
                way_out,
            )
        if torch.compiler.is_compiling() or transformed() or with_tangents():
            return Refusal(
                "qkeel compiles FlexAttention itself, which does not work in another graph or in torch.func transforms",
                way_out,
            )
        return None

    def __call__(self, call: AttentionCall) -> Outputs:
        return _attend(call, None)[0]

    def with_maxima(self, call: AttentionCall) -> tuple[Outputs, PerRow, PerRow]:
        """Returns the output, and each row's detached logsumexp and largest logit [b h t], both of capped logits.

        Both are -inf for rows that see no key.
        """
        out, auxiliary = _attend(call, AuxRequest(lse=True, max_scores=True))
        assert auxiliary.lse is not None
        assert auxiliary.max_scores is not None
        lse, top = auxiliary.lse.detach(), auxiliary.max_scores.detach()
        # a GPU's maximum drops NaN.
        return out, lse, torch.where(lse.isnan(), lse, top)


def _attend(
    call: AttentionCall, aux_request: AuxRequest | None
) -> tuple[Tensor, AuxOutput]:
    q, k, v, scale = folded(call)
    auxiliary = _compiled()(
        q,
        k,
        v,
        score_mod=None if call.spec.cap.limit is None else _capped(call.spec.cap),
        block_mask=visible(call),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        # An empty request computes nothing more, but keeps the pair of results that None would reduce to the output.
        return_aux=AuxRequest() if aux_request is None else aux_request,
    )
    return auxiliary


@functools.lru_cache(maxsize=8)
def _capped(cap: Cap) -> Callable[..., Tensor]:
    """Returns the same function for equal caps, since a new one would be compiled again."""
    return lambda logit, b, h, row, key: cap.apply(logit)


def visible(call: AttentionCall) -> BlockMask | None:
    """Returns FlexAttention's block mask for causality and window; None if every row sees all keys."""
    if call.window is None and not call.causal:
        return None
    return _block_mask(
        call.q.shape[2], call.k.shape[2], call.window, call.causal, call.q.device
    )


@functools.lru_cache(maxsize=8)
def _block_mask(
    t: int, s: int, window: int | None, causal: bool, device: torch.device
) -> BlockMask:
    # a constant in the compiled mask: 0 for square calls of any length.
    back = s - t

    # Plain lambdas, since FlexAttention counts a mask's parameters and a type-checking wrapper would hide them.
    # The mask is cached, and a later pass may need gradients.
    with torch.inference_mode(False):
        if window is None:
            return create_block_mask(
                lambda b, h, row, key: row + back >= key,
                None,
                None,
                t,
                s,
                device=device,
            )
        return create_block_mask(
            lambda b, h, row, key: (
                (row + back - key < window)
                & (row + back - key >= 0 if causal else row + back - key > -window)
            ),
            None,
            None,
            t,
            s,
            device=device,
        )


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, AuxOutput]]:
    # Otherwise many kinds of calls fall back to the T×T matrix.
    return torch.compile(flex_attention, fullgraph=True)
