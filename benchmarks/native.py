"""The compiled norm and rotation of q and k: ratios to the traffic it cannot do without, to eager and to inductor.

`python -m benchmarks.native` prints, for each shape, forward against a copy of q and k; forward and backward against
that copy and a pass that reads two tensors and writes one; one token against an empty operator; attention modules
with the compiled pass on and off; and modules that overwrite the projections of q and k, in time and memory.
--no-compile leaves inductor out, --toy only shows that it runs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

from benchmarks.measure import settle

if __name__ == "__main__":
    settle(module="benchmarks.native")  # before torch: the allocator reads its settings when the process starts

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import Row, interleave, show, wanted
from benchmarks.modules import BASE, Bare, ours
from qkeel.functional.rope import rope_frequencies, rope_table
from qkeel.kernels.native import norm_rope
from qkeel.nn import Attention

# batch, tokens, query heads, key heads, head_dim
SHAPES = [(4, 256, 8, 8, 64), (4, 1024, 8, 8, 64), (4, 2048, 8, 8, 64), (4, 1024, 16, 4, 128)]
FORWARD, BOTH, EMPTY = "copy of q and k", "copy, and 2 reads and 1 write", "an operator that does nothing"
Pass = Callable[[Tensor, Tensor], Tensor]


class Passes:
    """Tensors of one shape and the ways to norm and rotate them."""

    def __init__(self, shape: tuple[int, int, int, int, int], compiled: bool) -> None:
        b, t, h, g, d = shape
        self.x = [torch.randn(b, t, heads, d).transpose(1, 2) for heads in (h, g)]
        self.above = [torch.randn_like(x) for x in self.x]
        self.room = [torch.empty_like(x) for x in self.x]
        self.gain = torch.rand(d) + 0.5
        cos, sin = rope_table(torch.arange(t)[None, None], rope_frequencies(d), torch.float32)
        wide_cos, wide_sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)

        def native(x: Tensor, gain: Tensor) -> Tensor:
            return norm_rope.norm_rope(x, gain, (cos, sin), 1, 1e-6, False)

        def eager(x: Tensor, gain: Tensor) -> Tensor:
            y = F.rms_norm(x, x.shape[-1:], gain, 1e-6)
            half = x.shape[-1] // 2
            return y * wide_cos + torch.cat([-y[..., half:], y[..., :half]], -1) * wide_sin

        self.ways: dict[str, Pass] = {"qkeel, compiled C++": native, "eager F.rms_norm + rotate_half": eager}
        if compiled:
            self.ways["inductor, the same"] = torch.compile(eager)

    def forward(self, way: Pass) -> Callable[[], object]:
        @torch.no_grad()
        def call() -> object:
            return [way(x, self.gain) for x in self.x]

        return call

    def both(self, way: Pass) -> Callable[[], object]:
        leaves = [x.detach().requires_grad_() for x in self.x]
        gains = [self.gain.clone().requires_grad_() for _ in self.x]

        def call() -> object:
            return torch.autograd.grad([way(x, g) for x, g in zip(leaves, gains)], [*leaves, *gains], self.above)

        return call

    def copy(self) -> None:
        for to, x in zip(self.room, self.x):
            to.copy_(x)

    def floor(self) -> None:
        self.copy()
        for to, x, above in zip(self.room, self.x, self.above):
            torch.add(x, above, out=to)


def bench(shape: tuple[int, int, int, int, int], rounds: int, compiled: bool) -> dict[str, list[Row]]:
    """Forward, and forward with backward, of every way, against the traffic of the pass."""
    passes = Passes(shape, compiled)
    calls = 4 if shape[1] < 1000 else 1
    forward = {FORWARD: passes.copy, **{n: passes.forward(way) for n, way in passes.ways.items()}}
    both = {BOTH: passes.floor, **{n: passes.both(way) for n, way in passes.ways.items()}}
    return {
        "forward": interleave(forward, FORWARD, rounds, calls, warmup=3),
        "forward + backward": interleave(both, BOTH, rounds, calls, warmup=3),
    }


@torch.no_grad()
def bench_token(rounds: int) -> list[Row]:
    """q of one token: the price of a call."""
    passes = Passes((1, 1, 8, 8, 64), compiled=False)
    one, number = passes.x[0], torch.zeros(1)
    cases: dict[str, Callable[[], object]] = {EMPTY: lambda: torch.neg(number)}
    cases |= {name: lambda way=way: way(one, passes.gain) for name, way in passes.ways.items()}
    return interleave(cases, EMPTY, rounds, calls=1000)


def bench_modules(dim: int, heads: int, batch: int, length: int, rounds: int) -> dict[str, list[Row]]:
    """Attention modules without the compiled pass and with it."""
    x, above = torch.randn(batch, length, dim), torch.randn(batch, length, dim)

    def call(module: nn.Module, native: bool, backward: bool) -> Callable[[], object]:
        leaf = x.clone().requires_grad_(backward)

        def run() -> None:
            os.environ["QKEEL_NATIVE"] = str(int(native))
            with torch.set_grad_enabled(backward):
                out = module(leaf)
            if backward:
                out.backward(above)

        return run

    def table(backward: bool) -> list[Row]:
        cases = {BASE: call(Bare(dim, heads), False, backward)}
        for norm, name in ((False, "rope"), (True, "rope + norm")):
            module = ours(dim, heads, norm)
            cases[f"qkeel {name}, torch"] = call(module, False, backward)
            cases[f"qkeel {name}, compiled C++"] = call(module, True, backward)
        return interleave(cases, BASE, rounds)

    found = {"forward": table(False), "forward + backward": table(True)}
    os.environ["QKEEL_NATIVE"] = "1"
    return found


def peak(call: Callable[[], object]) -> int:
    """The most bytes of tensors alive at once that a call made."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    result = seen.profiler.kineto_results  # type: ignore[union-attr]
    live = most = 0
    for event in sorted((e for e in result.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def bench_in_place(dim: int, heads: int, batch: int, length: int, rounds: int) -> list[Row]:
    """A module with norm and RoPE that overwrites its projections, and one whose projections a hook holds."""
    x, above = torch.randn(batch, length, dim), torch.randn(batch, length, dim)
    leaf = x.clone().requires_grad_()
    inside, beside = ours(dim, heads, True), ours(dim, heads, True)
    assert isinstance(beside, Attention)
    for projection in (beside.q_proj, beside.k_proj):
        projection.register_forward_hook(lambda *_: None)
    rows = []
    for kind, track, backward in (("forward", False, False), ("forward", True, False), ("both", True, True)):

        def call(module: nn.Module, track: bool = track, backward: bool = backward) -> object:
            with torch.set_grad_enabled(track):
                out = module(leaf if track else x)
            return torch.autograd.grad(out, [leaf, *module.parameters()], above) if backward else out

        told = f"{kind}, {'gradient' if track else 'no gradient'}"
        cases = {f"{told}, beside": lambda c=call: c(beside), f"{told}, in place": lambda c=call: c(inside)}
        units = [peak(case) / (4 * batch * length * dim) for case in cases.values()]
        print(f"  {told}: at most {units[1]:.2f} units of batch·tokens·width in place, {units[0]:.2f} beside")
        rows += interleave(cases, f"{told}, beside", rounds)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, print."""
    run = wanted("native", __doc__, arguments, rounds=25, ready=norm_rope.ready, peer="inductor")
    for shape in [(2, 16, 2, 1, 64)] if run.toy else SHAPES:
        for kind, rows in bench(shape, run.rounds, run.compiled).items():
            base = FORWARD if kind == "forward" else BOTH
            show(f"norm + rope, {kind}, batch tokens heads key-heads dim = {shape}", rows, base)
    show("norm + rope of one token", bench_token(run.rounds), EMPTY)
    sizes = run.module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, rows in bench_modules(**sizes, rounds=run.rounds).items():
            show(f"attention modules, {kind}, {sizes}", rows, BASE)
        print("\nmemory of a module's call")
        show("in place and beside, each pair by itself", bench_in_place(**sizes, rounds=run.rounds), "its pair beside")


if __name__ == "__main__":
    main()
