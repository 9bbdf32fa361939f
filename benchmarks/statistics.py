"""What `stats=` costs on top of attention: ratios to SDPA forward+backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import qkeel
from benchmarks.measure import Row, interleave
from qkeel.functional.classes import TokenClasses
from qkeel.kernels.statistics import logit_change, logit_maxima, logit_stats, sampled_stats
from qkeel.spec.call import make_call

BASE = "SDPA forward + backward"
SPEC = qkeel.AttentionSpec()


def bench(shape: tuple[int, int, int, int], rounds: int) -> list[Row]:
    """shape = batch, heads, tokens, head_dim; causal, float32."""
    b, h, t, d = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v = ((2 * torch.randn(b, t, h, d, generator=generator)).transpose(1, 2).requires_grad_() for _ in range(3))
    gradient = torch.randn(b, h, t, d, generator=generator)

    def plain() -> None:
        scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)

    def ours(stats: bool | str) -> Callable[[], None]:
        def call() -> None:
            out = qkeel.attention(q, k, v, spec=SPEC, stats=stats)  # type: ignore[call-overload]
            (out[0] if stats else out).backward(gradient)

        return call

    def full_matrix() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        with torch.no_grad():
            z = (q @ k.mT * d**-0.5).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
            p = z.softmax(-1)
            z.amax((0, 2, 3)), torch.special.entr(p).sum(-1).mean((0, 2))
        out.backward(gradient)

    call = make_call(SPEC, q, k, v)
    moved = make_call(SPEC, q.detach() * 1.001, k.detach() * 1.001, v)
    # One class after the other, alike in all sequences, as images before text; or anywhere.
    blocks, anywhere = torch.arange(t)[None] * 2 // t, torch.randint(0, 2, (b, t), generator=generator)
    by_class = [
        dataclasses.replace(call, classes=TokenClasses(names=("text", "image"), query=of, key=of))
        for of in (blocks, anywhere)
    ]
    rng = torch.Generator()
    sampled = min(64, t)
    cases = {
        BASE: plain,
        "qkeel, no statistics": ours(False),
        "qkeel, bracket from the logsumexp": ours("bracket"),
        "qkeel, certified maximum": ours("max"),
        "qkeel, entropy + certified maximum": ours("entropy"),
        "qkeel, exact LogitStats, O(T) memory": ours(True),
        "SDPA + the full matrix (maximum, entropy)": full_matrix,
        "alone: exact LogitStats": lambda: logit_stats(call),
        "alone: exact LogitStats, by two classes in blocks": lambda: logit_stats(by_class[0]),
        "alone: exact LogitStats, by two classes anywhere": lambda: logit_stats(by_class[1]),
        "alone: maxima only": lambda: logit_maxima(call),
        f"alone: estimate from {sampled} queries": lambda: sampled_stats(call, sampled, generator=rng),
        "alone: change of logits, all pairs": lambda: logit_change(call, moved),
        f"alone: change of logits, {sampled} queries": lambda: logit_change(
            call, moved, n_queries=sampled, generator=rng
        ),
    }
    return interleave(cases, BASE, rounds)
