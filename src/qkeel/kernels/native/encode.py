"""What of an AttentionSpec the fused operators do to q and k, and which of them on which device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qkeel.kernels.native import gpu
from qkeel.kernels.native.norm_rope import NONE, functions, gain_spread, norm_rope, norm_rope_two, ready
from qkeel.spec.attention import AttentionSpec
from qkeel.spec.norm import GainNorm, L2Norm, LayerNorm, NoNorm, Norm, Part, RMSNorm
from qkeel.spec.position import NoPosition, Position, Rope
from qkeel.spec.slot import Params

KINDS: dict[type[Norm], int] = {NoNorm: NONE, RMSNorm: 1, L2Norm: 2, LayerNorm: 3}
_WIDEST = 1024  # WIDEST in the source
# The least min |gain| / max |gain| of a pair at which x̂ is made from the result: dividing magnifies its rounding.
_SPREADS = {torch.float32: 0.05, torch.bfloat16: 0.25, torch.float16: 0.25}

Table = tuple[Tensor, Tensor]
Operator = Callable[[Tensor, Tensor | None, Table | None, int, float, bool], Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Plan:
    """What a norm and a position ask of the operators, resolved once. By identity: one for equal specs."""

    norm: GainNorm | None
    position: Rope | None
    kind_q: int
    kind_k: int
    eps: float


def _planned(norm: Norm, position: Position) -> _Plan | None:
    """None where the operators do not do it."""
    # Exact types: what a subclass changes is not known here.
    if type(norm) not in KINDS or type(position) not in (Rope, NoPosition):
        return None
    return _plan(norm, position) if torch.compiler.is_compiling() else _plan_once(norm, position)


def _plan(norm: Norm, position: Position) -> _Plan | None:
    if not _takes(norm, position):
        return None
    rope, normed = position if isinstance(position, Rope) else None, norm if isinstance(norm, GainNorm) else None
    on, kind = "" if normed is None else normed.on, KINDS[type(norm)]
    return _Plan(
        norm=normed,
        position=rope,
        kind_q=kind if "q" in on else NONE,
        kind_k=kind if "k" in on else NONE,
        eps=0.0 if normed is None else normed.eps,
    )


_plan_once = functools.lru_cache(maxsize=256)(_plan)


def encoded(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    pos_q: Tensor,
    pos_k: Tensor,
    params: Params,
    in_place: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """q and k as `spec.encode` gives them, rounded to their own dtype; None where this is not for the operators.

    They are for a norm over heads without bias, before RoPE with half pairs or none, or after it where norm and
    rotation commute; float32, bfloat16 and float16 on a CPU or a CUDA device; head_dim a multiple of 8.

    in_place: q and k may be overwritten, for nobody else reads them. They are unless the way back needs them.
    """
    plan = _planned(spec.norm, spec.position)
    if plan is None:
        return None
    if not torch.compiler.is_compiling():
        found = _directly(plan, q, k, pos_q, pos_k, params, in_place)
        if found is not None:
            return found
    if not (_holds(q) and _holds(k)):
        return None
    device = q.device
    for x in (k, *params.values()):
        if x.device != device:
            return None  # torch's own error
    operator = operator_for(device)
    if operator is None:
        return None
    gain_q, gain_k = _gain(plan, "q", params), _gain(plan, "k", params)
    table_q, table_k = _tables(plan, q, k, pos_q, pos_k)
    if operator is norm_rope and table_q is table_k and not torch.is_grad_enabled():
        one, two = (q, gain_q, plan.kind_q), (k, gain_k, plan.kind_k)
        if table_q is not None or (plan.kind_q and plan.kind_k):
            return norm_rope_two(one, two, table_q, plan.eps)
    return (
        _one(operator, q, gain_q, table_q, plan.kind_q, plan.eps),
        _one(operator, k, gain_k, table_k, plan.kind_k, plan.eps),
    )


def _directly(
    plan: _Plan, q: Tensor, k: Tensor, pos_q: Tensor, pos_k: Tensor, params: Params, in_place: bool
) -> tuple[Tensor, Tensor] | None:
    """Without torch's dispatcher, which is most of the price of a token."""
    if pos_q is not pos_k and plan.position is not None:
        return None
    if not (q.is_cpu and q.dtype in _SPREADS and (plan.position is not None or (plan.kind_q and plan.kind_k))):
        return None
    native = functions()
    if native is None:
        return None
    gain_q, gain_k = _gain(plan, "q", params), _gain(plan, "k", params)
    in_place = in_place and not (_keeps(q, gain_q) or _keeps(k, gain_k))
    cos = sin = None
    if plan.position is not None:
        place = native.place(pos_q)
        if place is not None:
            cos, sin = _of_place(plan, q.shape[-1], q.dtype, place)
        elif in_place or not torch.is_grad_enabled():
            cos, sin = _turned(plan.position, plan.position.tables(q, k, pos_q, pos_k)[1])
        else:
            return None  # most likely a gradient is wanted
    return native.encode(q, k, gain_q, gain_k, cos, sin, plan.kind_q, plan.kind_k, plan.eps, in_place)


def operator_for(device: torch.device) -> Operator | None:
    """What norms and rotates tensors on a device; None where torch does."""
    if device.type == "cpu":
        return norm_rope if ready() else None
    if not gpu.usable(device):
        return None
    from qkeel.kernels import triton_norm_rope  # here, so that no machine without a GPU imports triton

    return triton_norm_rope.norm_rope


def _tables(plan: _Plan, q: Tensor, k: Tensor, pos_q: Tensor, pos_k: Tensor) -> tuple[Table | None, Table | None]:
    """cos and sin that turn q and those that turn k, one object where they are the same."""
    position = plan.position
    if position is None:
        return None, None
    whole = pos_q.numel() == 1 and not pos_q.is_floating_point() and pos_q.device.type == "cpu"
    if whole and pos_q is pos_k and not torch.compiler.is_compiling():
        found = _of_place(plan, q.shape[-1], q.dtype, int(pos_q))
        return found, found
    return tuple(_turned(position, table) for table in position.tables(q, k, pos_q, pos_k))  # type: ignore[return-value]


@functools.lru_cache(maxsize=16)  # the layers of a model ask for the same one, one after the other
def _of_place(plan: _Plan, size: int, dtype: torch.dtype, place: int) -> Table:
    assert plan.position is not None
    like, pos = torch.empty(1, 1, 1, size, dtype=dtype, device="cpu"), torch.tensor([[place]], device="cpu")
    with torch.inference_mode(False):
        return _turned(plan.position, plan.position.tables(like, like, pos, pos)[1])


def _turned(position: Rope, table: Table) -> Table:
    return (table[0], -table[1]) if position.pairing == "half_reversed" else table


def _takes(norm: Norm, position: Position) -> bool:
    rotated = isinstance(position, Rope)
    if not isinstance(norm, GainNorm):
        return rotated and position.pairing != "interleaved"
    if norm.over != "head" or norm.bias:
        return False
    if not rotated or position.order == "norm_then_rotate":
        return not rotated or position.pairing != "interleaved"
    commutes = isinstance(norm, RMSNorm | L2Norm) and norm.gain in ("none", "scalar", "head")
    return commutes and position.pairing != "interleaved"


def _holds(x: Tensor) -> bool:
    if not (type(x) in (Tensor, nn.Parameter) and (x.is_cpu or x.is_cuda) and x.dtype in _SPREADS):
        return False
    size = x.shape[-1]
    return size % 8 == 0 and 0 < size <= _WIDEST and x.numel() > 0


def _one(operator: Operator, x: Tensor, gain: Tensor | None, table: Table | None, kind: int, eps: float) -> Tensor:
    if kind == NONE:
        return x if table is None else operator(x, None, table, NONE, 0.0, False)
    return operator(x, gain, table, kind, eps, _keeps(x, gain))


def _gain(plan: _Plan, part: Part, params: Params) -> Tensor | None:
    """[], [d], [h 1] or [h d]; a stack of runs gives [h 1 1|d]."""
    gain = None if plan.norm is None else plan.norm.weight(part, params)
    return gain[:, 0] if gain is not None and gain.ndim == 3 else gain


def _keeps(x: Tensor, gain: Tensor | None) -> bool:
    """Whether backward needs x itself: some gain is too small to divide by.

    A compiler sees no values, and the host would have to wait for those on a GPU: there, yes.
    """
    if gain is None or not torch.is_grad_enabled():
        return False
    unseen = torch.compiler.is_compiling() or gain.device.type != "cpu"
    return unseen or gain_spread(gain) < _SPREADS[x.dtype]
