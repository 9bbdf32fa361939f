"""What the logits of every query row say, from one compiled pass, where it takes the call."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from qkeel.functional.rows import RowStats
from qkeel.kernels.native.encode import encoded
from qkeel.kernels.native.loader import usable
from qkeel.spec.call import AttentionCall
from qkeel.spec.cap import NoCap, Softcap
from qkeel.spec.norm import NoNorm
from qkeel.spec.position import NoPosition
from qkeel.spec.window import SlidingWindow

_DEEPEST = 1024  # DEEPEST in the source
_STORED = (torch.float32, torch.bfloat16, torch.float16)
_MASKS = (torch.bool, *_STORED)
_FIELDS = (
    "max_logit",
    "min_logit",
    "capped_max",
    "total",
    "above",
    "entropy",
    "first_weight",
    "product_norm",
    "cos_max",
    "cos_total",
)

Sight = tuple[Tensor | None, Tensor | None, Tensor | None]


def ready() -> bool:
    """Whether the operators below can be used here and now."""
    return usable("logit_pass", _register)


ready._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rows_of(call: AttentionCall, threshold: float) -> tuple[RowStats, Tensor, Tensor] | None:
    """The RowStats of a call, its query norms [b h t] and its key norms [b g s]; None where this is not for it.

    It is for softmax over keys with or without a cap, a position that folds into q and k, no token classes; float32,
    bfloat16 and float16 on a CPU; head_dim a multiple of 8; keys whose positions ascend, or of no matter.
    """
    given = _given(call)
    if given is None:
        return None
    cap = call.spec.cap
    cap = cap.cap if isinstance(cap, Softcap) and math.isfinite(cap.cap) else 0.0
    rows, n_keys, key_norms = torch.ops.qkeel_native.logit_rows(*given, cap, threshold)
    *fields, query_norms = rows.unbind()
    # What is said of q·k is said of every pair that is seen.
    return RowStats(**dict(zip(_FIELDS, fields)), n_keys=n_keys, n_products=n_keys), query_norms, key_norms


def extremes_of(call: AttentionCall) -> tuple[Tensor, Tensor] | None:
    """The largest and the smallest logit [h] over rows that count; None where this is not for it, as in `rows_of`."""
    given = _given(call)
    if given is None:
        return None
    top, low = torch.ops.qkeel_native.logit_extremes(*given)
    if call.query_mask is not None:
        out = ~call.query_mask[:, None]
        top, low = top.masked_fill(out, -torch.inf), low.masked_fill(out, torch.inf)
    return top.amax((0, 2)), low.amin((0, 2))


def guided_maxima(q: Tensor, k: Tensor, lse: Tensor, scale: float, causal: bool, rows: int) -> tuple[Tensor, Tensor]:
    """Per sequence and head [b h]: the largest logit of the `rows` rows of largest lse, and the next largest lse.

    Args:
        q [b h t d], k [b g s d]: as they enter the product, under `ready` and `holds`. lse: float32 [b h t]; rows
            where it is -inf count nowhere. causal: row i sees the keys up to i.
    """
    return torch.ops.qkeel_native.guided_maxima(q, k, lse, scale, causal, rows)


def bracket_of(lse: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor] | None:
    """max (lse - ln n) and max lse per head [h] over the rows that count, n the keys that a row sees; None: not for it.

    Args:
        lse: [b h t]; taken if it is float32 on a CPU. call: square and at default positions where it is causal.
    """
    if not (lse.dtype == torch.float32 and _plain(lse) and ready()):
        return None
    return torch.ops.qkeel_native.logsumexp_bracket(lse, call.query_mask, call.causal, call.k.shape[2])


def holds(*tensors: Tensor) -> bool:
    """Whether these are plain tensors that the operators read: heads of a multiple of 8 numbers, on a CPU."""
    return all(
        _plain(x) and x.dtype in _STORED and x.shape[-1] % 8 == 0 and 0 < x.shape[-1] <= _DEEPEST and x.numel() > 0
        for x in tensors
    )


def _given(call: AttentionCall) -> tuple[Any, ...] | None:
    """q, k, scale, low, high and mask as the operators take them."""
    if type(call) is not AttentionCall:
        return None  # who sees whom, and what is added, are functions of a subclass
    spec = call.spec
    # The maxima alone need less, but are the bits of those among the full statistics, whoever computes them.
    if type(spec.cap) not in (NoCap, Softcap) or not spec.normalizer.softmax_over_keys or call.classes is not None:
        return None
    if not (call.spec.position.folds and holds(call.q, call.k) and _reads(call.mask) and ready()):
        return None
    sight = _sight(call)
    if sight is None:
        return None
    q, k = _encoded(call)
    scale = call.spec.factor(call.pos_q, q.shape[-1], call.params, torch.float32)
    if not isinstance(scale, Tensor):
        scale = q.new_full((), scale, dtype=torch.float32)
    elif not _plain(scale):
        return None
    scale = scale.detach().expand(*q.shape[:3], 1)[..., 0]
    return q.detach(), k.detach(), scale, *sight


def _plain(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.is_cpu


def _reads(mask: Tensor | None) -> bool:
    return mask is None or (_plain(mask) and mask.dtype in _MASKS)


def _encoded(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """q and k as they enter the product: as they are stored where nothing happens to them, else in float32."""
    spec = call.spec
    position = spec.position.inner if isinstance(spec.position, SlidingWindow) else spec.position
    if type(spec.norm) is NoNorm and type(position) is NoPosition:
        return call.q, call.k
    if call.q.dtype == torch.float32:  # else the compiled pass would round
        fast = encoded(spec, call.q, call.k, call.pos_q, call.pos_k, call.params)
        if fast is not None:
            return fast
    return call.encoded()


def _sight(call: AttentionCall) -> Sight | None:
    """The first and the last key but one [b|1 t] that rows see, None for all, and the mask; None for no such span."""
    window = call.window
    mask = None if call.mask is None else call.mask.detach()
    if not call.causal and window is None:
        return None, None, mask
    q, k = call.pos_q, call.pos_k
    s = k.shape[1]
    if not call.plain:
        ordered = (k[:, 1:] >= k[:, :-1]).all() & (q == q).all()  # NaN stands nowhere, and no search finds that
        if q.dtype != k.dtype or not bool(ordered):
            return None
        b = max(len(q), len(k))
        q, k = q.expand(b, -1).contiguous(), k.expand(b, -1).contiguous()

    def upto(last: Tensor) -> Tensor:
        """How many keys stand at `last` or before."""
        return (last + 1).clamp(0, s) if call.plain else torch.searchsorted(k, last, right=True)

    low = torch.zeros_like(q, dtype=torch.int64) if window is None else upto(q - window)
    if call.causal:
        return low, upto(q), mask
    assert window is not None
    if call.plain:
        return low, (q + window).clamp(0, s), mask
    return low, torch.searchsorted(k, q + window), mask


def _register() -> None:
    own = "qkeel_native::"
    torch.library.register_fake(own + "logit_rows", _row_shapes)
    torch.library.register_fake(own + "logit_extremes", _extreme_shapes)
    torch.library.register_fake(own + "guided_maxima", _guided_shapes)
    torch.library.register_fake(own + "logsumexp_bracket", _bracket_shapes)


def _row_shapes(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = q.new_empty(len(_FIELDS) + 1, *q.shape[:3], dtype=torch.float32)
    return rows, q.new_empty(q.shape[:3], dtype=torch.int64), k.new_empty(k.shape[:3], dtype=torch.float32)


def _extreme_shapes(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(2, *q.shape[:3], dtype=torch.float32)


def _guided_shapes(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape[:2], dtype=torch.float32), q.new_empty(q.shape[:2], dtype=torch.float32)


def _bracket_shapes(lse: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return lse.new_empty(lse.shape[1]), lse.new_empty(lse.shape[1])
