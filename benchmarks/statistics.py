"""What `stats=` costs on top of attention: ratios to SDPA forward+backward.

python -m benchmarks.statistics: statistics alone, relative to it, in C++ and in torch.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import qkeel
from benchmarks.measure import Bench, Case, Cases, by_native, restored
from qkeel.functional.class_statistics import TokenClasses
from qkeel.kernels.logits import compiled as logit_pass
from qkeel.kernels.statistics import logit_change, logit_stats, max_stats
from qkeel.spec.call import make_call

BASE = "SDPA forward + backward"
SPEC = qkeel.AttentionSpec()


Shape = tuple[int, int, int, int]  # batch, heads, tokens, head_dim; causal, float32


def inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor, torch.Generator]:
    """Returns q, k, v, a gradient of the output, and the generator that made them."""
    b, h, t, d = shape
    rng = torch.Generator().manual_seed(0)
    q, k, v = (
        (2 * torch.randn(b, t, h, d, generator=rng)).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    return q, k, v, torch.randn(b, h, t, d, generator=rng), rng


def plain(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> None:
    """Runs SDPA forward and backward."""
    scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)


@torch.no_grad()
def full_matrix(q: Tensor, k: Tensor) -> object:
    """Returns the maximum and the entropy of each head by the whole matrix of logits."""
    t, d = q.shape[2:]
    z = (q @ k.mT * d**-0.5).masked_fill(
        torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf
    )
    return z.amax((0, 2, 3)), torch.special.entr(z.softmax(-1)).sum(-1).mean((0, 2))


def cases_with_attention(shape: Shape) -> Cases:
    """Returns attention forward and backward with each kind of statistics, and the statistics alone."""
    (b, _, t, _), (q, k, v, gradient, generator) = shape, inputs(shape)

    def ours(stats: bool | str) -> Case:
        def run() -> None:
            out = qkeel.attention(q, k, v, spec=SPEC, stats=stats)  # type: ignore[call-overload]
            (out[0] if stats else out).backward(gradient)

        return run

    def with_full_matrix() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        full_matrix(q, k)
        out.backward(gradient)

    call = make_call(SPEC, q, k, v)
    moved = make_call(SPEC, q.detach() * 1.001, k.detach() * 1.001, v)
    # One class after the other, alike in all sequences, as images before text; or anywhere.
    blocks, anywhere = (
        torch.arange(t)[None] * 2 // t,
        torch.randint(0, 2, (b, t), generator=generator),
    )
    by_class = [
        dataclasses.replace(
            call, classes=TokenClasses(names=("text", "image"), query=of, key=of)
        )
        for of in (blocks, anywhere)
    ]
    return {
        BASE: lambda: plain(q, k, v, gradient),
        "qkeel, no statistics": ours(False),
        "qkeel, exact maximum": ours("max"),
        "qkeel, exact LogitStats, O(T) memory": ours(True),
        "SDPA + the full matrix (maximum, entropy)": with_full_matrix,
        "alone: exact LogitStats": lambda: logit_stats(call),
        "alone: exact LogitStats, by two classes in blocks": lambda: logit_stats(
            by_class[0]
        ),
        "alone: exact LogitStats, by two classes anywhere": lambda: logit_stats(
            by_class[1]
        ),
        "alone: maxima only": lambda: max_stats(call),
        "alone: change of logits": lambda: logit_change(call, moved),
    }


def cases_alone(shape: Shape) -> Cases:
    """Returns SDPA forward and backward, and the statistics of that call alone, in C++ and in torch."""
    (b, _, t, _), (q, k, v, gradient, _) = shape, inputs(shape)
    call = make_call(SPEC, q, k, v)
    padded = make_call(
        SPEC, q, k, v, mask=torch.arange(t)[None] >= torch.arange(b)[:, None]
    )
    compiled = restored("QKEEL_NATIVE", logit_pass.ready, "1")
    cases: Cases = {BASE: lambda: plain(q, k, v, gradient)}
    for name, act in {
        "exact LogitStats": lambda: logit_stats(call),
        "exact LogitStats under a padding mask": lambda: logit_stats(padded),
        "maxima only": lambda: max_stats(call),
    }.items():
        if compiled:
            cases[f"{name}, C++"] = by_native("1", act)
        cases[f"{name}, torch"] = by_native("0", act)
    return {**cases, "the full matrix (maximum, entropy)": lambda: full_matrix(q, k)}


def main(arguments: list[str] | None = None) -> None:
    """Prints the statistics alone."""
    bench = Bench("statistics", __doc__, arguments, rounds=7)
    for shape in (
        [(1, 2, 40, 16)]
        if bench.toy
        else [(4, 8, 512, 64), (2, 8, 2048, 64), (1, 32, 1024, 64), (1, 16, 1024, 128)]
    ):
        bench.table(
            f"statistics alone, batch heads tokens dim = {shape}, causal, float32",
            cases_alone(shape),
        )


if __name__ == "__main__":
    main()
