"""What watching a training run costs: ratios in one interleaved run, memory, and the time of discovery.

python -m benchmarks.watch
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

import qkeel
from benchmarks.measure import Bench, Cases, take_turns
from benchmarks.modules import Bare
from qkeel import find_sites
from qkeel.handle import Handle
from qkeel.kernels.attention.compiled import ready
from qkeel.kernels.statistics import logit_stats, stats_of_rows
from qkeel.monitor import Adaptive, Every
from qkeel.nn import Attention, Decoder, DecoderConfig
from qkeel.sites.tap import Tap
from qkeel.spec.call import make_call

VOCABULARY = 512
NEVER = 1 << 40  # steps: never again after the first
Size = dict[str, int]


class Block(nn.Module):
    """A pre-norm block on SDPA, none of it qkeel's."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.one, self.two, self.attention = (
            nn.LayerNorm(dim),
            nn.LayerNorm(dim),
            Bare(dim, dim // 64),
        )
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.one(x))
        return x + self.mlp(self.two(x))


class GPT(nn.Module):
    """Tokens to logits."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(
    size: Size,
    every: Every | Adaptive | None,
    *,
    compiled: bool,
    remove: bool = False,
    attend: Callable[..., Tensor] | None = None,
) -> Callable[[], None]:
    """A function that makes one training step."""
    torch.manual_seed(0)
    model = GPT(size["dim"], size["layers"])
    for block in model.blocks if attend is not None else ():
        block.attention.attend = attend
    tokens = torch.randint(0, VOCABULARY, (size["batch"], size["length"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = torch.compile(model) if compiled else model

    def step() -> None:
        cross_entropy(run(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    monitor = None if every is None else qkeel.watch(run, optimizer, every=every)
    step()  # warm; with a monitor: discovery
    if remove and monitor is not None:
        monitor.remove()
    return step


def step_cases(size: Size, *, compiled: bool) -> Cases:
    """Returns training steps, of which ten are timed, so that one of them is measured in full."""
    cases: Cases = {
        "ten training steps": trained(size, None, compiled=compiled),
        "full statistics every 10th": trained(size, Every(10), compiled=compiled),
        "removed monitor": trained(size, Every(10), compiled=compiled, remove=True),
    }
    return cases


def maximum_cases(size: Size) -> Cases:
    """Returns training steps whose attention finds each head's largest logit at every step by the lse."""
    spec = qkeel.AttentionSpec()
    return {
        "ten training steps": trained(
            size,
            None,
            compiled=False,
            attend=functools.partial(qkeel.attention, spec=spec),
        ),
        "certified maximum every step": trained(
            size,
            None,
            compiled=False,
            attend=lambda *qkv: qkeel.attention(*qkv, spec=spec, stats="max")[0],
        ),
    }


def own_module_cases(size: Size) -> Cases:
    """Returns training steps of qkeel's modules by torch's attention and by the compiled one, watched or not."""
    spec = qkeel.preset("qwen3")
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        d_model=size["dim"],
        n_layers=size["layers"],
        n_heads=size["dim"] // 64,
        spec=spec,
    )
    tokens = torch.randint(0, VOCABULARY, (size["batch"], size["length"]))

    native = "native" if ready() else "auto"

    def case(
        impl: str, watcher: Callable[[nn.Module, Optimizer], Handle] | None = None
    ) -> Callable[[], None]:
        torch.manual_seed(0)
        model = Decoder(config)
        for module in model.modules():
            if isinstance(module, Attention):
                module.impl = impl
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        handle = None if watcher is None else watcher(model, optimizer)

        def step() -> None:
            cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(handle, Tap):
                handle.read()

        step()
        return step

    return {
        "compiled attention": case(native),
        "again (noise)": case(native),
        "torch's SDPA": case("sdpa"),
        "largest logits and entropies from the kernel, a Tap": case(
            native, lambda model, _: Tap(model, measure_rows=stats_of_rows)
        ),
        "full statistics by a pass, a Tap": case(native, lambda model, _: Tap(model)),
        'watch(stats="max"), weights and journal too': case(
            native, lambda model, optimizer: qkeel.watch(model, optimizer, stats="max")
        ),
        "watch, weights and journal too": case(native, qkeel.watch),
    }


def peak(act: Callable[[], object]) -> int:
    """The most bytes of tensors held at once over those held before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        act()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events = [
        e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def memory(lengths: list[int]) -> dict[str, float]:
    """MiB beyond q, k and v of exact statistics, one sequence of 4 heads of 64, and of a T×T matrix of floats."""
    found = {}
    for t in lengths:
        q, k, v = (torch.randn(1, 4, t, 64) for _ in range(3))
        call = make_call(qkeel.AttentionSpec(), q, k, v)
        found[f"T={t}"] = round(peak(lambda call=call: logit_stats(call)) / 2**20, 2)
        found[f"T={t}, 4 T² floats"] = round(4 * 4 * t * t / 2**20, 2)
    return found


def discovery(layers: int, dim: int) -> dict[str, float]:
    """Returns median seconds of CPU time of find_sites and of a forward pass."""
    model, tokens = GPT(dim, layers), torch.randint(0, VOCABULARY, (1, 64))
    cases: Cases = {
        "find_sites": lambda: find_sites(model, tokens),
        "forward pass": lambda: model(tokens),
    }
    return {
        row.name: statistics.median(row.times) / 1e3
        for row in take_turns(cases, rounds=3, warmup=0)
    }


def main(arguments: list[str] | None = None) -> None:
    """Prints and writes the tables."""
    words = {
        "default": "",
        "metavar": "WORDS",
        "help": "tables whose title holds these words; nothing written",
    }
    bench = Bench(
        "watch",
        __doc__,
        arguments,
        rounds=3,
        peer="the compiled model",
        writes=True,
        flags={"--only": words},
    )
    size = {"dim": 256, "layers": 4, "length": 512, "batch": 4}
    if bench.toy:
        size = {"dim": 64, "layers": 1, "length": 32, "batch": 1}
    tables: dict[str, tuple[Callable[[], Cases], dict[str, int]]] = {
        "lse-guided maximum, qkeel.attention": (
            lambda: maximum_cases(size),
            {"calls": 10, "warmup": 0},
        ),
        "every step measured, qkeel's modules": (
            lambda: own_module_cases(size),
            {"rounds": 2 * bench.rounds + 1},
        ),
        "training steps, eager": (
            lambda: step_cases(size, compiled=False),
            {"calls": 10, "warmup": 0},
        ),
    }
    if bench.compiled:
        title = "training steps, compiled"
        tables[title] = (
            lambda: step_cases(size, compiled=True),
            {"calls": 10, "warmup": 0},
        )
    only = bench.options.only
    for title, (make, how) in tables.items():
        if only in title:
            bench.table(title, make(), **how)
    if only:
        return
    bench.numbers(
        "peak MiB of exact statistics",
        memory([64, 128] if bench.toy else [1024, 2048, 4096, 8192]),
    )
    bench.numbers(
        "discovery, CPU s",
        discovery(2 if bench.toy else 24, 128 if bench.toy else 1024),
    )
    path = bench.write("watch", about={"size": size}, tables=bench.tables)
    path.with_suffix(".md").write_text(bench.markdown())


if __name__ == "__main__":
    main()
