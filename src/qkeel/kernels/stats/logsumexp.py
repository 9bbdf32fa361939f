"""Statistics from row logsumexps: bounds on the largest logit for nothing, the maximum and the entropy for little."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from qkeel.functional.statistics.logit_stats import LogitBracket
from qkeel.functional.statistics.rows import KernelRows
from qkeel.kernels.encode import folded
from qkeel.kernels.native import logit_pass
from qkeel.kernels.prepare import lse_bounds, row_statistics, sampled_numbers
from qkeel.kernels.stats.per_head import logit_stats, stats_of_rows
from qkeel.patching.private_operators import cudnn, flash, flash_on_cpu, kernel_choice, memory_efficient
from qkeel.spec.call import AttentionCall
from qkeel.spec.shapes import Outputs, PerRow

Price = Literal["bracket", "max", "entropy", "entropy:sample=16", "entropy:sample=32"]

GUIDED_ROWS = 4  # rows per sequence and head whose logits are computed to find, and certify, the maximum


def sample_rate(wanted: str) -> int:
    """One of how many rows is to be in the sample for the entropy; 0 for all of them."""
    return int(wanted.partition("sample=")[2] or 0)


def attend_with_logsumexp(call: AttentionCall) -> tuple[Outputs, PerRow] | None:
    """Returns out [b h t d] and lse [b h t] of one fused call, or None where torch does not hand the logsumexp out.

    torch's fused kernels compute it anyway and return it from the operators below SDPA; the output and its gradients
    are those of SDPA, the logsumexp has none. On a GPU it is the operator that SDPA itself would choose.
    """
    if _no_fused_call(call):
        return None
    q, k, v, scale = folded(call)
    if call.q.device.type == "cpu":
        return flash_on_cpu(q, k, v, 0.0, call.causal, scale=scale)
    return fused_with_logsumexp(q, k, v, call.causal, scale)


def no_logsumexp(call: AttentionCall) -> str:
    """Returns why `attend_with_logsumexp` returns None for a call."""
    return _no_fused_call(call) or "the operator that torch chooses for this call on a GPU hands out no logsumexp"


def _no_fused_call(call: AttentionCall) -> str:
    device = call.q.device.type
    if device not in ("cpu", "cuda"):
        return f"on {device} torch hands out no logsumexp"
    if call.dropout or not call.whole:
        return (
            "torch hands out no logsumexp with dropout, a mask, a window, packed sequences, or fewer causal queries "
            "than keys"
        )
    if device == "cuda" and torch.compiler.is_compiling():
        return "torch.compile does not see through the choice of the fused operator"
    if call.v.shape[-1] != call.q.shape[-1]:
        return "torch's fused operators take values as wide as the queries only"
    return ""


@torch.no_grad()
def exact_bracket(call: AttentionCall, why: str, price: Price = "entropy") -> LogitBracket:
    """The exact largest logit and the entropy of each head by a pass of their own, where no logsumexp is had."""
    heads = sampled_numbers(call, rate) if (rate := sample_rate(price)) else None
    if heads is not None:
        note = f"by one pass over q and k, the entropies by a sample of rows: {why}"
        return LogitBracket.exact(heads.largest, heads.entropy, note, heads.error)
    rows = row_statistics(call)
    if rows is None:
        exact = logit_stats(call)
        return LogitBracket.exact(exact.max_logit, exact.entropy, f"by the full pass over all logits: {why}")
    found = stats_of_rows(call, KernelRows(rows.largest, rows.lse, rows.entropy))
    return LogitBracket.exact(found.max_logit, found.entropy, f"by one pass over q and k: {why}")


def fused_with_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor] | None:
    """Returns out and lse of the fused operator that SDPA would choose on a GPU; None where it would choose none."""
    if q.shape[-1] % 8 or v.shape[-1] % 8:  # SDPA would pad such heads
        return None
    gqa = q.shape[1] != k.shape[1]
    chosen = kernel_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=gqa)
    fused = _FUSED.get(SDPBackend(chosen))
    if fused is None:
        return None
    operator, between = fused
    out, lse = operator(q, k, v, *between, causal, scale=scale)[:2]
    if lse.ndim == 4:  # cuDNN's [b h t 1]
        lse = lse[..., 0]
    return out, lse[..., : q.shape[2]]  # the memory-efficient kernel fills up to a multiple of 32 rows


# The operator of each choice, and what it takes between v and causality: the dropout; or a bias, that the logsumexp is
# wanted, and the dropout.
_FUSED: dict[SDPBackend, tuple[Callable[..., Any], tuple[object, ...]]] = {
    SDPBackend.FLASH_ATTENTION: (flash, (0.0,)),
    SDPBackend.EFFICIENT_ATTENTION: (memory_efficient, (None, True, 0.0)),
    SDPBackend.CUDNN_ATTENTION: (cudnn, (None, True, 0.0)),
}


def bracket(call: AttentionCall, lse: PerRow, price: Price) -> LogitBracket:
    """Bounds on the largest logit per head from lse [b h t].

    lse_i - ln n_i <= max_j z_ij <= lse_i, n_i the keys row i sees. At the price "max" the maximum itself is looked for
    in the rows of largest lse: if it is at least the next largest lse, no other row can beat it. At the price
    "entropy" also H_i = lse_i - E_p[z_i], E_p[z_i] from attention with keys in place of values; then
    lse_i - H_i <= max_j z_ij. The entropy cancels at large logits: its error is about 1e-7 · lse in float32, ten times
    that in sum; on a GPU a pass of its own gives maximum and entropy at that price, without cancelling, and with a
    sample of rows the entropy of those, the maximum from the tiles of rows that the logsumexps do not rule out. Rows
    that the call's `query_mask` leaves out count nowhere.
    """
    if price == "bracket":
        ends = logit_pass.bracket_of(lse.detach(), call)
        if ends is None:
            ends = lse_bounds(call, lse.detach())
        if ends is not None:
            return LogitBracket(lower=ends[0], upper=ends[1])
    heads = sampled_numbers(call, rate, lse.detach()) if (rate := sample_rate(price)) else None
    if heads is not None:
        return LogitBracket.exact(heads.largest, heads.entropy, entropy_error=heads.error)
    return _bracket(call, lse, price)


@torch.no_grad()
def _bracket(call: AttentionCall, lse: Tensor, price: Price) -> LogitBracket:
    out = None if call.query_mask is None else ~call.query_mask[:, None]
    if out is not None:
        lse = lse.masked_fill(out, -torch.inf)
    best = lse.amax(0)  # row i sees as many keys in every sequence
    n = (call.pos_q[0] + 1).to(lse.dtype).log() if call.causal else math.log(call.k.shape[2])
    lower, upper = (best - n).amax(-1), best.amax(-1)
    if price == "bracket":
        return LogitBracket(lower=lower, upper=upper)
    wants_entropy = price != "max"
    n_rows = lse[:, 0].numel() if call.query_mask is None else call.query_mask.sum().clamp_min(1)
    rows = row_statistics(call) if wants_entropy else None
    if rows is not None:
        top, entropy = rows.largest.amax((0, 2)), rows.entropy.sum((0, 2)) / n_rows
        return LogitBracket.exact(top, entropy)
    q, k, _, scale = folded(call)
    entropy = None
    if wants_entropy:
        entropies = _entropies(call, lse)
        entropies = entropies if out is None else entropies.masked_fill(out, 0.0)
        lower = torch.maximum(lower, (lse - entropies).amax((0, 2)))
        entropy = entropies.sum((0, 2)) / n_rows
    found, bar = _guided(q, k, lse, scale, call)
    certified = (found >= bar) & found.isfinite()
    return LogitBracket(
        lower=torch.where(certified, found, torch.maximum(lower, found)),
        upper=torch.where(certified, found, upper),
        entropy=entropy,
        certified=certified,
    )


def _entropies(call: AttentionCall, lse: Tensor) -> Tensor:
    """H [b h t] of every row."""
    q, k, _, scale = folded(call)
    mean_key = torch.nn.functional.scaled_dot_product_attention(
        q, k, k, is_causal=call.causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    mean = torch.linalg.vecdot(q.to(lse.dtype), mean_key.to(lse.dtype))
    return (lse - scale * mean).clamp_min(0)


def _guided(q: Tensor, k: Tensor, lse: Tensor, scale: float, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The largest logit of the rows with the largest lse, some of each sequence, and the largest lse of all others.

    Both per head. k [b g s d] is read once, as a whole: picking keys for rows of a few sequences costs more.
    """
    if lse.dtype == torch.float32 and logit_pass.holds(q, k) and logit_pass.ready():
        found, others = torch.ops.qkeel_native.guided_maxima(q, k, lse, scale, call.causal, GUIDED_ROWS)
        return found.amax(0), others.amax(0)
    b, h, t, d = q.shape
    m = min(GUIDED_ROWS, t)
    top = lse.topk(min(m + 1, t), dim=-1)
    row = top.indices[..., :m]
    rows = q.gather(2, row[..., None].expand(b, h, m, d)).to(lse.dtype) * scale
    groups = rows.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # the rows of all heads that share a key head
    # Copied here: matmul would copy the transpose, which takes six times as long.
    logits = (groups @ k.to(lse.dtype).contiguous().mT).view(b, h, m, -1)
    if call.causal:
        logits.masked_fill_(torch.arange(k.shape[2], device=q.device) > row[..., None], -torch.inf)
    logits.masked_fill_((top.values[..., :m] == -torch.inf)[..., None], -torch.inf)  # rows left out
    others = top.values[..., m] if t > m else torch.full_like(top.values[..., 0], -torch.inf)
    return logits.amax((0, 2, 3)), others.amax(0)
