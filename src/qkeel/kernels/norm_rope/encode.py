"""Encodes q and k for the dot product: norm and rotation with fused operators where possible, otherwise with torch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from qkeel.kernels.native.operators import OPS, reads
from qkeel.kernels.norm_rope.operator import (
    INTERLEAVED,
    L2,
    LAYER,
    NONE,
    RMS,
    WHOLE,
    norm_rope,
    norm_rope_two,
    operators_for,
)
from qkeel.spec.attention import AttentionSpec
from qkeel.spec.call import AttentionCall
from qkeel.spec.norm import Norm, NormKind
from qkeel.spec.rope import Position, Rope
from qkeel.spec.slot import Keys, Params, PosK, PosQ, Queries, Values

# The codes of the norms in the operators' sources. torch computes all other norms.
KINDS: dict[NormKind, int] = {"none": NONE, "rms": RMS, "l2": L2, "layer": LAYER}
# Least min |gain| / max |gain| of a pair for which x̂ is recomputed from the result, since the division magnifies
# rounding.
_SPREADS = {torch.float32: 0.05, torch.bfloat16: 0.25, torch.float16: 0.25}
# Numbers of all heads, rounded up to a power of two, that one program can hold.
_WIDEST_TOKEN = 8192

# Of q and of k may differ in length.
CosSin = tuple[Tensor, Tensor]
# Keys, or their rotated part.
KeyParts = Float[Tensor, "b g s r"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EncodePlan:
    """Arguments of the operators for a norm and a position, resolved once for equal specs."""

    norm: Norm
    position: Rope | None
    norm_code_q: int
    norm_code_k: int
    eps: float
    # True if only the GPU operators do this: interleaved pairs, or a norm over all
    # heads of a token.
    on_gpu: bool


def _planned(norm: Norm, position: Position) -> _EncodePlan | None:
    """Returns None if the operators do not support the norm or the position."""
    return (
        _plan(norm, position)
        if torch.compiler.is_compiling()
        else _plan_once(norm, position)
    )


def _plan(norm: Norm, position: Position) -> _EncodePlan | None:
    if (
        norm.kind not in KINDS
        or position.kind not in ("none", "rope")
        or not _takes(norm, position)
    ):
        return None
    rope = position.rope
    normed = KINDS[norm.kind] + (WHOLE if norm.over == "layer" else 0)
    pairing = INTERLEAVED if rope is not None and rope.pairing == "interleaved" else 0
    norm_code_q, norm_code_k = (
        (normed if side in norm.sides else NONE) + pairing for side in "qk"
    )
    on_gpu = norm.over == "layer" or pairing > 0
    return _EncodePlan(
        norm=norm,
        position=rope,
        norm_code_q=norm_code_q,
        norm_code_k=norm_code_k,
        eps=norm.eps,
        on_gpu=on_gpu,
    )


# A compiler traces `_plan` itself, because it does not look into caches.
_plan_once = functools.lru_cache(maxsize=256)(_plan)


def folded(call: AttentionCall) -> tuple[Queries, Keys, Values, float]:
    """Returns dense q, k and v in the caller's dtype, for a kernel of ordinary softmax attention, and the remaining
    scale."""
    dtype = call.q.dtype
    scale = call.spec.factor(call.pos_q, call.q.shape[-1], call.params, dtype)
    # Rounds q times scale once instead of twice.
    whole = isinstance(scale, Tensor) and dtype.itemsize < 4
    q, k = (
        call.encoded()
        if whole
        else encoded(call.spec, call.q, call.k, call.pos_q, call.pos_k, call.params)
    )
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    v = call.spec.values(call.v, call.params)
    return dense(q.to(dtype)), dense(k.to(dtype)), dense(v), scale


def dense(x: Tensor) -> Tensor:
    """Returns x with contiguous rows, as torch's fused operators assume.

    For other tensors they give wrong results, and SDPA, which checks this, builds the full T×T matrix instead.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def encoded(
    spec: AttentionSpec,
    q: Queries,
    k: KeyParts,
    pos_q: PosQ,
    pos_k: PosK,
    params: Params,
) -> tuple[Queries, KeyParts]:
    """Computes `spec.encode` in the caller's dtype, with the fused operators if they support it, otherwise with
    torch."""
    # E.g. from a cache of encoded keys, which need no copy.
    if spec.norm.kind == spec.position.kind == "none":
        return q, k
    fast = fused(spec, q, k, pos_q, pos_k, params)
    if fast is not None:
        return fast
    ours, theirs = spec.encode(q, k, pos_q, pos_k, params)
    return ours.to(q.dtype), theirs.to(k.dtype)


def fused(
    spec: AttentionSpec,
    q: Shaped[Tensor, "b h t d"],
    k: Shaped[Tensor, "b g s r"],
    pos_q: PosQ,
    pos_k: PosK,
    params: Params,
) -> tuple[Queries, KeyParts] | None:
    """Computes q and k of `spec.encode`, rounded to their own dtype; None if the operators do not support it.

    The operators support float32, bfloat16 and float16, and a head_dim that is a multiple of 8. The norm must be over
    each head and without a bias. RoPE must have half pairs, on a CPU a multiple of 8 of them, and may be absent; the
    norm must precede it or commute with it. On a CUDA device, interleaved pairs and a norm over all heads of a token
    are supported as well.
    """
    plan = _planned(spec.norm, spec.position)
    if plan is None:
        return None
    device = q.device
    if device.type not in ("cpu", "cuda") or not (reads(q) and reads(k)):
        return None
    for x in (k, *params.values()):
        if x.device != device:
            # torch raises its own error.
            return None
    operators = operators_for(device)
    if operators is None or (
        plan.on_gpu and (operators is OPS or not _fits(plan, q, k))
    ):
        return None
    # The C++ operators turn eight pairs at once.
    rope = plan.position if operators is OPS else None
    if rope is not None and rope.rotated(q.shape[-1]) % 16:
        return None
    gain_q, gain_k = plan.norm.weight("q", params), plan.norm.weight("k", params)
    table_q, table_k = _tables(plan, q, k, pos_q, pos_k)
    # Not where one of the two would only be copied.
    if table_q is table_k and (
        table_q is not None or (plan.norm_code_q % WHOLE and plan.norm_code_k % WHOLE)
    ):
        norm_codes, keeps = (
            (plan.norm_code_q, plan.norm_code_k),
            (_keeps(q, gain_q), _keeps(k, gain_k)),
        )
        return norm_rope_two(
            operators, q, k, (gain_q, gain_k), table_q, norm_codes, plan.eps, keeps
        )
    return (
        _one(operators, q, gain_q, table_q, plan.norm_code_q, plan.eps),
        _one(operators, k, gain_k, table_k, plan.norm_code_k, plan.eps),
    )


def _tables(
    plan: _EncodePlan, q: Tensor, k: Tensor, pos_q: Tensor, pos_k: Tensor
) -> tuple[CosSin | None, CosSin | None]:
    """Returns cos and sin for q and for k, as the same object if they are equal."""
    position = plan.position
    if position is None:
        return None, None
    # One token, as in decoding: its table costs more than its rotation.
    whole = (
        pos_q.numel() == 1
        and not pos_q.is_floating_point()
        and pos_q.device.type == "cpu"
    )
    if whole and pos_q is pos_k and not torch.compiler.is_compiling():
        table = _of_place(plan, q.shape[-1], q.dtype, int(pos_q))
        return table, table
    theirs, keys = position.tables(q, k, pos_q, pos_k)
    turned = _turned(position, keys)
    return (turned if theirs is keys else _turned(position, theirs)), turned


@functools.lru_cache(maxsize=16)  # consecutive layers of a model ask for the same table
def _of_place(
    plan: _EncodePlan, size: int, dtype: torch.dtype, position_index: int
) -> CosSin:
    assert plan.position is not None
    row, pos = (
        torch.empty(1, 1, 1, size, dtype=dtype, device="cpu"),
        torch.tensor([[position_index]], device="cpu"),
    )
    # A later pass with a gradient gets the same table.
    with torch.inference_mode(False):
        return _turned(plan.position, plan.position.tables(row, row, pos, pos)[1])


def _turned(position: Rope, table: CosSin) -> CosSin:
    # Reversed pairs turn the other way round.
    return (table[0], -table[1]) if position.pairing == "half_reversed" else table


def _takes(norm: Norm, position: Position) -> bool:
    rope = position.rope
    if norm.bias:
        return False
    if rope is None:
        return norm.kind != "none"
    # A norm may trade places with a rotation only if it commutes with it.
    before = rope.order == "norm_then_rotate" or norm.commutes_with_rotation
    return before


def _fits(plan: _EncodePlan, q: Tensor, k: Tensor) -> bool:
    """True if a GPU program can hold all heads of a token, as a norm over all of them requires."""
    widest = max(
        (1 << (x.shape[1] - 1).bit_length()) * max(16, x.shape[3])
        if norm_code & WHOLE
        else 0
        for x, norm_code in ((q, plan.norm_code_q), (k, plan.norm_code_k))
    )
    return widest <= _WIDEST_TOKEN


def _one(
    operators: Any,
    x: Tensor,
    gain: Tensor | None,
    table: CosSin | None,
    norm_code: int,
    eps: float,
) -> Tensor:
    if norm_code % WHOLE == NONE and table is None:
        return x
    return norm_rope(operators, x, gain, table, norm_code, eps, _keeps(x, gain))


def _keeps(x: Tensor, gain: Tensor | None) -> bool:
    """True if backward needs x itself because a gain is too small to divide by.

    Also True when compiling, where values are unknown, and on a GPU, where reading them would wait for the device.
    """
    if gain is None or not torch.is_grad_enabled():
        return False
    unseen = torch.compiler.is_compiling() or gain.device.type != "cpu"
    return unseen or OPS.gain_spread.default(gain) < _SPREADS[x.dtype]
