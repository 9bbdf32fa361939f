"""Statistics of logits on a GPU by the Triton kernels, for the calls that these support.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qkeel.functional.norms import wide
from qkeel.functional.statistics import row_means
from qkeel.kernels import triton_access as available
from qkeel.kernels.logits.compiled import visibility
from qkeel.spec.call import AttentionCall


class _LogitOperands(NamedTuple):
    """q, k and scale, whose product is the logits before the cap, and the keys [b s] that may be visible; None for all.

    The scale is a tensor that broadcasts to [b h t 1] if it differs by row or head."""

    q: Tensor
    k: Tensor
    scale: float | Tensor
    keys: Tensor | None


def row_fields(
    call: AttentionCall, threshold: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the ROW_FIELDS [n b h t] of every query row, the number of keys each row sees, and the key norms,
    computed in one GPU pass.

    Rows excluded by the call's `query_mask` are computed as well. Returns None if the GPU kernel does not support the
    call; it supports neither sinks, token classes nor windows.
    """
    if (
        call.classes is not None
        or call.window is not None
        or call.spec.normalizer.kind != "softmax"
    ):
        return None
    operands = _operands(call)
    if operands is None:
        return None
    # Only where Triton was found, which `_operands` has asked.
    from qkeel.kernels.logits import triton_row_fields

    q, k, scale, keys = operands
    if q[..., 0].numel() > triton_row_fields.MOST_ROWS:
        return None
    return triton_row_fields.row_fields(
        q, k, scale, threshold, causal=call.causal, cap=call.spec.cap.limit, keys=keys
    )


def extremes(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the largest and smallest logit and the spread [b h t] of every query row, computed in a GPU pass with two
    comparisons per logit.

    Rows excluded by the call's `query_mask` are computed as well. Returns None if the GPU kernel does not support the
    call; it knows no cap.
    """
    operands = None if call.spec.cap.kind != "none" else _operands(call)
    visible = None if operands is None else visibility(call)
    if operands is None or visible is None:
        return None
    # As above.
    from qkeel.kernels.logits import triton_extremes

    q, k, scale, keys = operands
    # The kernel takes a number.
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    largest, smallest = triton_extremes.extremes(
        q, k, scale, causal=call.causal, window=call.window, keys=keys
    )
    low, high, _ = visible
    ends = None if low is None or high is None else (low, high)
    means = row_means(q.float(), k.float(), ends, keys) * scale
    return largest, smallest, largest - means


def _operands(call: AttentionCall) -> _LogitOperands | None:
    """Returns the operands for Triton's statistics kernels; None if they do not support the call.

    The kernels do not support other devices, biases, explicit positions, subclasses, or masks that differ by query. q
    and k are encoded in float32. If the spec does not encode them, they keep their precision, which gives the same
    products.
    """
    spec, mask = call.spec, call.mask
    # Padding hides the same keys from all rows, for which a byte per key is enough.
    is_padding = (
        mask is not None
        and mask.dtype == torch.bool
        and mask.shape[1] == mask.shape[2] == 1
    )
    if not (
        # A subclass may override visibility and bias.
        type(call) is AttentionCall
        and (mask is None or is_padding)
        and call.plain
        and spec.position.folds
        and spec.cap.kind != "other"
        and available.takes(call.q, call.k)
    ):
        return None
    scale = spec.factor(call.pos_q, call.q.shape[-1], call.params, wide(call.q.dtype))
    bare = spec.norm.kind == spec.position.kind == "none" and not isinstance(
        scale, Tensor
    )
    q, k = (call.q, call.k) if bare else call.encoded()
    keys = None if mask is None else mask[:, 0, 0].expand(-1, k.shape[2])
    return _LogitOperands(q, k, scale, keys)
