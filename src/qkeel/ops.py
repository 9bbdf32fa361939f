"""qkeel.attention: one entry point to every kernel, with statistics on request."""

from __future__ import annotations

from typing import Literal, get_args, overload

import torch
from torch import Tensor

from qkeel.functional.statistics import KernelRows, LogitBracket, LogitStats
from qkeel.kernels.choose import KERNELS as KERNELS
from qkeel.kernels.choose import choose
from qkeel.kernels.compiled_attention import Native
from qkeel.kernels.contract import average
from qkeel.kernels.statistics import (
    StatsLevel,
    attend_with_logsumexp,
    bracket,
    exact_bracket,
    logit_stats,
    no_logsumexp,
)
from qkeel.kernels.torch_kernels import Flex, Sdpa
from qkeel.options import lookup
from qkeel.spec.attention import AttentionSpec
from qkeel.spec.call import AttentionCall, CuSeqlens, band_call, make_call
from qkeel.spec.slot import AttentionMask, KeyPositions, Keys, Logits, Outputs, Params, Queries, QueryPositions, Values

# The values of `stats` other than True.
PRICES: dict[str, StatsLevel] = {price: price for price in get_args(StatsLevel)}


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
    stats: Literal[True],
) -> tuple[Outputs, LogitStats]: ...
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
    stats: StatsLevel,
) -> tuple[Outputs, LogitBracket]: ...
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
    stats: bool | StatsLevel = False,
) -> Outputs | tuple[Outputs, LogitStats] | tuple[Outputs, LogitBracket]:
    """Computes the attention that `spec` describes for raw (unnormed, unrotated) q, k, v; see `spec.explain()` for the
    formula.

    >>> from qkeel.spec import preset
    >>> q = torch.ones(1, 2, 3, 4)
    >>> out, found = attention(q, q, q, spec=preset("baseline"), stats=True)
    >>> found.max_logit.tolist()
    [2.0, 2.0]

    Args:
        q: the queries [b h t d]. k, v: the keys [b g s d] and values [b g s d'], where h is a multiple of g.
        spec: what attention computes. params: the tensors that the spec needs, if any (see `spec.init_params`).
        causal: whether a query sees only keys at or before its own position.
        mask: a boolean (True = may attend) or additive mask, broadcast to [b h t s], or a padding mask [b s].
        pos_q, pos_k: the positions [b t] and [b s]; by default 0 .. s-1, with the queries aligned to the end of the
            keys.
        cu_seqlens: the start of each sequence packed into q, k, v with b = 1, and the end of the last sequence, as an
            int tensor [n + 1], or a pair of such tensors for queries and keys. Each sequence attends only to itself,
            and its positions start at 0.
        dropout: the probability of dropping a weight. Statistics are computed before dropout.
        impl: "auto", or the name of a kernel, which refuses calls that it cannot compute exactly.
        stats: True also returns LogitStats, which are exact, detached, and computed without a T×T matrix. Other values
            return a LogitBracket. "bracket": bounds on the largest logit, at no cost if the kernel returns the
            logsumexp. "max": also the certified maximum, for most heads with logits above 12 to 20. "entropy": also the
            entropy. "entropy:sample=16" or 32, on a GPU: exact maxima, and the entropy of every 16th or 32nd row with
            its error. If no logsumexp is available, exact values are computed in a separate pass, and LogitBracket.note
            says why.

    Returns:
        out [b h t d'] in q's dtype; with `stats`, (out, LogitStats) or (out, LogitBracket).

    Raises:
        ShapeError, InvalidTypeError, InvalidValueError, UnknownNameError: invalid input. RefusedError: see `impl`.
    """
    call = make_call(spec, q, k, v, params=params, causal=causal, mask=mask, pos_q=pos_q, pos_k=pos_k, dropout=dropout)
    call = band_call(call, cu_seqlens=cu_seqlens)
    if isinstance(stats, str):
        return _bracketed(call, impl, lookup("statistics", PRICES, stats))
    out = choose(call, impl)(call)
    return (out, logit_stats(call)) if stats else out


def _bracketed(call: AttentionCall, impl: str, price: StatsLevel) -> tuple[Tensor, LogitBracket]:
    kernel = choose(call, impl)
    if isinstance(kernel, Native):
        return kernel.bracketed(call)
    if isinstance(kernel, Flex) and price in ("bracket", "max") and call.spec.cap.limit is None:
        out, _, largest = kernel.with_maxima(call)
        return out, LogitBracket.exact(largest.amax((0, 2)), None)
    pair = attend_with_logsumexp(call) if isinstance(kernel, Sdpa) else None
    if pair is not None:
        return pair[0], bracket(call, pair[1], price)
    why = no_logsumexp(call) if isinstance(kernel, Sdpa) else "the kernel for this call returns no logsumexp"
    return kernel(call), exact_bracket(call, why, price)


def run(call: AttentionCall, impl: str = "auto") -> Outputs:
    """Runs a checked call with the kernel of the given name."""
    return choose(call, impl)(call)


def run_with_rows(call: AttentionCall, impl: str = "auto") -> tuple[Outputs, KernelRows] | None:
    """Like `run`, but also returns the row statistics that the kernel computes in its pass; returns None, without
    running the kernel, if it does not compute any."""
    kernel = choose(call, impl)
    return kernel.with_rows(call) if isinstance(kernel, Native) else None


def run_with_weights(call: AttentionCall) -> tuple[Outputs, Logits]:
    """Computes a checked call with explicit T×T matrices; returns out [b h t d'] and the weights [b h t s] after
    dropout, in q's dtype."""
    rows, keys = slice(0, call.q.shape[2]), slice(0, call.k.shape[2])
    logits = call.spec.cap.apply(call.scores(*call.encoded(), rows, keys))
    weights = call.spec.normalizer.weights(logits, call.visible(rows, keys), call.params)
    if call.dropout:
        weights = torch.nn.functional.dropout(weights, call.dropout)
    out = average(weights, call.spec.values(call.v, call.params).to(weights.dtype))
    return out.to(call.q.dtype), weights.to(call.q.dtype)
