"""Statistics of every query row's logits, computed in one compiled pass over q and k on a CPU."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkeel.functional.statistics import ROW_FIELDS
from qkeel.kernels.native.operators import OPS, STORED, WIDEST, is_plain, reads, ready
from qkeel.kernels.norm_rope.encode import encoded
from qkeel.spec.call import AttentionCall, BandCall

_MASKS = (torch.bool, *STORED)
_PLAIN = (Tensor, nn.Parameter)
# The operator's order; the norms of the queries follow.
FIELDS = ROW_FIELDS[:-1]

VisibilityTensors = tuple[Tensor | None, Tensor | None, Tensor | None]
OperatorArguments = tuple[
    Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None
]


def rows_of(
    call: AttentionCall, threshold: float
) -> (
    tuple[Float[Tensor, "fields b h t"], Int[Tensor, "b h t"], Float[Tensor, "b g s"]]
    | None
):
    """Returns the FIELDS and query norms of all rows, the number of keys each row sees, and the key norms; None if
    unsupported.

    The pass supports softmax over keys with or without a cap, and positions that fold into q and k, but no token
    classes. It requires float32, bfloat16 or float16 on a CPU, a head_dim that is a multiple of 8, and keys whose
    positions are ascending or do not matter.
    """
    arguments = _arguments(call)
    if arguments is None:
        return None
    return OPS.logit_rows.default(*arguments, call.spec.cap.limit or 0.0, threshold)


def extremes_of(call: AttentionCall) -> Float[Tensor, "3 b h t"] | None:
    """Returns the largest and smallest logit and the spread of each row; None for the calls that `rows_of` does not
    support."""
    arguments = _arguments(call)
    if arguments is None:
        return None
    return OPS.logit_extremes.default(*arguments, call.spec.cap.limit or 0.0)


def plain_rows(
    q: Tensor, k: Tensor, scale: float, causal: bool, threshold: float
) -> tuple[Float[Tensor, "fields b h t"], Int[Tensor, "b h t"], Float[Tensor, "b g s"]]:
    """Like `rows_of`, for a call that `reads_plain` accepts, which has no mask, position or cap."""
    arguments = _plain_arguments(q.shape[0], q.shape[1], q.shape[2], scale, causal)
    return OPS.logit_rows.default(q.detach(), k.detach(), *arguments, 0.0, threshold)


def plain_extremes(
    q: Tensor, k: Tensor, scale: float, causal: bool
) -> Float[Tensor, "3 b h t"]:
    """Like `extremes_of`, but for a call that `reads_plain` accepts."""
    arguments = _plain_arguments(q.shape[0], q.shape[1], q.shape[2], scale, causal)
    return OPS.logit_extremes.default(q.detach(), k.detach(), *arguments, 0.0)


def reads_plain(q: Tensor, k: Tensor, causal: bool) -> bool:
    """True if the operators support q [b h t d] and k [b g s d] of a call without a mask; does not check `ready`.

    It inlines `reads`, since it runs at every call of every layer."""
    a, b = q.shape, k.shape
    if (
        len(a) != 4
        or len(b) != 4
        or a[0] != b[0]
        or a[3] != b[3]
        or (causal and a[2] != b[2])
        or a[1] % b[1]
    ):
        return False
    if not (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and q.dtype in STORED
        and q.dtype == k.dtype
    ):
        return False
    return (
        q.is_cpu
        and k.is_cpu
        and not q.is_nested
        and a[3] % 8 == 0
        and 0 < a[3] <= WIDEST
        and 0 not in (*a, *b)
    )


@functools.lru_cache(maxsize=64)
def _plain_arguments(
    b: int, h: int, t: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
    # A view of one number: the operator follows strides, and nothing of the size of q has to be written.
    scales = torch.full((), scale, dtype=torch.float32, device="cpu").expand(b, h, t)
    if not causal:
        return scales, None, None, None
    # Whole, or the operator would copy them in each call.
    ends = torch.arange(1, t + 1, device="cpu").repeat(b, 1)
    return scales, torch.zeros_like(ends), ends, None


def holds(*tensors: Tensor) -> bool:
    """True if the operators support the tensors, that is, plain tensors on a CPU with a head_dim that is a multiple of
    8."""
    return all(x.is_cpu and reads(x) for x in tensors)


def _arguments(call: AttentionCall) -> OperatorArguments | None:
    """Returns the operators' arguments q, k, scale, low, high and mask; None if unsupported."""
    banded = isinstance(call, BandCall) and call.slopes is None
    if type(call) is not AttentionCall and not banded:
        # a subclass may override visibility and bias.
        return None
    spec = call.spec
    # The maxima alone would support more, but must equal those of the full statistics bit for bit.
    if (
        spec.cap.kind == "other"
        or spec.normalizer.kind != "softmax"
        or call.classes is not None
    ):
        return None
    if not (call.spec.position.folds and holds(call.q, call.k) and ready()):
        return None
    mask = call.padding if isinstance(call, BandCall) else call.mask
    if mask is not None and not (
        is_plain(mask) and mask.is_cpu and mask.dtype in _MASKS
    ):
        return None
    visible = visibility(call)
    if visible is None:
        return None
    q, k = operands(call)
    scale = call.spec.factor(call.pos_q, q.shape[-1], call.params, torch.float32)
    if not isinstance(scale, Tensor):
        scale = q.new_full((), scale, dtype=torch.float32)
    elif not (is_plain(scale) and scale.is_cpu):
        return None
    # Statistics have no gradient, also where the scale is learned.
    scale = scale.detach().expand(*q.shape[:3], 1)[..., 0]
    return q.detach(), k.detach(), scale, *visible


def operands(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns q and k as they enter the product: unchanged if the spec does not encode them, otherwise in float32."""
    spec = call.spec
    if spec.norm.kind == "none" and spec.position.unwindowed.kind == "none":
        return call.q, call.k
    # Otherwise the compiled encoding would round.
    if call.q.dtype == torch.float32:
        return encoded(spec, call.q, call.k, call.pos_q, call.pos_k, call.params)
    return call.encoded()


def visibility(call: AttentionCall) -> VisibilityTensors | None:
    """Returns the first key visible to each row and the key after the last [b|1 t] (None if all are visible), and the
    mask.

    Returns None if the visible keys are not a contiguous range.
    """
    if isinstance(call, BandCall):
        return (
            call.low,
            call.high,
            None if call.padding is None else call.padding.detach(),
        )
    window = call.window
    mask = None if call.mask is None else call.mask.detach()
    if not call.causal and window is None:
        return None, None, mask
    q, k = call.pos_q, call.pos_k
    s = k.shape[1]
    if not call.plain:
        # Searchsorted would not notice NaN.
        ordered = (k[:, 1:] >= k[:, :-1]).all() & (q == q).all()
        if q.dtype != k.dtype or not bool(ordered):
            return None
        # For tensors that are not contiguous, as expanded ones, searchsorted makes copies and warns.
        b = max(len(q), len(k))
        q, k = q.expand(b, -1).contiguous(), k.expand(b, -1).contiguous()
    if window is None:
        low = torch.zeros_like(q, dtype=torch.int64)
    else:
        low = _keys_up_to(q - window, k, call.plain)
    if call.causal:
        return low, _keys_up_to(q, k, call.plain), mask
    assert window is not None
    if call.plain:
        return low, (q + window).clamp(0, s), mask
    return low, torch.searchsorted(k, q + window), mask


def _keys_up_to(last: Tensor, k: Tensor, plain: bool) -> Tensor:
    """Returns how many keys have a position of at most `last`."""
    if plain:
        return (last + 1).clamp(0, k.shape[1])
    return torch.searchsorted(k, last, right=True)
