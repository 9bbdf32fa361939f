"""FlexAttention on a GPU: windows and soft caps in one fused kernel, which hands out the largest logits too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask, flex_attention

from qkeel.kernels.contract import Kernel, Refusal
from qkeel.kernels.encode import folded
from qkeel.patching.compiler_state import transformed, with_tangents
from qkeel.spec.call import AttentionCall
from qkeel.spec.cap import Cap
from qkeel.spec.shapes import Outputs, PerRow

_DEVICE = "cuda"


@final
class Flex(Kernel):
    """Softmax attention with or without a soft cap, causal, within a window, both or neither; on a GPU.

    The first call of each kind is compiled, which takes seconds. The mask of blocks is made once for calls of the same
    lengths, window and causality. "auto" does not take it: no GPU has timed it yet.
    """

    def supports(self, call: AttentionCall) -> Refusal | None:
        spec, out = call.spec, "use impl='auto'"
        if call.q.device.type != _DEVICE:
            return Refusal("FlexAttention is used on a GPU only: elsewhere it makes the T×T matrix", out)
        if spec.normalizer.kind != "softmax" or spec.cap.kind == "other" or not spec.position.folds:
            return Refusal("FlexAttention is used for softmax, with positions folded into q and k", out)
        if type(call) is not AttentionCall or call.mask is not None or call.dropout or not call.plain:
            return Refusal("FlexAttention is used without a mask, packed sequences, dropout or positions given", out)
        if not (call.q.shape[2] and call.k.shape[2]):
            return Refusal("FlexAttention takes at least one query and one key", out)
        if torch.compiler.is_compiling() or transformed() or with_tangents():
            return Refusal("FlexAttention is compiled here, not in the caller's graph or torch.func transforms", out)
        return None

    def __call__(self, call: AttentionCall) -> Outputs:
        return _attend(call, None)[0]

    def with_maxima(self, call: AttentionCall) -> tuple[Outputs, PerRow, PerRow]:
        """Returns out [b h t d'], and of each row logsumexp and largest logit [b h t], both of capped logits and
        detached; -inf for rows that see no key."""
        out, found = _attend(call, AuxRequest(lse=True, max_scores=True))
        assert found.lse is not None
        assert found.max_scores is not None
        lse, top = found.lse.detach(), found.max_scores.detach()
        return out, lse, torch.where(lse.isnan(), lse, top)  # a GPU's maximum of a NaN and a number is the number


def _attend(call: AttentionCall, wanted: AuxRequest | None) -> tuple[Tensor, AuxOutput]:
    q, k, v, scale = folded(call)
    found = _compiled()(
        q,
        k,
        v,
        score_mod=None if call.spec.cap.limit is None else _capped(call.spec.cap),
        block_mask=visible(call),
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest() if wanted is None else wanted,
    )
    return found


@functools.lru_cache(maxsize=8)
def _capped(cap: Cap) -> Callable[..., Tensor]:
    """Returns one function for equal caps: another one would be compiled again."""
    return lambda logit, b, h, row, key: cap.apply(logit)


def visible(call: AttentionCall) -> BlockMask | None:
    """Returns FlexAttention's mask of blocks of a call: causal, a window, both; None where every row sees all keys."""
    if call.window is None and not call.causal:
        return None
    return _mask(call.q.shape[2], call.k.shape[2], call.window, call.causal, call.q.device)


@functools.lru_cache(maxsize=8)
def _mask(t: int, s: int, window: int | None, causal: bool, device: torch.device) -> BlockMask:
    back = s - t  # what is read below is compiled in: no length, where there are as many queries as keys

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        away = row + back - key
        if window is None:
            return away >= 0
        return (away < window) & (away >= 0 if causal else away > -window)

    with torch.inference_mode(False):  # it is kept, and a later pass may have a gradient
        return create_block_mask(sees, None, None, t, s, device=device)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, AuxOutput]]:
    return torch.compile(flex_attention, fullgraph=True)  # else too many kinds of calls end in the T×T matrix
