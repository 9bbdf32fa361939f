"""The compiled attention against torch's, and its statistics against none.

`python -m benchmarks.attention` prints, for each shape, forward, backward, and both; next to each backward its GFLOP/s
(five products over the visible half) and those of torch.mm. --toy only shows that it runs. Attention modules are in
`python -m benchmarks.modules`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.measure import Bench, BenchRow, Case, Cases, between, take_turns
from benchmarks.native import Shape
from qkeel.kernels.attention import compiled as operator

# batch, tokens, query heads, key heads, head_dim
SHAPES: list[Shape] = [
    (64, 32, 8, 8, 64),
    (16, 128, 8, 8, 64),
    (4, 512, 8, 8, 64),
    (2, 2048, 8, 8, 64),
    (1, 1024, 32, 32, 64),
    (1, 1024, 16, 4, 128),
]
TORCH, OWN, COUNTED = "torch SDPA", "qkeel", "qkeel, largest logit and entropy"


class Calls:
    """Causal attention of one shape, laid out as a projection does, by every way."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        b, t, h, g, d = shape
        self.q, self.k, self.v, self.above = (
            torch.randn(b, t, heads, d).to(dtype).transpose(1, 2).requires_grad_(i < 3)
            for i, heads in enumerate((h, g, g, h))
        )
        self.scale = d**-0.5
        self.ways: dict[str, Callable[[], Tensor]] = {
            TORCH: lambda: sdpa(
                self.q, self.k, self.v, is_causal=True, enable_gqa=g != h
            ),
            OWN: lambda: self.own(False)[0],
            COUNTED: lambda: self.own(True)[0],
        }

    def own(self, stats: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        how = (self.scale, True, 0, 0.0, stats)
        return torch.ops.qkeel_native.attention(
            self.q, self.k, self.v, None, None, *how
        )

    def both(self, way: Callable[[], Tensor]) -> Case:
        return lambda: torch.autograd.grad(way(), [self.q, self.k, self.v], self.above)

    def backward(self) -> Cases:
        """Returns torch's derivative and qkeel's of the same call."""
        with torch.no_grad():
            out, lse, _, _ = self.own(False)
        given = [x.detach() for x in (self.above, self.q, self.k, self.v, out, lse)]
        theirs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        mine = torch.ops.qkeel_native.attention_backward
        return {
            TORCH: lambda: theirs(*given, 0.0, True, scale=self.scale),
            OWN: lambda: mine(*given, None, None, self.scale, True, 0, 0.0),
        }


def attention_cases(shape: Shape, dtype: torch.dtype) -> dict[str, Cases]:
    """Returns forward, backward and both of every way."""
    calls = Calls(shape, dtype)
    return {
        "forward": {name: torch.no_grad()(way) for name, way in calls.ways.items()},
        "backward": calls.backward(),
        "forward + backward": {
            name: calls.both(way) for name, way in calls.ways.items()
        },
    }


def flops(shape: Shape) -> float:
    """Returns those of one backward pass: S, dP, dV, dQ, dK of the visible pairs."""
    b, t, h, _, d = shape
    return 5 * 2 * b * h * d * t * (t + 1) / 2


def speed_of_mm(rounds: int) -> float:
    """Returns the GFLOP/s of torch.mm where it is at its best."""
    x, y = torch.randn(512, 512), torch.randn(512, 512)
    (row,) = take_turns({"mm": lambda: torch.mm(x, y)}, rounds, calls=10)
    return 2 * 512**3 / min(row.times) / 1e6


def show_price(title: str, rows: list[BenchRow], without: str, with_: str) -> None:
    """Prints what statistics add."""
    least = {row.name: min(row.times) for row in rows}
    extra, of_least = (
        between(rows, with_, without) - 1,
        least[with_] / least[without] - 1,
    )
    print(
        f"  statistics add {100 * extra:+.2f} % to {title} (minima: {100 * of_least:+.2f} %)"
    )


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    bench = Bench(
        "attention", __doc__, arguments,
        needs=[operator.ready],
        flags={"--dtype": {"choices": ["float32", "bfloat16"], "default": "float32"}},
    )  # fmt: skip
    print(f"torch.mm of 512 x 512 numbers: {speed_of_mm(bench.rounds):.0f} GFLOP/s")
    for shape in [(2, 16, 2, 1, 64)] if bench.toy else SHAPES:
        (b, t, h, _, d), dtype = shape, bench.options.dtype
        for kind, cases in attention_cases(shape, getattr(torch, dtype)).items():
            title = f"attention, {kind}, {dtype}, batch tokens heads key-heads dim = {shape}"
            rows = bench.table(
                title, cases, calls=4 if b * h * t * t * d < 1 << 27 else 1
            )
            if kind == "backward":
                print(
                    "  "
                    + ", ".join(
                        f"{r.name}: {flops(shape) / min(r.times) / 1e6:.0f} GFLOP/s"
                        for r in rows
                    )
                )
            else:
                show_price(kind, rows, OWN, COUNTED)


if __name__ == "__main__":
    main()
