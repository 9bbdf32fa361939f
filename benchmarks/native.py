"""The compiled norm and rotation of q and k: ratios to the traffic it cannot do without, to eager and to inductor.

`python -m benchmarks.native` prints, for each shape, forward against a copy of q and k; forward and backward against
that copy and a pass that reads two tensors and writes one; and one token against an empty operator. --no-compile
leaves inductor out, --toy only shows that it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.measure import Bench, Case, Cases
from qkeel.functional.rope import rope_frequencies, rope_table
from qkeel.kernels import native
from qkeel.kernels.native.operators import OPS
from qkeel.kernels.norm_rope.operator import norm_rope

# batch, tokens, query heads, key heads, head_dim
SHAPES = [
    (4, 256, 8, 8, 64),
    (4, 1024, 8, 8, 64),
    (4, 2048, 8, 8, 64),
    (4, 1024, 16, 4, 128),
]
FORWARD, BOTH, EMPTY = (
    "copy of q and k",
    "copy, and 2 reads and 1 write",
    "an operator that does nothing",
)
Pass = Callable[[Tensor, Tensor], Tensor]
Own = Callable[
    [Tensor, Tensor, tuple[Tensor, Tensor]], Tensor
]  # x, gain, and cos and sin
Shape = tuple[int, int, int, int, int]
To = tuple[str, torch.dtype]
COMPILED: dict[str, Own] = {
    "qkeel, compiled C++": lambda x, gain, table: norm_rope(
        OPS, x, gain, table, 1, 1e-6, False
    )
}


class Passes:
    """Tensors of one shape and the ways to norm and rotate them: our own, eager, and by inductor."""

    def __init__(
        self,
        shape: Shape,
        compiled: bool,
        own: dict[str, Own] = COMPILED,
        to: To = ("cpu", torch.float32),
    ):
        b, t, h, g, d = shape
        self.x = [
            torch.randn(b, t, heads, d).to(*to).transpose(1, 2) for heads in (h, g)
        ]
        self.above = [torch.randn_like(x) for x in self.x]
        self.room = [torch.empty_like(x) for x in self.x]
        self.gain = torch.rand(d).to(*to) + 0.5
        positions = torch.arange(t, device=to[0])[None, None]
        table = rope_table(positions, rope_frequencies(d), torch.float32)
        wide_cos, wide_sin = (torch.cat([x, x], -1).to(*to) for x in table)

        def eager(x: Tensor, gain: Tensor) -> Tensor:
            y = F.rms_norm(x, x.shape[-1:], gain, 1e-6)
            half = x.shape[-1] // 2
            return (
                y * wide_cos + torch.cat([-y[..., half:], y[..., :half]], -1) * wide_sin
            )

        self.ways: dict[str, Pass] = {
            name: functools.partial(way, table=table) for name, way in own.items()
        }
        self.ways["eager F.rms_norm + rotate_half"] = eager
        if compiled:
            self.ways["inductor, the same"] = torch.compile(eager)

    def forward(self, way: Pass) -> Case:
        @torch.no_grad()
        def call() -> object:
            return [way(x, self.gain) for x in self.x]

        return call

    def both(self, way: Pass) -> Case:
        leaves = [x.detach().requires_grad_() for x in self.x]
        gains = [self.gain.clone().requires_grad_() for _ in self.x]

        def call() -> object:
            return torch.autograd.grad(
                [way(x, g) for x, g in zip(leaves, gains)],
                [*leaves, *gains],
                self.above,
            )

        return call

    def copy(self) -> None:
        for to, x in zip(self.room, self.x):
            to.copy_(x)

    def floor(self) -> None:
        self.copy()
        for to, x, above in zip(self.room, self.x, self.above):
            torch.add(x, above, out=to)


def pass_cases(passes: Passes) -> dict[str, Cases]:
    """Returns forward, and forward with backward, of every way, after the traffic that the pass cannot do without."""
    return {
        "forward": {
            FORWARD: passes.copy,
            **{n: passes.forward(way) for n, way in passes.ways.items()},
        },
        "forward + backward": {
            BOTH: passes.floor,
            **{n: passes.both(way) for n, way in passes.ways.items()},
        },
    }


def token_cases() -> Cases:
    """Returns q of one token by every way: the price of a call."""
    passes = Passes((1, 1, 8, 8, 64), compiled=False)
    one, number = passes.x[0], torch.zeros(1)
    ways = {
        name: lambda way=way: way(one, passes.gain) for name, way in passes.ways.items()
    }
    return {EMPTY: lambda: torch.neg(number), **ways}


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    bench = Bench(
        "native", __doc__, arguments, rounds=25, needs=[native.ready], peer="inductor"
    )
    for shape in [(2, 16, 2, 1, 64)] if bench.toy else SHAPES:
        for kind, cases in pass_cases(Passes(shape, bench.compiled)).items():
            title = f"norm + rope, {kind}, batch tokens heads key-heads dim = {shape}"
            bench.table(title, cases, calls=4 if shape[1] < 1000 else 1, warmup=3)
    with torch.no_grad():
        bench.table(
            "norm + rope of one token", token_cases(), calls=10 if bench.toy else 1000
        )


if __name__ == "__main__":
    main()
