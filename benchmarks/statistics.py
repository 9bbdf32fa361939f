"""What `stats=` costs on top of attention: ratios to SDPA forward+backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import qkeel
from benchmarks.measure import Row, interleave

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

    cases = {
        BASE: plain,
        "qkeel, no statistics": ours(False),
        "qkeel, bracket from the logsumexp": ours("bracket"),
        "qkeel, entropy + certified maximum": ours("entropy"),
        "qkeel, exact LogitStats, O(T) memory": ours(True),
        "SDPA + the full matrix (maximum, entropy)": full_matrix,
    }
    return interleave(cases, BASE, rounds)
