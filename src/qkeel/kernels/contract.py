"""What a kernel offers: it says what it cannot do, and why, before it does the rest."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from qkeel.functional.norms import unrounded, wide
from qkeel.kernels import native
from qkeel.kernels.native import gpu
from qkeel.spec.attention import AttentionSpec
from qkeel.spec.call import AttentionCall
from qkeel.spec.cap import NoCap, Softcap
from qkeel.spec.norm import NoNorm
from qkeel.spec.position import NoPosition
from qkeel.spec.slot import Params

LEAST_UNDER_WINDOW = 128  # rows at once under a narrower window: fewer make poor matrix products


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why something cannot be done exactly, and the way out."""

    reason: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.way_out}"


class Kernel(abc.ABC):
    """Computes out [b h t d'] of a call."""

    @abc.abstractmethod
    def supports(self, call: AttentionCall) -> Refusal | None:
        """None if this kernel computes the call exactly, else the reason."""

    @abc.abstractmethod
    def __call__(self, call: AttentionCall) -> Tensor:
        """out [b h t d'] in q's dtype."""


def row_blocks(call: AttentionCall, elements: int, least: int = 1) -> Iterator[slice]:
    """Blocks of at least `least` query rows whose logits hold about `elements` numbers: O(T) memory at any T.

    Under a window blocks are about as tall as it is wide, so that they see little beside it.
    """
    b, h, t, _ = call.q.shape
    rows = max(1, min(t, max(least, elements // max(1, b * h * call.k.shape[2]))))
    if call.window is not None:
        rows = min(rows, max(LEAST_UNDER_WINDOW, call.window))
    for start in range(0, t, rows):
        yield slice(start, min(t, start + rows))


def average(weights: Tensor, v: Tensor) -> Tensor:
    """weights [b h t s] times v [b g s d], each key head serving h / g query heads, without repeating v."""
    b, h, t, s = weights.shape
    g = v.shape[1]
    with unrounded(v):
        if g == h:
            return weights @ v
        return (weights.reshape(b, g, h // g * t, s) @ v).view(b, h, t, v.shape[-1])


def whole_and_plain(call: AttentionCall) -> bool:
    """Whether one fused call without a mask does: everything visible, or square and causal at default positions."""
    if call.mask is not None or call.window is not None:
        return False
    return not call.causal or (call.plain and call.q.shape[2] == call.k.shape[2])


def folded(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor, float]:
    """q, k, v as a plain softmax kernel takes them, dense, in the caller's dtype, and the scale left to it."""
    dtype = call.q.dtype
    scale = call.spec.factor(call.pos_q, call.q.shape[-1], call.params, wide(dtype))
    whole = isinstance(scale, Tensor) and dtype != wide(dtype)  # q times scale is rounded once, not twice
    where = call.pos_q, call.pos_k
    q, k = call.encoded() if whole else encoded(call.spec, call.q, call.k, *where, call.params, in_place=call.owned)
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    v = call.spec.values(call.v, call.params)
    return dense(q.to(dtype)), dense(k.to(dtype)), dense(v), scale


def dense(x: Tensor) -> Tensor:
    """x with its numbers of one row side by side, as torch's fused operators take for granted.

    Of other tensors they give wrong results, and SDPA, which looks, makes the whole matrix instead.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def encoded(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    pos_q: Tensor,
    pos_k: Tensor,
    params: Params,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """`spec.encode`, in the caller's dtype: by the compiled operators where they do it, else by torch.

    in_place: nobody else reads q and k, so they may be overwritten.
    """
    if type(spec.norm) is NoNorm and type(spec.position) is NoPosition:  # a cache holds them encoded: not a copy more
        return q, k
    fast = native.encoded(spec, q, k, pos_q, pos_k, params, in_place)
    if fast is not None:
        return fast
    ours, theirs = spec.encode(q, k, pos_q, pos_k, params)
    return ours.to(q.dtype), theirs.to(k.dtype)


def row_statistics(call: AttentionCall) -> gpu.Rows | None:
    """Largest and smallest logit, lse and entropy of every query row [b h t], float32, by a pass of its own on a GPU.

    None where that does not do: other devices, biases, masks of pairs, positions of the caller's own, subclasses. q and
    k are those that the definition takes, in float32; where the spec leaves them as they are, in their own precision,
    which makes the same products.
    """
    if type(call) is not AttentionCall:
        return None  # who sees whom, and what is added, are functions of a subclass
    spec, mask = call.spec, call.mask
    padding = mask is None or (mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1)
    if not (padding and call.plain and spec.position.folds and type(spec.cap) in (NoCap, Softcap)):
        return None
    if not gpu.takes(call.q, call.k):
        return None
    scale = spec.factor(call.pos_q, call.q.shape[-1], call.params, wide(call.q.dtype))
    bare = isinstance(spec.norm, NoNorm) and type(spec.position) is NoPosition and not isinstance(scale, Tensor)
    q, k = (call.q, call.k) if bare else call.encoded()
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    keys = None if mask is None else mask[:, 0, 0].expand(-1, k.shape[2])
    cap = spec.cap.cap if isinstance(spec.cap, Softcap) else None
    return gpu.row_statistics(q, k, scale, causal=call.causal, window=call.window, cap=cap, keys=keys)
