"""The compiled attention against torch's, its statistics against none, and attention modules against their peers.

`python -m benchmarks.attention` prints, for each shape, forward, backward, and both; next to each backward its GFLOP/s
(five products over the visible half) and those of torch.mm. Then attention modules in tokens per second: qkeel's with
QK-norm and RoPE, without and with the largest logit and the entropy of every head of every call, against projections
and SDPA alone and transformers' Qwen3. --no-compile leaves out the compiled peer (saves a minute), --toy only shows
that it runs; --only attention leaves out the modules.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkeel
from benchmarks.measure import Bench, Case, Cases, Row, take_turns
from benchmarks.modules import BASE, Bare, Transformers, available, both_directions, ours
from benchmarks.native import Shape, module_sizes
from qkeel.kernels import compiled_attention as operator
from qkeel.kernels.native import norm_rope

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
NORMED, WATCHED, PEER = "qkeel norm + rope", "qkeel norm + rope, largest logit and entropy", "transformers Qwen3"


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
            TORCH: lambda: sdpa(self.q, self.k, self.v, is_causal=True, enable_gqa=g != h),
            OWN: lambda: self.own(False)[0],
            COUNTED: lambda: self.own(True)[0],
        }

    def own(self, stats: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        how = (self.scale, True, 0, 0.0, stats)
        return torch.ops.qkeel_native.attention(self.q, self.k, self.v, None, None, *how)

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


class Watched(nn.Module):
    """qkeel's attention module with its statistics read in every call."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.inner = ours(dim, heads, norm=True)
        self.seen: object = None

    def forward(self, x: Tensor) -> Tensor:
        m = self.inner
        q, k, v = (p(x).unflatten(-1, (m.n_heads, m.head_dim)).transpose(1, 2) for p in (m.q_proj, m.k_proj, m.v_proj))
        out, self.seen = qkeel.attention(q, k, v, spec=m.spec, params=m.spec_params(), impl="native", stats="entropy")
        return m.o_proj(out.transpose(1, 2).flatten(2))


def attention_cases(shape: Shape, dtype: torch.dtype) -> dict[str, Cases]:
    """Returns forward, backward and both of every way."""
    calls = Calls(shape, dtype)
    return {
        "forward": {name: torch.no_grad()(way) for name, way in calls.ways.items()},
        "backward": calls.backward(),
        "forward + backward": {name: calls.both(way) for name, way in calls.ways.items()},
    }


def module_cases(dim: int, heads: int, batch: int, length: int, compiled: bool) -> dict[str, Cases]:
    """Returns forward (no_grad) and forward with backward of attention modules."""
    made: dict[str, Callable[[], nn.Module]] = {BASE: lambda: Bare(dim, heads), NORMED: lambda: ours(dim, heads, True)}
    made |= {WATCHED: lambda: Watched(dim, heads), PEER: lambda: Transformers("Qwen3", dim, heads, True, length)}
    if compiled:
        made[f"{PEER}, compiled"] = lambda: torch.compile(made[PEER]())  # type: ignore[return-value]
    found = available(made)
    found[NORMED].impl = "native"  # type: ignore[assignment]
    return both_directions(found, batch, length, dim)


def flops(shape: Shape) -> float:
    """Returns those of one backward pass: S, dP, dV, dQ, dK of the visible pairs."""
    b, t, h, _, d = shape
    return 5 * 2 * b * h * d * t * (t + 1) / 2


def speed_of_mm(rounds: int) -> float:
    """Returns the GFLOP/s of torch.mm where it is at its best."""
    x, y = torch.randn(512, 512), torch.randn(512, 512)
    (row,) = take_turns({"mm": lambda: torch.mm(x, y)}, rounds, calls=10)
    return 2 * 512**3 / min(row.times) / 1e6


def show_speed(rows: list[Row], tokens: int) -> None:
    """Prints tokens per second, and the speed of qkeel with statistics over every other's, round by round."""
    watched = next(row for row in rows if row.name == WATCHED)
    for row in rows:
        rate = tokens / statistics.median(row.times) * 1e3
        ratio = statistics.median(a / b for a, b in zip(row.times, watched.times))
        print(f"  {rate:9.0f} tokens/s   {WATCHED!r} is {ratio:.3f} times as fast as {row.name!r}")


def show_price(title: str, rows: list[Row], without: str, with_: str) -> None:
    """Prints what statistics add."""
    one, two = (next(row for row in rows if row.name == name) for name in (without, with_))
    extra = statistics.median(b / a for a, b in zip(one.times, two.times)) - 1
    least = min(two.times) / min(one.times) - 1
    print(f"  statistics add {100 * extra:+.2f} % to {title} (minima: {100 * least:+.2f} %)")


def main(arguments: list[str] | None = None) -> None:
    """Prints the tables."""
    bench = Bench(
        "attention", __doc__, arguments,
        needs=[norm_rope.ready, operator.ready, operator.backward_ready], peer="the compiled peer",
        flags={
            "--dtype": {"choices": ["float32", "bfloat16"], "default": "float32"},
            "--only": {"choices": ["attention"]},
        },
    )  # fmt: skip
    print(f"torch.mm of 512 x 512 numbers: {speed_of_mm(bench.rounds):.0f} GFLOP/s")
    for shape in [(2, 16, 2, 1, 64)] if bench.toy else SHAPES:
        (b, t, h, _, d), dtype = shape, bench.options.dtype
        for kind, cases in attention_cases(shape, getattr(torch, dtype)).items():
            title = f"attention, {kind}, {dtype}, batch tokens heads key-heads dim = {shape}"
            rows = bench.table(title, cases, calls=4 if b * h * t * t * d < 1 << 27 else 1)
            if kind == "backward":
                print("  " + ", ".join(f"{r.name}: {flops(shape) / min(r.times) / 1e6:.0f} GFLOP/s" for r in rows))
            else:
                show_price(kind, rows, OWN, COUNTED)
    if bench.options.only:
        return
    sizes = module_sizes(bench.toy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, cases in module_cases(**sizes, compiled=bench.compiled).items():
            rows = bench.table(f"attention modules, {kind}, {sizes}", cases)
            show_speed(rows, sizes["batch"] * sizes["length"])
            show_price(f"a module's {kind}", rows, NORMED, WATCHED)


if __name__ == "__main__":
    main()
