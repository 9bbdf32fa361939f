"""BandCall: a call whose queries see a span of the keys each: a window, or packed sequences' own tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkeel.errors import InvalidTypeError, InvalidValueError, ShapeError
from qkeel.spec.call import AttentionCall

Ends = Int[Tensor, " n"]
CuSeqlens = Ends | tuple[Ends, Ends]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BandCall(AttentionCall):
    """A call in which query i sees no keys but those from `low[i]` to `high[i]`, without that one.

    Made by `band_call`. low, high [1 t] count in the whole tensor of keys. `slopes` [1 h 1|t] are those of ALiBi: the
    bias is -slope · |i - j|, i counted from the end of the keys, as flash-attn has it. `of_key` [s] is the number of
    the sequence that a key is of, where sequences are packed; no query sees a key that is `longest` places away. The
    mask is the caller's where `masked` says so, else one that only says that visibility is to be asked for.
    """

    low: Int[Tensor, "1 t"]
    high: Int[Tensor, "1 t"]
    slopes: Float[Tensor, "#b h #t"] | None
    of_key: Int[Tensor, " s"] | None
    longest: int | None
    masked: bool

    def bias(self, rows: slice, keys: slice) -> Tensor | None:
        bias = AttentionCall.bias(self, rows, keys)
        if bias is None or self.slopes is None:
            return bias
        slopes = self.slopes if self.slopes.shape[2] == 1 else self.slopes[:, :, rows]
        gap = (self.pos_q[:, rows, None] - self.pos_k[:, None, keys])[:, None].abs()
        return bias - slopes[..., None] * gap

    def visible(self, rows: slice, keys: slice) -> Tensor:
        key = torch.arange(keys.start, keys.stop, device=self.low.device)
        seen = ((key >= self.low[:, rows, None]) & (key < self.high[:, rows, None]))[:, None]
        given = None if self.padding is None else AttentionCall.visible(self, rows, keys)
        return seen if given is None else seen & given

    def span(self, rows: slice) -> slice:
        s = self.k.shape[2]
        if self.low.device.type == "cpu" and not torch.compiler.is_compiling() and rows.stop > rows.start:
            low, high = self.low[:, rows], self.high[:, rows]
            some = high > low
            stop = int(high.where(some, 0).max())  # only a CPU reads it without waiting
            return slice(min(int(low.where(some, s).min()), stop), stop)
        if self.longest is None:
            return slice(0, s)
        return slice(max(0, min(rows.start - self.longest, s)), min(s, rows.stop + self.longest))

    @property
    def padding(self) -> Tensor | None:
        """The caller's mask, if there is one."""
        return self.mask if self.masked else None


_FIELDS = tuple(f.name for f in dataclasses.fields(AttentionCall))  # torch's compiler does not ask for them


def fields_of(call: AttentionCall) -> dict[str, Any]:
    """The fields that every call has, by name."""
    return {name: getattr(call, name) for name in _FIELDS}


def of_key(call: AttentionCall) -> Int[Tensor, " s"] | None:
    """The number of the sequence of each key of packed ones, -2 for none; None where no sequences are packed."""
    return call.of_key if isinstance(call, BandCall) else None


def band_call(
    call: AttentionCall,
    *,
    window: tuple[int, int] = (-1, -1),
    slopes: Float[Tensor, ...] | None = None,
    cu_seqlens: CuSeqlens | None = None,
    longest: int | None = None,
) -> AttentionCall:
    """The call with a window, ALiBi or packed sequences; the call itself where none of them is asked for.

    Sequence n has the queries cu_seqlens[n] to cu_seqlens[n + 1] and as many keys, or those of the second tensor of
    two. Its last query is at its last key. Tokens of no sequence see nothing. Nothing is read from a device.

    Args:
        call: checked, at default positions; of one sequence where several are packed into it.
        window: query i sees the keys from i - left to i + right; -1 for no bound.
        slopes: [h] or [b h]; [n h] where n sequences are packed.
        cu_seqlens: where each begins, and last where the last one ends, from 0 on.
        longest: the number of tokens of the longest one, if it is known.

    Raises:
        ShapeError, InvalidTypeError, InvalidValueError: cu_seqlens is not that, on a CPU down to its numbers.
    """
    if window == (-1, -1) and slopes is None and cu_seqlens is None:
        return call
    t, s = call.q.shape[2], call.k.shape[2]
    fields: dict[str, object] = {"of_key": None, "longest": None, "masked": call.mask is not None}
    if cu_seqlens is None:
        begin, length, at = call.pos_q.new_zeros(1, t), call.pos_q.new_full((1, t), s), call.pos_q
        slopes = slopes if slopes is None else (slopes if slopes.ndim == 2 else slopes[None])[..., None]
    else:
        ends_q, ends_k = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
        _check(call, ends_q, ends_k)
        same = ends_q is ends_k and t == s
        own_q = ends_q.long()
        own_k = own_q if same else ends_k.long()
        token, n, inside = _tokens(own_q, t)
        key, n_k, inside_k = (token, n, inside) if same else _tokens(own_k, s)
        first, stop = own_k[n], n + 1
        begin, length = (first * inside)[None], ((own_k[stop] - first) * inside)[None]
        pos_k = (key - (first if same else own_k[n_k]))[None]
        at = pos_k if same else (token - own_q[stop])[None] + length
        fields |= {"of_key": torch.where(inside_k, n_k, -2), "longest": longest if same else None, "plain": False}
        fields |= {"pos_q": at, "pos_k": pos_k}
        if slopes is not None:
            slopes = slopes[n].mT[None] if slopes.ndim == 2 else slopes[None, :, None]
    low, high = _spans(call, at, begin, length, window)
    mask = call.mask
    if mask is None:  # one that neither hides nor adds anything
        mask = call.q.new_ones((1, 1, 1, 1), dtype=torch.bool) if slopes is None else call.q.new_zeros(1, 1, 1, 1)
    elif slopes is not None and mask.dtype == torch.bool:  # a bias has to be an added mask's
        mask = call.q.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
    return BandCall(**{**fields_of(call), **fields, "mask": mask, "low": low, "high": high, "slopes": slopes})  # type: ignore[arg-type]


def _tokens(ends: Ends, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens, the number of the sequence of each, and whether it is of one: of none has the nearest one's."""
    token = torch.arange(total, device=ends.device)
    found = torch.searchsorted(ends, token, right=True) - 1
    n = found.clamp(0, len(ends) - 2)
    return token, n, n == found


def _spans(
    call: AttentionCall, at: Tensor, begin: Tensor, length: Tensor, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The keys that each query sees at most: `at` is its place among `length` keys, the first of which is `begin`."""
    left, right = window
    if (reach := call.spec.position.reach) is not None:
        left, right = (reach - 1 if x < 0 else min(x, reach - 1) for x in window)
    right = 0 if call.causal else right
    low, high = begin, begin + length
    if left >= 0:
        low = begin + (at - left).clamp_min(0)
    if right >= 0:
        high = torch.minimum(high, begin + (at + (right + 1)).clamp_min(0))
    s = call.k.shape[2]
    low = low.clamp(0, s)
    return low, torch.maximum(low, high.clamp(0, s))


def _check(call: AttentionCall, *ends: object) -> None:
    if call.q.shape[0] != 1:
        raise ShapeError(
            f"expected packed sequences one after the other in one, q [1 heads tokens dim], got {tuple(call.q.shape)}; "
            "without cu_seqlens each row of a batch is a sequence"
        )
    if not call.plain:
        raise InvalidValueError("expected no pos_q and pos_k with cu_seqlens: positions start again in each sequence")
    for x, total in zip(ends, (call.q.shape[2], call.k.shape[2])):
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise InvalidTypeError(f"expected cu_seqlens as a tensor of int32 or int64, or two of them, got {got}")
        if x.ndim != 1 or len(x) < 2 or x.shape != ends[0].shape:  # type: ignore[attr-defined]
            raise ShapeError(f"expected cu_seqlens of shape [sequences + 1], of queries and keys alike, got {x.shape}")
        if x.device != call.q.device:
            raise InvalidValueError(f"expected cu_seqlens on {call.q.device} as q, got it on {x.device}")
        wrong = x.device.type == "cpu" and not torch.compiler.is_compiling()  # elsewhere to look would be to wait
        if wrong and (int(x[0]) or int(x[-1]) > total or bool((x[1:] < x[:-1]).any())):
            raise InvalidValueError(
                f"expected cu_seqlens to ascend from 0 to at most the {total} tokens of its tensor, got {x.tolist()}"
            )
