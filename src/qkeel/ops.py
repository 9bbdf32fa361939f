"""qkeel.attention: one entry point to every kernel, with statistics on request."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from qkeel.errors import ShapeError
from qkeel.functional.statistics import LogitStats
from qkeel.kernels.attention.compiled import Native
from qkeel.kernels.attention.flex import Flex
from qkeel.kernels.choose import KERNELS as KERNELS
from qkeel.kernels.choose import choose
from qkeel.kernels.contract import average
from qkeel.kernels.statistics import (
    extreme_stats,
    logit_stats,
    max_stats,
    stats_of_rows,
)
from qkeel.options import check_known
from qkeel.spec.attention import AttentionSpec
from qkeel.spec.call import AttentionCall, CuSeqlens, band_call, make_call
from qkeel.spec.slot import (
    AttentionMask,
    KeyPositions,
    Keys,
    Logits,
    Outputs,
    Params,
    Queries,
    QueryPositions,
    Values,
)


@overload
def attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    spec: AttentionSpec,
    params: Params | None = ...,
    causal: bool = ...,
    mask: AttentionMask | None = ...,
    pos_q: QueryPositions | None = ...,
    pos_k: KeyPositions | None = ...,
    cu_seqlens: CuSeqlens | None = ...,
    dropout: float = ...,
    impl: str = ...,
    stats: Literal[False] = ...,
) -> Outputs: ...
@overload
def attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    spec: AttentionSpec,
    params: Params | None = ...,
    causal: bool = ...,
    mask: AttentionMask | None = ...,
    pos_q: QueryPositions | None = ...,
    pos_k: KeyPositions | None = ...,
    cu_seqlens: CuSeqlens | None = ...,
    dropout: float = ...,
    impl: str = ...,
    stats: Literal[True, "max"],
) -> tuple[Outputs, LogitStats]: ...
def attention(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    spec: AttentionSpec,
    params: Params | None = None,
    causal: bool = True,
    mask: AttentionMask | None = None,
    pos_q: QueryPositions | None = None,
    pos_k: KeyPositions | None = None,
    cu_seqlens: CuSeqlens | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
    stats: bool | Literal["max"] = False,
) -> Outputs | tuple[Outputs, LogitStats]:
    """Computes the attention that `spec` describes for raw (unnormed, unrotated) q, k, v; see `spec.explain()` for the
    formula.

    >>> from qkeel.spec import preset
    >>> q = torch.ones(1, 2, 3, 4)
    >>> out, statistics = attention(q, q, q, spec=preset("baseline"), stats=True)
    >>> statistics.max_logit.tolist()
    [2.0, 2.0]

    Args:
        q: the queries [b h t d]. k, v: the keys [b g s d] and values [b g s d'], where h is a multiple of g.
        spec: what attention computes. params: the tensors that the spec needs, if any (see `spec.init_params`).
        causal: whether a query sees only keys at or before its own position; without positions this takes at most as
            many queries as keys.
        mask: a boolean (True = may attend) or additive mask, broadcast to [b h t s], or a padding mask [b s].
        pos_q, pos_k: the positions [b t] and [b s]; by default 0 .. s-1, with the queries aligned to the end of the
            keys.
        cu_seqlens: the start of each sequence packed into q, k, v with b = 1, and the end of the last sequence, as an
            int tensor [n + 1], or a pair of such tensors for queries and keys. Each sequence attends only to itself,
            and its positions start at 0.
        dropout: the probability of dropping a weight. Statistics are computed before dropout.
        impl: "auto", or the name of a kernel, which refuses calls that it cannot compute exactly.
        stats: True also returns LogitStats, which are exact, detached, and computed without a T×T matrix. "max": only
            the exact largest logit of each head (`max_logit`), at less than half the cost; the compiled CPU kernel
            gives it in its own pass, with capped_max_logit, entropy, entropy_min and n_queries. Other fields are then
            neutral, with n_pairs 0.

    Returns:
        out [b h t d'] in q's dtype; with `stats`, (out, LogitStats).

    Raises:
        ShapeError, InvalidTypeError, InvalidValueError, UnknownNameError: invalid input. RefusedError: see `impl`.
    """
    call = make_call(
        spec,
        q,
        k,
        v,
        params=params,
        causal=causal,
        mask=mask,
        pos_q=pos_q,
        pos_k=pos_k,
        dropout=dropout,
    )
    t, s = q.shape[2], k.shape[2]
    if causal and call.plain and cu_seqlens is None and t > s > 0:
        # The usual way here is tokens in the dimension of heads, whose number may divide too.
        raise ShapeError(
            f"expected at most as many queries as keys under causal=True, got {t} and {s}: queries are aligned to the end "
            "of the keys, so the first ones would see none. If the heads are in dimension 2, call transpose(1, 2) on q, "
            "k and v; for cross-attention pass causal=False; otherwise pass pos_q and pos_k"
        )
    call = band_call(call, cu_seqlens=cu_seqlens)
    if isinstance(stats, str):
        check_known("statistics", stats, ["max"])
        return run_with_maxima(call, impl)
    out = run(call, impl)
    return (out, logit_stats(call)) if stats else out


def run_with_maxima(call: AttentionCall, impl: str) -> tuple[Tensor, LogitStats]:
    """Returns the output and the largest logits, from the kernel's own pass where it computes them."""
    kernel = choose(call, impl)
    # The compiled kernel has the maxima at hand, as it subtracts them anyway.
    if isinstance(kernel, Native):
        out, rows = kernel.with_rows(call)
        return out, stats_of_rows(call, rows)
    # Under a cap, FlexAttention's maxima are those of the capped logits, not of what is asked for.
    if isinstance(kernel, Flex) and call.spec.cap.limit is None:
        out, _, largest = kernel.with_maxima(call)
        return out, extreme_stats(largest)
    return kernel(call), max_stats(call)


def run(call: AttentionCall, impl: str = "auto") -> Outputs:
    """Runs a checked call with the kernel of the given name."""
    return choose(call, impl)(call)


def run_with_weights(call: AttentionCall) -> tuple[Outputs, Logits]:
    """Computes a checked call with explicit T×T matrices; returns out [b h t d'] and the weights [b h t s] after
    dropout, in q's dtype."""
    rows, keys = slice(0, call.q.shape[2]), slice(0, call.k.shape[2])
    logits = call.spec.cap.apply(call.scores(*call.encoded(), rows, keys))
    weights = call.spec.normalizer.weights(
        logits, call.visible(rows, keys), call.params
    )
    if call.dropout:
        weights = torch.nn.functional.dropout(weights, call.dropout)
    out = average(weights, call.spec.values(call.v, call.params).to(weights.dtype))
    return out.to(call.q.dtype), weights.to(call.q.dtype)
