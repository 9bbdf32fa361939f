"""What of an AttentionSpec the fused operators do to q and k, and which of them on which device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qkeel.kernels.native import gpu
from qkeel.kernels.native.norm_rope import NONE, gain_spread, norm_rope, norm_rope_two, ready
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


def encoded(
    spec: AttentionSpec, q: Tensor, k: Tensor, pos_q: Tensor, pos_k: Tensor, params: Params
) -> tuple[Tensor, Tensor] | None:
    """q and k as `spec.encode` gives them, rounded to their own dtype; None where this is not for the operators.

    They are for a norm over heads without bias, before RoPE with half pairs or none, or after it where norm and
    rotation commute; float32, bfloat16 and float16 on a CPU or a CUDA device; head_dim a multiple of 8.
    """
    if not (_takes(spec.norm, spec.position) and _holds(q) and _holds(k)):
        return None
    device = q.device
    for x in (k, *params.values()):
        if x.device != device:
            return None  # torch's own error
    operator = operator_for(device)
    if operator is None:
        return None
    tables = _tables(spec.position, q, k, pos_q, pos_k)
    if operator is norm_rope and tables[0] is tables[1] and not torch.is_grad_enabled():
        norm = spec.norm
        if not isinstance(norm, GainNorm):
            return norm_rope_two((q, None, NONE), (k, None, NONE), tables[0], 0.0)
        if tables[0] is not None or norm.on.startswith("qk"):
            kind = KINDS[type(norm)]
            one = q, _gain(norm, "q", params), kind if "q" in norm.on else NONE
            two = k, _gain(norm, "k", params), kind if "k" in norm.on else NONE
            return norm_rope_two(one, two, tables[0], norm.eps)
    ours = _one("q", q, tables[0], spec, params, operator)
    return ours, _one("k", k, tables[1], spec, params, operator)


def operator_for(device: torch.device) -> Operator | None:
    """What norms and rotates tensors on a device; None where torch does."""
    if device.type == "cpu":
        return norm_rope if ready() else None
    if not gpu.usable(device):
        return None
    from qkeel.kernels import triton_norm_rope  # here, so that no machine without a GPU imports triton

    return triton_norm_rope.norm_rope


def _tables(
    position: Position, q: Tensor, k: Tensor, pos_q: Tensor, pos_k: Tensor
) -> tuple[Table | None, Table | None]:
    """cos and sin that turn q and those that turn k, one object where they are the same."""
    if not isinstance(position, Rope):
        return None, None
    whole = pos_q.numel() == 1 and not pos_q.is_floating_point() and pos_q.device.type == "cpu"
    if whole and pos_q is pos_k and not torch.compiler.is_compiling():
        found = _of_place(position, q.shape[-1], q.dtype, int(pos_q))
        return found, found
    return tuple(_turned(position, table) for table in position.tables(q, k, pos_q, pos_k))  # type: ignore[return-value]


@functools.lru_cache(maxsize=16)  # the layers of a model ask for the same one, one after the other
def _of_place(position: Rope, size: int, dtype: torch.dtype, place: int) -> Table:
    like, pos = torch.empty(1, 1, 1, size, dtype=dtype, device="cpu"), torch.tensor([[place]], device="cpu")
    with torch.inference_mode(False):
        return _turned(position, position.tables(like, like, pos, pos)[1])


def _turned(position: Rope, table: Table) -> Table:
    return (table[0], -table[1]) if position.pairing == "half_reversed" else table


def _takes(norm: Norm, position: Position) -> bool:
    # Exact types: what a subclass changes is not known here.
    if type(norm) not in KINDS or type(position) not in (Rope, NoPosition):
        return False
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


def _one(part: Part, x: Tensor, table: Table | None, spec: AttentionSpec, params: Params, operator: Operator) -> Tensor:
    norm = spec.norm
    if not isinstance(norm, GainNorm) or part not in norm.on:
        return x if table is None else operator(x, None, table, NONE, 0.0, False)
    gain = _gain(norm, part, params)
    return operator(x, gain, table, KINDS[type(norm)], norm.eps, gain is not None and _keeps(x, gain))


def _gain(norm: GainNorm, part: Part, params: Params) -> Tensor | None:
    """[], [d], [h 1] or [h d]; a stack of runs gives [h 1 1|d]."""
    gain = norm.weight(part, params)
    return gain[:, 0] if gain is not None and gain.ndim == 3 else gain


def _keeps(x: Tensor, gain: Tensor) -> bool:
    """Whether backward needs x itself: some gain is too small to divide by.

    A compiler sees no values, and the host would have to wait for those on a GPU: there, yes.
    """
    if not torch.is_grad_enabled():
        return False
    unseen = torch.compiler.is_compiling() or gain.device.type != "cpu"
    return unseen or gain_spread(gain) < _SPREADS[x.dtype]
