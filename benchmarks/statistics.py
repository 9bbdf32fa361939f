"""What `stats=` costs on top of attention: ratios to SDPA forward+backward.

python -m benchmarks.statistics: statistics alone, beside it, in C++ and in torch.
"""

from __future__ import annotations

from benchmarks.measure import settle

if __name__ == "__main__":
    settle(module="benchmarks.statistics")  # before torch: the allocator reads its settings when the process starts

import argparse
import dataclasses
import os
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import qkeel
from benchmarks.measure import Row, interleave, show
from qkeel.functional.classes import TokenClasses
from qkeel.kernels.logsumexp import attend_with_logsumexp, bracket
from qkeel.kernels.native import logit_pass
from qkeel.kernels.statistics import logit_change, logit_maxima, logit_stats, sampled_stats
from qkeel.spec.call import make_call

BASE, BRACKET = "SDPA forward + backward", "bracket from the logsumexp"
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


def alone(shape: tuple[int, int, int, int], rounds: int) -> list[Row]:
    """Statistics of one call beside SDPA forward and backward of it, in C++ and in torch; as in `bench`."""
    b, h, t, d = shape
    generator = torch.Generator().manual_seed(0)
    q, k, v = ((2 * torch.randn(b, t, h, d, generator=generator)).transpose(1, 2).requires_grad_() for _ in range(3))
    gradient = torch.randn(b, h, t, d, generator=generator)
    call = make_call(SPEC, q, k, v)
    padded = make_call(SPEC, q, k, v, mask=torch.arange(t)[None] >= torch.arange(b)[:, None])
    pair = attend_with_logsumexp(call)
    assert pair is not None

    def plain() -> None:
        scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)

    def full_matrix() -> None:
        with torch.no_grad():
            z = (q @ k.mT * d**-0.5).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
            p = z.softmax(-1)
            z.amax((0, 2, 3)), torch.special.entr(p).sum(-1).mean((0, 2))

    def by(native: str, act: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            os.environ["QKEEL_NATIVE"] = native
            act()

        return run

    cases: dict[str, Callable[[], object]] = {
        BASE: plain,
        BRACKET: by("1", lambda: bracket(call, pair[1], "bracket")),
        "certified maximum, C++": by("1", lambda: bracket(call, pair[1], "max")),
        "certified maximum, torch": by("0", lambda: bracket(call, pair[1], "max")),
        "exact LogitStats, C++": by("1", lambda: logit_stats(call)),
        "exact LogitStats, torch": by("0", lambda: logit_stats(call)),
        "exact LogitStats under a padding mask, C++": by("1", lambda: logit_stats(padded)),
        "exact LogitStats under a padding mask, torch": by("0", lambda: logit_stats(padded)),
        "maxima only, C++": by("1", lambda: logit_maxima(call)),
        "maxima only, torch": by("0", lambda: logit_maxima(call)),
        "the full matrix (maximum, entropy)": full_matrix,
    }
    before = os.environ.get("QKEEL_NATIVE")
    os.environ["QKEEL_NATIVE"] = "1"
    try:
        compiled = logit_pass.ready()
        return interleave(cases if compiled else {n: c for n, c in cases.items() if "C++" not in n}, BASE, rounds)
    finally:
        os.environ.pop("QKEEL_NATIVE") if before is None else os.environ.update(QKEEL_NATIVE=before)


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.statistics", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a tiny size, two rounds: only to see that it runs")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = [(1, 2, 40, 16)] if args.toy else [(4, 8, 512, 64), (2, 8, 2048, 64), (1, 32, 1024, 64), (1, 16, 1024, 128)]
    for shape in sizes:
        rows = alone(shape, 2 if args.toy else args.rounds)
        show(f"statistics alone, batch heads tokens dim = {shape}, causal, float32", rows, BASE)
        print(f"  {BRACKET}: {100 * next(row.ratio for row in rows if row.name == BRACKET):.3f} %")


if __name__ == "__main__":
    main()
