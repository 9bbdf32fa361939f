"""Statistics of logits on a GPU by the Triton kernels, for the calls that these support.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d dimensions per head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qkeel.functional.norms import wide
from qkeel.kernels.contract import may_run_unseen
from qkeel.kernels.native import triton as available
from qkeel.spec.call import AttentionCall, BandCall


class _LogitOperands(NamedTuple):
    """q, k and scale, whose product is the logits before the cap, and the keyword arguments that say which keys are
    visible.

    The scale is a tensor that broadcasts to [b h t 1] if it differs by row or head."""

    q: Tensor
    k: Tensor
    scale: Any
    visibility: dict[str, Any]


def row_fields(
    call: AttentionCall, threshold: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the ROW_FIELDS [n b h t] of every query row, the number of keys each row sees, and the key norms,
    computed in one GPU pass.

    Rows excluded by the call's `query_mask` are computed as well. Returns None if the GPU kernel does not support the
    call; it supports neither sinks nor token classes.
    """
    if call.classes is not None or call.spec.normalizer.kind != "softmax":
        return None
    operands = _operands(call, of_rows=True)
    if operands is None:
        return None
    # Only where Triton was found, which `_operands` has asked.
    from qkeel.kernels.logits import triton_row_fields

    q, k, scale, visibility = operands
    if q[..., 0].numel() > triton_row_fields.MOST_ROWS:
        return None
    return triton_row_fields.row_fields(
        q, k, scale, threshold, cap=call.spec.cap.limit, **visibility
    )


def extremes(call: AttentionCall) -> tuple[Tensor, Tensor] | None:
    """Returns the largest and smallest logit [h], computed in a GPU pass with two comparisons per logit.

    Returns None if the GPU kernel does not support the call; it counts every query row.
    """
    if call.query_mask is not None:
        return None
    operands = _operands(call, of_rows=False)
    if operands is None:
        return None
    # As above.
    from qkeel.kernels.logits import triton_extremes

    q, k, scale, visibility = operands
    # The kernel takes a number.
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    largest, smallest = triton_extremes.extremes(q, k, scale, **visibility)
    return largest.amax((0, 2)), smallest.amin((0, 2))


def _operands(call: AttentionCall, of_rows: bool) -> _LogitOperands | None:
    """Returns the operands for Triton's statistics kernels; None if they do not support the call.

    The kernels do not support other devices, biases, explicit positions, subclasses other than BandCall, or masks of
    pairs, unless `of_rows` asks for the pass of all statistics. q and k are encoded in float32. If the spec does not
    encode them, they keep their precision, which gives the same products.
    """
    band = call if isinstance(call, BandCall) else None
    if type(call) is not AttentionCall and (band is None or band.slopes is not None):
        # a subclass may override visibility and bias.
        return None
    spec, mask = call.spec, call.mask if band is None else band.padding
    boolean = mask is not None and mask.dtype == torch.bool
    is_padding = mask is not None and boolean and mask.shape[1] == mask.shape[2] == 1
    # Padding hides the same keys from all rows, for which a byte per key is enough.
    of_pairs = of_rows and boolean and not is_padding and band is None
    if not (mask is None or is_padding or of_pairs):
        return None
    if not (
        (call.plain or band is not None)
        and spec.position.folds
        and spec.cap.kind != "other"
    ):
        return None
    if not available.takes(call.q, call.k):
        return None
    unseen = {
        "spans": band is not None,
        "pairs": of_pairs,
        "window": of_rows and band is None and call.window is not None,
    }
    if not all(may_run_unseen(case) for case, needed in unseen.items() if needed):
        return None
    scale = spec.factor(call.pos_q, call.q.shape[-1], call.params, wide(call.q.dtype))
    bare = spec.norm.kind == spec.position.kind == "none" and not isinstance(
        scale, Tensor
    )
    q, k = (call.q, call.k) if bare else call.encoded()
    visibility: dict[str, Any] = {"keys": None}
    if mask is not None and is_padding:
        visibility["keys"] = mask[:, 0, 0].expand(-1, k.shape[2])
    elif of_pairs:
        visibility["pairs"] = mask
    if band is None:
        visibility |= {"causal": call.causal, "window": call.window}
    else:
        visibility |= {"causal": False, "window": (band.low, band.high)}
    return _LogitOperands(q, k, scale, visibility)
