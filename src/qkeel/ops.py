"""qkeel.attention: one entry to every kernel, with statistics on demand."""

from __future__ import annotations

import functools
import logging
from typing import Literal, overload

import torch
from torch import Tensor

from qkeel.errors import RefusedError
from qkeel.functional.rows import KernelRows
from qkeel.functional.stats import LogitBracket, LogitStats
from qkeel.kernels.choice import Question, Statistics, Steps, ordered, question, steps
from qkeel.kernels.choice.stored import switched_off
from qkeel.kernels.chunked import Chunked
from qkeel.kernels.contract import Kernel, average
from qkeel.kernels.logsumexp import Price, attend_with_logsumexp, bracket
from qkeel.kernels.native.decode import Decode
from qkeel.kernels.native.kernel import Native
from qkeel.kernels.sdpa import Sdpa
from qkeel.kernels.statistics import logit_stats
from qkeel.kernels.windowed import Windowed
from qkeel.registry import lookup
from qkeel.spec.attention import AttentionSpec
from qkeel.spec.call import AttentionCall, make_call
from qkeel.spec.slot import Params

# In the order "auto" tries them where nothing is measured: the fastest first; the last takes everything.
KERNELS: dict[str, Kernel] = {
    "decode": Decode(),
    "native": Native(),
    "sdpa": Sdpa(),
    "windowed": Windowed(),
    "chunked": Chunked(),
}
_LOG = logging.getLogger("qkeel")
# What `stats` may say beside True.
PRICES: dict[str, Price] = {"bracket": "bracket", "max": "max", "entropy": "entropy"}


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    params: Params | None = ...,
    causal: bool = ...,
    mask: Tensor | None = ...,
    pos_q: Tensor | None = ...,
    pos_k: Tensor | None = ...,
    dropout: float = ...,
    impl: str = ...,
    stats: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    params: Params | None = ...,
    causal: bool = ...,
    mask: Tensor | None = ...,
    pos_q: Tensor | None = ...,
    pos_k: Tensor | None = ...,
    dropout: float = ...,
    impl: str = ...,
    stats: Literal[True],
) -> tuple[Tensor, LogitStats]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    params: Params | None = ...,
    causal: bool = ...,
    mask: Tensor | None = ...,
    pos_q: Tensor | None = ...,
    pos_k: Tensor | None = ...,
    dropout: float = ...,
    impl: str = ...,
    stats: Price,
) -> tuple[Tensor, LogitBracket]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    params: Params | None = None,
    causal: bool = True,
    mask: Tensor | None = None,
    pos_q: Tensor | None = None,
    pos_k: Tensor | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
    stats: bool | Price = False,
) -> Tensor | tuple[Tensor, LogitStats] | tuple[Tensor, LogitBracket]:
    """Attention of raw (unnormed, unrotated) q, k, v under `spec`; formula: `spec.explain()`.

    Args:
        q: queries [b h t d]. k, v: keys and values [b g s d], [b g s d']; h a multiple of g.
        spec: what attention computes. params: the tensors it needs (`spec.init_params`), if any.
        causal: a query sees keys at its position or before.
        mask: boolean (True = may attend) or additive, broadcast to [b h t s], or a padding mask [b s].
        pos_q, pos_k: positions [b t], [b s]; default 0 .. s-1, queries aligned to the end of the keys.
        dropout: probability of dropping a weight. Statistics are taken before it.
        impl: "auto", or a kernel's name; a named kernel refuses what it cannot do exactly.
        stats: True also returns LogitStats, exact, without a T×T matrix, detached. "bracket" returns bounds on
            the largest logit (LogitBracket), free where the kernel hands out the logsumexp; "max" adds, for most
            heads with logits over 12 to 20, the certified maximum, "entropy" that and the entropy. Where no
            logsumexp is to be had, all fall back to the exact statistics, so the bracket closes.

    Returns:
        out [b h t d'] in q's dtype; with `stats`, (out, LogitStats) or (out, LogitBracket).

    Raises:
        ShapeError, InvalidTypeError, InvalidValueError, UnknownNameError: bad input. RefusedError: see impl.
    """
    call = make_call(spec, q, k, v, params=params, causal=causal, mask=mask, pos_q=pos_q, pos_k=pos_k, dropout=dropout)
    if isinstance(stats, str):
        return _bracketed(call, impl, lookup("statistics", PRICES, stats))
    out = choose(call, impl, "exact" if stats else "none")(call)
    return (out, logit_stats(call)) if stats else out


def _bracketed(call: AttentionCall, impl: str, price: Price) -> tuple[Tensor, LogitBracket]:
    kernel = choose(call, impl, "bracket")
    if isinstance(kernel, Native):
        return kernel.bracketed(call)
    pair = attend_with_logsumexp(call) if isinstance(kernel, Sdpa) else None
    if pair is not None:
        return pair[0], bracket(call, pair[1], price)
    exact = logit_stats(call)
    sure = torch.ones_like(exact.max_logit, dtype=torch.bool)
    top = exact.max_logit
    return kernel(call), LogitBracket(lower=top, upper=top, entropy=exact.entropy, certified=sure)


def run(call: AttentionCall, impl: str = "auto") -> Tensor:
    """A checked call through the kernel of that name."""
    return choose(call, impl)(call)


def run_with_rows(call: AttentionCall, impl: str = "auto") -> tuple[Tensor, KernelRows] | None:
    """As `run`, with what the kernel finds of each row on its way; None, and nothing run, where it finds nothing."""
    kernel = choose(call, impl)
    return kernel.with_rows(call) if isinstance(kernel, Native) else None


def run_with_weights(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """A checked call written out, T×T: out [b h t d'] and the weights [b h t s], after dropout, in q's dtype."""
    rows, keys = slice(0, call.q.shape[2]), slice(0, call.k.shape[2])
    logits = call.spec.cap.apply(call.scores(*call.encoded(), rows, keys))
    weights = call.spec.normalizer.weights(logits, call.visible(rows, keys), call.params)
    if call.dropout:
        weights = torch.nn.functional.dropout(weights, call.dropout)
    out = average(weights, call.spec.values(call.v, call.params).to(weights.dtype))
    return out.to(call.q.dtype), weights.to(call.q.dtype)


def choose(call: AttentionCall, impl: str, statistics: Statistics = "none") -> Kernel:
    """The kernel for a call: the named one, or for "auto" the fastest of those that support it, as far as measured."""
    if impl == "auto":
        return _fastest(call, statistics)
    kernel = lookup("kernel", {**KERNELS}, impl)
    refusal = kernel.supports(call)
    if refusal is not None:
        raise RefusedError(f"kernel {impl!r} cannot do this: {refusal}")
    return kernel


def _fastest(call: AttentionCall, statistics: Statistics) -> Kernel:
    # Under dropout a forward pass without gradients and its recomputation must drop alike: one order for both. What is
    # exported is for every length and machine.
    if call.dropout or torch.compiler.is_exporting():
        return next(kernel for kernel in KERNELS.values() if kernel.supports(call) is None)
    asked, tokens = question(call, statistics)
    orders = _orders(asked)
    names = orders[-1][1]
    if len(orders) > 1:
        names = next((names for most, names in orders if most is not None and tokens <= most), names)
    for name in names:
        kernel = KERNELS[name]
        if kernel.supports(call) is None:
            _tell(asked, name)
            return kernel
    raise AssertionError("the last kernel takes everything")


def _orders(asked: Question) -> Steps:
    return _orders_once(asked)


@functools.cache
def _orders_once(asked: Question) -> Steps:
    """Every kernel in the order to try, up to each number of query tokens; the last for any number."""
    known = () if switched_off() else steps(asked)
    return tuple((most, ordered(names, tuple(KERNELS))) for most, names in known or ((None, ()),))


def _tell(asked: Question, name: str) -> None:
    if _LOG.isEnabledFor(logging.INFO):
        _tell_once(asked, name)


@functools.cache
def _tell_once(asked: Question, name: str) -> None:
    device, dtype, head_dim, form, gradient, statistics = asked
    size = f"head_dim {'≤' if head_dim <= 64 else '>'} 64"
    what = f"{form} attention, {str(dtype).removeprefix('torch.')}, {size}, {'with' if gradient else 'no'} gradient"
    _LOG.info("kernel %s for %s, statistics %s, on %s", name, what, statistics, device)


# What torch.compiler.assume_constant_result sets: a compiler takes the tables as they are when it traces.
_orders._dynamo_marked_constant = True  # type: ignore[attr-defined]
_tell._dynamo_marked_constant = True  # type: ignore[attr-defined]
