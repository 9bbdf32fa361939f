"""An attention call: q, k, v, the spec and the visible pairs, validated once. BandCall holds windows and packed
sequences.

Shapes: b batch, t queries, s keys, h query heads, g key heads, d head size, e size of a value.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, final

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from qkeel.errors import InvalidTypeError, InvalidValueError, ShapeError, unknown
from qkeel.functional.class_statistics import TokenClasses
from qkeel.functional.norms import unrounded
from qkeel.spec.attention import AttentionSpec
from qkeel.spec.rope import NoPosition
from qkeel.spec.slot import (
    AttentionMask,
    KeyPositions,
    Keys,
    Logits,
    Mask,
    Params,
    PosK,
    PosQ,
    Queries,
    QueryMask,
    QueryPositions,
    Values,
    Visible,
)

# AttentionCall: the validated inputs of one attention call.

_COUNTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionCall:
    """A validated attention call with q [b h t d], k [b g s d], v [b g s e], pos_q [b|1 t] and pos_k [b|1 s].

    `plain` is True for default positions (0 .. s-1, with the queries aligned to the end of the keys), for which a
    kernel may use a causal flag instead of comparing positions. `query_mask` [b t] affects only statistics, from which
    rows where it is False, such as padded rows, are excluded; attention still computes these rows. `classes` splits the
    statistics by token class.
    """

    spec: AttentionSpec  #: the attention that is computed
    q: Queries
    k: Keys
    v: Values
    params: Params  #: the spec's learned parameters, keyed by name
    causal: bool
    #: a boolean mask (True = visible), or one that is added to the logits
    mask: Mask | None
    pos_q: PosQ
    pos_k: PosK
    plain: bool
    dropout: float = 0.0  #: the probability of dropping an attention weight, in [0, 1)
    query_mask: QueryMask | None = None
    classes: TokenClasses | None = None
    #: the added mask as the program wrote it, where `mask` has -inf for its low numbers
    written_mask: Mask | None = None

    @property
    def query_shape(self) -> tuple[int, int]:
        """The batch size b and the number of queries t."""
        return self.q.shape[0], self.q.shape[2]

    @property
    def query_device(self) -> torch.device:
        """The device of the queries."""
        return self.q.device

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        """The sizes b, h, t and s of the logits."""
        b, h, t, _ = self.q.shape
        return b, h, t, self.k.shape[2]

    @property
    def whole(self) -> bool:
        """True if a single fused call without a mask is sufficient, because no key is hidden or because the call is
        square and causal with plain positions."""
        if self.mask is not None or self.window is not None:
            return False
        # The causal flag of fused kernels starts at the first key, so a call that is not square
        # needs a mask.
        return not self.causal or (self.plain and self.q.shape[2] == self.k.shape[2])

    @property
    def window(self) -> int | None:
        """The window size (a query sees only keys fewer than this many tokens away), or None if the window hides
        nothing."""
        reach = self.spec.position.reach
        # Positions that the caller passes may be farther apart than there are tokens, plain ones not.
        if (
            reach is not None
            and self.plain
            and reach >= max(self.q.shape[2], self.k.shape[2])
        ):
            return None
        return reach

    def encoded(self) -> tuple[Queries, Keys]:
        """Returns q and k as they enter the dot product, float32 or wider."""
        return self.spec.encode(
            self.q,
            self.k,
            self.pos_q,
            self.pos_k,
            self.params,
        )

    def scores(self, q: Queries, k: Keys, rows: slice, keys: slice) -> Logits:
        """The logits of a block of encoded (already sliced) q and k, before the cap is applied and with the additive
        mask included."""
        with unrounded(q):
            z = self.spec.scores(
                q,
                k,
                self.pos_q[:, rows],
                self.pos_k[:, keys],
                self.params,
            )
        bias = self.bias(rows, keys)
        return z if bias is None else z + bias.to(z.dtype)

    @property
    def unit(self) -> float | None:
        """The positive number by which encoded q·k is multiplied to make the logits; None if they are more than that."""
        factor = self.spec.factor(
            self.pos_q, self.q.shape[-1], self.params, self.q.dtype
        )
        is_number = isinstance(factor, float) and factor > 0
        is_product = self.spec.position.folds and not self.is_biased
        return factor if is_number and is_product else None  # type: ignore[return-value]

    def capped_scores(self, z: Logits, rows: slice, keys: slice) -> Logits:
        """The logits of a block after the cap, from those before it."""
        return self.spec.cap.apply(z)

    @property
    def sink(
        self,
    ) -> (
        Float[
            Tensor,
            (
                1  # h 1
            ),
        ]
        | None
    ):
        """The logit of each head's sink; None if the softmax has no sink."""
        sink = self.spec.normalizer.sink_logit(self.params, self.q.device)
        return None if sink is None else sink[None]

    @property
    def is_biased(self) -> bool:
        """True if something besides q·k may be added to the logits."""
        is_added = self.mask is not None and self.mask.dtype != torch.bool
        return is_added or self.spec.position.biased

    def unbiased(self, q: Queries, k: Keys, rows: slice, keys: slice) -> Logits:
        """Like `scores`, without what is added to q·k: masks, and biases of positions."""
        position = self.spec.position
        spec = dataclasses.replace(
            self.spec, position=NoPosition() if position.biased else position
        )
        with unrounded(q):
            return spec.scores(
                q, k, self.pos_q[:, rows], self.pos_k[:, keys], self.params
            )

    def bias(self, rows: slice, keys: slice) -> Mask | None:
        """The additive mask of a block with 0 in place of -inf, or None if there is no additive mask."""
        block = block_of(self.mask, rows, keys)
        if block is None or block.dtype == torch.bool:
            return None
        # Hidden pairs are told by `visible`; -inf here would make gradients NaN.
        return block.masked_fill(_hides(block), 0.0)

    def visible(self, rows: slice, keys: slice) -> Visible | None:
        """A mask that is True where a query may see a key and broadcasts to [b h rows keys], or None if every key is
        visible."""
        visible = None
        if self.causal:
            visible = (self.pos_k[:, None, keys] <= self.pos_q[:, rows, None])[:, None]
        window = self.window
        if window is not None:
            near = (self.pos_q[:, rows, None] - self.pos_k[:, None, keys])[
                :, None
            ].abs() < window
            visible = near if visible is None else visible & near
        block = block_of(self.mask, rows, keys)
        if block is not None:
            allowed = block if block.dtype == torch.bool else ~_hides(block)
            visible = allowed if visible is None else visible & allowed
        return visible

    def span(self, rows: slice) -> slice:
        """A range that contains every key that the rows can see, determined without reading tensor data. It may be
        empty."""
        s, t, reach = self.k.shape[2], self.q.shape[2], self.spec.position.reach
        if not self.plain:
            return slice(0, s)
        first, last = s - t + rows.start, s - t + rows.stop - 1
        # Positions are plain here, so they are indices, shifted by s - t.
        start = 0 if reach is None else first - reach + 1
        stop = last + 1 if self.causal else s if reach is None else last + reach
        stop = max(0, min(s, stop))
        return slice(min(max(0, start), stop), stop)


def block_of(
    mask: Shaped[Tensor, "#b #h #t #s"] | None, rows: slice, keys: slice
) -> Shaped[Tensor, "#b #h #r #n"] | None:
    """A block of what broadcasts to the logits."""
    if mask is None:
        return None
    # A dimension of size 1 broadcasts and has no blocks.
    r = rows if mask.shape[-2] > 1 else slice(None)
    c = keys if mask.shape[-1] > 1 else slice(None)
    return mask[..., r, c]


# An AttentionCall, or a ScoresCall of qkeel.capture, which has the same methods but knows its logits.
LogitCall = Any
CallT = TypeVar("CallT", bound=Any)


def with_query_mask(call: CallT, mask: Bool[Tensor, "b t"]) -> CallT:
    """Restricts the statistics of a call to the query rows where mask [b t] is True.

    Output and gradients do not change. The call is returned unchanged if the shape of the mask differs from the call's
    [b t], for example if the batch is folded into windows, in cross-attention, or in a single cached step.

    Args:
        call: an AttentionCall, or the ScoresCall of hand-written attention.
        mask: a boolean mask on any device.

    Raises:
        InvalidTypeError: the mask is not boolean.
    """
    _check_tensor("query_mask", mask)
    if mask.dtype != torch.bool:
        raise InvalidTypeError(
            f"expected a boolean query_mask (True = the row counts), got {mask.dtype}; use mask.bool()"
        )
    if tuple(mask.shape) != call.query_shape:
        return call
    return dataclasses.replace(call, query_mask=mask.to(call.query_device))


def _hides(block: Tensor) -> Tensor:
    # Additive masks hide a key with -inf or, as in transformers, with the lowest finite value of their dtype.
    return block <= torch.finfo(block.dtype).min


def make_call(
    spec: AttentionSpec,
    q: Queries,
    k: Keys,
    v: Values,
    *,
    params: Params | None = None,
    causal: bool = True,
    mask: AttentionMask | None = None,
    pos_q: QueryPositions | None = None,
    pos_k: KeyPositions | None = None,
    dropout: float = 0.0,
) -> AttentionCall:
    """Validates raw q [b h t d], k [b g s d] and v [b g s e] and returns their call under `spec`; see `qkeel.attention`
    for the arguments."""
    if not isinstance(spec, AttentionSpec):
        raise InvalidTypeError(
            f"expected an AttentionSpec (qkeel.preset(name) creates one), got {spec!r}"
        )
    _check_tensors(q, k, v)
    spec.position.check(q.shape[-1])
    if not 0 <= dropout < 1:
        raise InvalidValueError(f"expected dropout in [0, 1), got {dropout}")
    t, s = q.shape[2], k.shape[2]
    plain = pos_q is None and pos_k is None
    keys = (
        torch.arange(s, device=q.device)[None]
        if pos_k is None
        else _positions("pos_k", pos_k, q, s)
    )
    if t == s and (pos_q is None or pos_q is pos_k):
        # The same object, so that tables computed from it are built only once.
        queries = keys
    elif pos_q is not None:
        queries = _positions("pos_q", pos_q, q, t)
    else:
        queries = (
            torch.arange(s - t, s, device=q.device)[None]
            # With more queries than keys, the first queries come before every key.
            if t > s
            else keys[:, s - t :]
        )
    return AttentionCall(
        spec=spec,
        q=q,
        k=k,
        v=v,
        params=_params(spec, q, k, params),
        causal=causal,
        mask=_mask(mask, q, s),
        pos_q=queries,
        pos_k=keys,
        plain=plain,
        dropout=dropout,
    )


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise InvalidTypeError(
            f"expected {name} to be a tensor, got {type(x).__name__}"
        )


def _holds_numbers(x: Tensor) -> bool:
    # float8 and its like hold numbers only together with a scale.
    return x.is_floating_point() and x.dtype.itemsize > 1


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    # torch accepts a 0-dim CPU tensor on any device.
    if x.device != q.device and x.ndim:
        raise InvalidValueError(
            f"expected {name} on {q.device} like q, but it is on {x.device}; move it with .to(q.device)"
        )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x)
        if x.ndim != 4:
            raise ShapeError(
                f"expected {name} of shape [batch heads tokens dim], got {tuple(x.shape)}"
            )
        if not _holds_numbers(x):
            raise InvalidTypeError(
                f"expected a floating-point {name} with at least 16 bits, got {x.dtype}; multiply it by its scale and "
                "convert it first"
            )
    if not (q.dtype == k.dtype == v.dtype):
        raise InvalidTypeError(
            f"expected q, k and v of the same dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not (q.device == k.device == v.device):
        raise InvalidValueError(
            f"expected q, k and v on the same device, got {q.device}, {k.device}, {v.device}"
        )
    if (
        q.shape[0] != k.shape[0]
        or k.shape[:3] != v.shape[:3]
        or q.shape[3] != k.shape[3]
    ):
        raise ShapeError(
            "expected q [b h t d], k [b g s d], v [b g s d'] with the same b, g, s, d; got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}. "
            "If the heads are in dimension 2, call transpose(1, 2) on all three."
        )
    if q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"the number of query heads must be a multiple of the number of key heads, "
            f"got {q.shape[1]} and {k.shape[1]}"
        )


def _positions(name: str, pos: Tensor, q: Tensor, n: int) -> Tensor:
    _check_tensor(name, pos)
    _check_device(name, pos, q)
    if pos.dtype not in _COUNTS and not _holds_numbers(pos):
        raise InvalidTypeError(
            f"expected {name} as integers (int64, int32, int16, int8, uint8) or floating-point numbers of at least 16 "
            f"bits, got {pos.dtype}; convert it first"
        )
    b = q.shape[0]
    full = pos[None] if pos.ndim == 1 else pos
    if full.ndim != 2 or full.shape[0] not in (1, b) or full.shape[1] != n:
        raise ShapeError(
            f"expected {name} of shape [{b} {n}] or [{n}], got {tuple(pos.shape)}"
        )
    return full


def _mask(mask: AttentionMask | None, q: Tensor, s: int) -> Tensor | None:
    if mask is None:
        return None
    _check_tensor("mask", mask)
    _check_device("mask", mask, q)
    b, h, t, _ = q.shape
    if mask.dtype != torch.bool and not _holds_numbers(mask):
        raise InvalidTypeError(
            "expected a boolean mask (True = may attend) or a floating-point mask of at least 16 bits (added to the "
            f"logits), got {mask.dtype}"
        )
    # [b, s] could be padding or, with as many queries as sequences, pairs: both are in use.
    if b == t > 1 and mask.shape == (b, s):
        raise ShapeError(
            f"a mask of shape {tuple(mask.shape)} is ambiguous here: it could be [batch keys] or [queries keys]; "
            "pass mask[:, None, None, :] if it hides padding, or mask[None, None] if it hides query-key pairs"
        )
    full = mask[:, None, None, :] if mask.shape == (b, s) else mask
    while full.ndim < 4:
        full = full[None]
    if full.ndim != 4 or any(m not in (1, n) for m, n in zip(full.shape, (b, h, t, s))):
        raise ShapeError(
            f"expected a mask broadcasting to [{b} {h} {t} {s}], or a padding mask [{b} {s}]; got {tuple(mask.shape)}"
        )
    return full


def _params(spec: AttentionSpec, q: Tensor, k: Tensor, params: Params | None) -> Params:
    values = dict(params or {})
    needed = spec.parameter_shapes(
        q.shape[1],
        k.shape[1],
        q.shape[3],
    )
    for name in values:
        if name not in needed:
            raise unknown("parameter of this spec", name, needed)
    for name, shape in needed.items():
        if name not in values:
            raise InvalidValueError(
                f"this spec needs the parameter {name!r} of shape {shape}; "
                "create a full set with spec.init_params(n_heads, n_kv_heads, head_dim)"
            )
        _check_tensor(f"parameter {name!r}", values[name])
        _check_device(f"parameter {name!r}", values[name], q)
        if not _holds_numbers(values[name]):
            raise InvalidTypeError(
                f"expected parameter {name!r} as floating-point numbers of at least 16 bits, got {values[name].dtype}; "
                "convert it first"
            )
        if values[name].shape != shape:
            raise ShapeError(
                f"expected parameter {name!r} of shape {shape}, got {tuple(values[name].shape)}"
            )
    return values


# BandCall: each query sees one contiguous range of keys, because there is a window or because sequences are packed.

Ends = Int[Tensor, " n"]
CuSeqlens = Ends | tuple[Ends, Ends]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BandCall(AttentionCall):
    """A call in which query i sees only keys from `low[i]` up to but not including `high[i]`. Created by `band_call`.

    low and high [1 t] are indices into the full key tensor. `slopes` [1 h 1|t] are the slopes of ALiBi, whose bias is
    -slope · |i - j| with i counted from the end of the keys, as in flash-attn. `of_key` [s] is the index of the packed
    sequence to which each key belongs. `longest` is a bound on the distance of a visible key. `masked` is True if
    `mask` was passed by the caller; otherwise `mask` is a placeholder that hides nothing, which makes kernels read
    `visible`.
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
        visible = ((key >= self.low[:, rows, None]) & (key < self.high[:, rows, None]))[
            :, None
        ]
        unpadded = (
            None if self.padding is None else AttentionCall.visible(self, rows, keys)
        )
        return visible if unpadded is None else visible & unpadded

    def span(self, rows: slice) -> slice:
        s = self.k.shape[2]
        # Reading the bounds makes the range as narrow as it can be; inside a compiled graph it would break the graph.
        if (
            self.low.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and rows.stop > rows.start
        ):
            low, high = self.low[:, rows], self.high[:, rows]
            # The bounds of a row that sees no key lie anywhere, and would widen the range for nothing.
            is_used = high > low
            # On a GPU, reading this value would wait for the device.
            stop = int(high.where(is_used, 0).max())
            return slice(min(int(low.where(is_used, s).min()), stop), stop)
        if self.longest is None:
            return slice(0, s)
        return slice(
            max(0, min(rows.start - self.longest, s)), min(s, rows.stop + self.longest)
        )

    @property
    def padding(self) -> Tensor | None:
        """The caller's mask, if any."""
        return self.mask if self.masked else None


# torch.compile can't trace dataclasses.fields.
_FIELDS = tuple(f.name for f in dataclasses.fields(AttentionCall))


def fields_of(call: AttentionCall) -> dict[str, Any]:
    """The fields of AttentionCall by name, without the fields of a subclass."""
    return {name: getattr(call, name) for name in _FIELDS}


def of_key(call: AttentionCall) -> Int[Tensor, " s"] | None:
    """The index of the sequence of each key, or -2 for keys outside all sequences; None if no sequences are packed."""
    return call.of_key if isinstance(call, BandCall) else None


def band_call(
    call: AttentionCall,
    *,
    window: tuple[int, int] = (-1, -1),
    slopes: Float[Tensor, ...] | None = None,
    cu_seqlens: CuSeqlens | None = None,
    longest: int | None = None,
) -> AttentionCall:
    """Adds a window, ALiBi or packed sequences to a call, and returns the call itself if none of these is given.

    Sequence n has the queries cu_seqlens[n] to cu_seqlens[n + 1] and the keys at the same indices or, if two tensors
    are given, at those in the second tensor. The last query of a sequence is aligned with its last key. Tokens outside
    all sequences see no keys. No data is read back from a GPU.

    Args:
        call: a validated call with plain positions; its batch size must be 1 if sequences are packed.
        window: a pair (left, right), with which query i sees the keys from i - left to i + right; -1 means no bound.
        slopes: the slopes of ALiBi, [h] or [b h], or [n h] for n packed sequences.
        cu_seqlens: the cumulative lengths, that is, the start of each sequence, beginning with 0, and the end of the
            last sequence.
        longest: the number of tokens of the longest sequence, if known.

    Raises:
        ShapeError: cu_seqlens or the batch has the wrong shape.
        InvalidTypeError: cu_seqlens is not a tensor of int32 or int64.
        InvalidValueError: cu_seqlens does not ascend from 0 to at most the number of tokens (checked only on a CPU).
    """
    if window == (-1, -1) and slopes is None and cu_seqlens is None:
        return call
    t, s = call.q.shape[2], call.k.shape[2]
    fields: dict[str, object] = {
        "of_key": None,
        "longest": None,
        "masked": call.mask is not None,
    }
    if cu_seqlens is None:
        begin, length, at = (
            call.pos_q.new_zeros(1, t),
            call.pos_q.new_full((1, t), s),
            call.pos_q,
        )
        slopes = (
            slopes
            if slopes is None
            else (slopes if slopes.ndim == 2 else slopes[None])[..., None]
        )
    else:
        ends_q, ends_k = (
            cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
        )
        _check(call, ends_q, ends_k)
        is_self_attention = ends_q is ends_k and t == s
        own_q = ends_q.long()
        own_k = own_q if is_self_attention else ends_k.long()
        token, n, inside = _tokens(own_q, t)
        key, n_k, inside_k = (
            (token, n, inside) if is_self_attention else _tokens(own_k, s)
        )
        first_key, next_sequence = own_k[n], n + 1
        # Tokens outside of all sequences get an empty range of keys.
        begin = (first_key * inside)[None]
        length = ((own_k[next_sequence] - first_key) * inside)[None]
        pos_k = (key - (first_key if is_self_attention else own_k[n_k]))[None]
        at = (
            pos_k
            if is_self_attention
            else (token - own_q[next_sequence])[None] + length
        )
        fields |= {
            "of_key": torch.where(inside_k, n_k, -2),
            "longest": longest if is_self_attention else None,
            "plain": False,
        }
        fields |= {"pos_q": at, "pos_k": pos_k}
        if slopes is not None:
            slopes = slopes[n].mT[None] if slopes.ndim == 2 else slopes[None, :, None]
    low, high = _spans(call, at, begin, length, window)
    mask = call.mask
    # A BandCall always has a mask, and ALiBi's bias can only be added to one of numbers.
    if mask is None:
        mask = (
            call.q.new_ones((1, 1, 1, 1), dtype=torch.bool)
            if slopes is None
            else call.q.new_zeros(1, 1, 1, 1)
        )
    elif (
        slopes is not None and mask.dtype == torch.bool
    ):  # only an additive mask can carry ALiBi's bias
        mask = call.q.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
    return BandCall(
        **{
            **fields_of(call),
            **fields,
            "mask": mask,
            "low": low,
            "high": high,
            "slopes": slopes,
        }
    )  # type: ignore[arg-type]


def _tokens(ends: Ends, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens 0 .. total-1, the index of each token's sequence (or of the nearest sequence if the token is in none), and
    whether the token is in a sequence."""
    token = torch.arange(total, device=ends.device)
    # Empty sequences repeat an end; `right` picks the last of them, which holds the token.
    document = torch.searchsorted(ends, token, right=True) - 1
    n = document.clamp(0, len(ends) - 2)
    return token, n, n == document


def _spans(
    call: AttentionCall,
    at: Tensor,
    begin: Tensor,
    length: Tensor,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """The bounds [1 t] of the keys that each query can see. `at` is the position of a query among its `length` keys,
    which start at key `begin`."""
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
    # An empty range keeps low = high, inside of the keys.
    low = low.clamp(0, s)
    return low, torch.maximum(low, high.clamp(0, s))


def _check(call: AttentionCall, *ends: object) -> None:
    if call.q.shape[0] != 1:
        raise ShapeError(
            f"expected packed sequences in a batch of one, q [1 heads tokens dim], got {tuple(call.q.shape)}; "
            "without cu_seqlens each row of a batch is a sequence"
        )
    if not call.plain:
        raise InvalidValueError(
            "expected neither pos_q nor pos_k with cu_seqlens: positions restart in each sequence"
        )
    for x, total in zip(ends, (call.q.shape[2], call.k.shape[2])):
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise InvalidTypeError(
                f"expected cu_seqlens as a tensor of int32 or int64, or two of them, got {got}"
            )
        if x.ndim != 1 or len(x) < 2 or x.shape != ends[0].shape:  # type: ignore[attr-defined]
            raise ShapeError(
                f"expected cu_seqlens of shape [sequences + 1], for queries and for keys, got {x.shape}"
            )
        if x.device != call.q.device:
            raise InvalidValueError(
                f"expected cu_seqlens on {call.q.device} like q, but it is on {x.device}"
            )
        # Reading from a GPU would wait for it.
        wrong = x.device.type == "cpu" and not torch.compiler.is_compiling()
        if wrong and (int(x[0]) or int(x[-1]) > total or bool((x[1:] < x[:-1]).any())):
            raise InvalidValueError(
                f"expected cu_seqlens to ascend from 0 to at most {total}, the number of tokens, got {x.tolist()}"
            )
