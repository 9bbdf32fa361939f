"""The compiled attention against torch's, its statistics against none, and attention modules against their peers.

`python -m benchmarks.attention` prints, for each shape, forward, backward, and both; then attention modules in
tokens per second: qkeel's with QK-norm and RoPE, without and with the largest logit and the entropy of every head of
every call, against projections and SDPA alone and transformers' Qwen3. --no-compile leaves out the compiled peer
(saves a minute), --toy only shows that it runs.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable

from benchmarks.measure import settle

if __name__ == "__main__":
    settle(module="benchmarks.attention")  # before torch: the allocator reads its settings when the process starts

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import qkeel
from benchmarks.measure import Row, interleave, show, wanted
from benchmarks.modules import BASE, Bare, Qwen3, ours
from qkeel.kernels.native import attention as operator
from qkeel.kernels.native import norm_rope

# batch, tokens, query heads, key heads, head_dim
SHAPES = [(4, 512, 8, 8, 64), (2, 2048, 8, 8, 64), (1, 1024, 32, 32, 64), (1, 1024, 16, 4, 128)]
TORCH, OWN, COUNTED = "torch SDPA", "qkeel", "qkeel, largest logit and entropy"
NORMED, WATCHED, PEER = "qkeel norm + rope", "qkeel norm + rope, largest logit and entropy", "transformers Qwen3"


class Calls:
    """Causal attention of one shape, as a projection hands it over, every way."""

    def __init__(self, shape: tuple[int, int, int, int, int]) -> None:
        b, t, h, g, d = shape
        self.q, self.k, self.v = (torch.randn(b, t, heads, d).transpose(1, 2).requires_grad_() for heads in (h, g, g))
        self.above, self.scale = torch.randn(b, t, h, d).transpose(1, 2), d**-0.5
        self.ways: dict[str, Callable[[], Tensor]] = {
            TORCH: lambda: sdpa(self.q, self.k, self.v, is_causal=True, enable_gqa=g != h),
            OWN: lambda: self.own(False)[0],
            COUNTED: lambda: self.own(True)[0],
        }

    def own(self, stats: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        how = operator.How(self.scale, True, 0, 0.0, stats)
        return operator.attention(self.q, self.k, self.v, None, None, how)

    def forward(self, way: Callable[[], Tensor]) -> Callable[[], object]:
        return torch.no_grad()(way)

    def both(self, way: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(way(), [self.q, self.k, self.v], self.above)

    def backwards(self) -> dict[str, Callable[[], object]]:
        """torch's derivative and qkeel's of the same call."""
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


def bench(shape: tuple[int, int, int, int, int], rounds: int) -> dict[str, list[Row]]:
    """Forward, backward and both of every way."""
    calls = Calls(shape)
    forward = {name: calls.forward(way) for name, way in calls.ways.items()}
    both = {name: calls.both(way) for name, way in calls.ways.items()}
    return {
        "forward": interleave(forward, TORCH, rounds),
        "backward": interleave(calls.backwards(), TORCH, rounds),
        "forward + backward": interleave(both, TORCH, rounds),
    }


def peers(dim: int, heads: int, length: int, compiled: bool) -> dict[str, nn.Module]:
    """The modules of the table; one whose library is not installed is left out and said so."""
    made: dict[str, nn.Module] = {BASE: Bare(dim, heads), NORMED: ours(dim, heads, True), WATCHED: Watched(dim, heads)}
    made[NORMED].impl = "native"  # type: ignore[assignment]
    try:
        made[PEER] = Qwen3(dim, heads, True, length)
        if compiled:
            made[f"{PEER}, compiled"] = torch.compile(Qwen3(dim, heads, True, length))  # type: ignore[assignment]
    except ImportError as error:
        print(f"  left out: {PEER} ({error})")
    return made


def bench_modules(dim: int, heads: int, batch: int, length: int, rounds: int, compiled: bool) -> dict[str, list[Row]]:
    """Forward (no_grad) and forward with backward of attention modules."""
    found, x, above = (
        peers(dim, heads, length, compiled),
        torch.randn(batch, length, dim),
        torch.randn(batch, length, dim),
    )

    def call(module: nn.Module, backward: bool) -> Callable[[], object]:
        leaf = x.clone().requires_grad_(backward)

        def run() -> None:
            with torch.set_grad_enabled(backward):
                out = module(leaf)
            if backward:
                out.backward(above)

        return run

    return {
        kind: interleave({name: call(module, backward) for name, module in found.items()}, BASE, rounds)
        for kind, backward in (("forward", False), ("forward + backward", True))
    }


def show_speed(title: str, rows: list[Row], tokens: int) -> None:
    """The table, tokens per second, and the speed of qkeel with statistics over every other's, round by round."""
    show(title, rows, BASE)
    ours_ = next(row for row in rows if row.name == WATCHED)
    for row in rows:
        rate = tokens / statistics.median(row.times) * 1e3
        ratio = statistics.median(a / b for a, b in zip(row.times, ours_.times))
        print(f"  {rate:9.0f} tokens/s   {WATCHED!r} is {ratio:.3f} times as fast as {row.name!r}")


def show_price(title: str, rows: list[Row], without: str, with_: str) -> None:
    """What statistics add."""
    one, two = (next(row for row in rows if row.name == name) for name in (without, with_))
    extra = statistics.median(b / a for a, b in zip(one.times, two.times)) - 1
    least = min(two.times) / min(one.times) - 1
    print(f"  statistics add {100 * extra:+.2f} % to {title} (minima: {100 * least:+.2f} %)")


def ready() -> bool:
    """Whether all kernels of a module are here."""
    return norm_rope.ready() and operator.ready() and operator.backward_ready()


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, print."""
    run = wanted("attention", __doc__, arguments, rounds=15, ready=ready, peer="the compiled peer")
    for shape in [(2, 16, 2, 1, 64)] if run.toy else SHAPES:
        for kind, rows in bench(shape, run.rounds).items():
            show(f"attention, {kind}, batch tokens heads key-heads dim = {shape}", rows, TORCH)
            if kind != "backward":
                show_price(kind, rows, OWN, COUNTED)
    sizes = run.module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, rows in bench_modules(**sizes, rounds=run.rounds, compiled=run.compiled).items():
            show_speed(f"attention modules, {kind}, {sizes}", rows, sizes["batch"] * sizes["length"])
            show_price(f"a module's {kind}", rows, NORMED, WATCHED)


if __name__ == "__main__":
    main()
