"""Any spec with O(T) memory: full rows of logits for one block of queries at a time, recomputed in backward.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head, w window.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qkeel.kernels.contract import Kernel, Refusal, average, row_blocks, without_pairs
from qkeel.patching.torch_state import transformed
from qkeel.spec.call import AttentionCall
from qkeel.spec.slot import Outputs

# Logits held at once: 8 MB in float32, the whole matrix for small models.
BLOCK = 1 << 21


@final
class Chunked(Kernel):
    """Exact for every spec, mask and shape. Each block contains complete rows, so no running maximum is needed."""

    def supports(self, call: AttentionCall) -> Refusal | None:
        return None

    def __call__(self, call: AttentionCall) -> Outputs:
        q, k = call.encoded()
        # q is encoded in float32 even for half-precision calls, and the product of weights and values needs one
        # dtype.
        v = call.spec.values(call.v, call.params).to(q.dtype)
        if not (q.shape[2] and k.shape[2]):
            return without_pairs(q, k, v).to(call.q.dtype)
        blocks = list(row_blocks(call, BLOCK))
        # Transforms do not support checkpoints.
        if len(blocks) == 1 or not torch.is_grad_enabled() or transformed():
            parts = [_block(call, q, k, v, rows) for rows in blocks]
        else:
            parts = [
                checkpoint(
                    _block,
                    call,
                    q,
                    k,
                    v,
                    rows,
                    use_reentrant=False,
                    # Nothing but dropout draws random numbers, so otherwise no state of a generator has to be saved
                    # and restored.
                    preserve_rng_state=call.dropout > 0,
                )
                for rows in blocks
            ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)  # type: ignore[arg-type]
        return out.to(call.q.dtype)


def _block(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, rows: slice) -> Tensor:
    keys = call.span(rows)
    # A row that sees no key has an output of 0, for which a softmax over nothing would give NaN.
    if keys.start == keys.stop:
        return q.new_zeros(*q.shape[:2], rows.stop - rows.start, v.shape[-1])
    logits = call.scores(q[:, :, rows], k[:, :, keys], rows, keys)
    weights = call.spec.normalizer.weights(
        call.spec.cap.apply(logits), call.visible(rows, keys), call.params
    )
    if call.dropout:
        weights = torch.nn.functional.dropout(weights, call.dropout)
    return average(weights, v[:, :, keys])
