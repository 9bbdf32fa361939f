"""What watching a training run costs: ratios in one interleaved run, memory, and the time of discovery.

python -m benchmarks.watch
"""

from __future__ import annotations

from benchmarks.measure import settle

if __name__ == "__main__":
    settle(module="benchmarks.watch")  # before torch: the allocator reads its settings when the process starts

import argparse
import datetime
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim import Optimizer

import qkeel
from benchmarks.measure import Row, interleave, show
from qkeel import find_sites
from qkeel.handle import Handle
from qkeel.kernels.native.attention import ready
from qkeel.kernels.statistics import logit_stats, stats_of_rows
from qkeel.monitor import Adaptive, Every
from qkeel.nn import Attention, Decoder, DecoderConfig
from qkeel.sites.brackets import BracketMode
from qkeel.sites.tap import Tap
from qkeel.spec.call import make_call

VOCABULARY = 512
NEVER = 1 << 40  # steps: never again after the first


class Block(nn.Module):
    """A pre-norm block on SDPA, none of it qkeel's."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attend: Callable[..., Tensor] = functools.partial(scaled_dot_product_attention, is_causal=True)
        self.heads = dim // 64
        self.one, self.two = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.one(x)).unflatten(-1, (3, self.heads, 64)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
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
    size: dict[str, int],
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
        block.attend = attend
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


def steps(size: dict[str, int], rounds: int, *, compiled: bool) -> list[Row]:
    """Ten steps each, so that one of them is measured in full."""
    cases: dict[str, Callable[[], object]] = {
        "ten training steps": trained(size, None, compiled=compiled),
        "full statistics every 10th": trained(size, Every(10), compiled=compiled),
        "removed monitor": trained(size, Every(10), compiled=compiled, remove=True),
    }
    if not compiled:
        adaptive = Adaptive(least=NEVER, most=NEVER)
        cases["a bracket every step (Adaptive)"] = trained(size, adaptive, compiled=False)
    return interleave(cases, "ten training steps", rounds, calls=10, warmup=0)


def maximum(size: dict[str, int], rounds: int) -> list[Row]:
    """Training steps whose attention tells the largest logit of every head at every step, found through the lse."""
    spec = qkeel.AttentionSpec()
    cases: dict[str, Callable[[], object]] = {
        "ten training steps": trained(size, None, compiled=False, attend=functools.partial(qkeel.attention, spec=spec)),
        "certified maximum every step": trained(
            size, None, compiled=False, attend=lambda *qkv: qkeel.attention(*qkv, spec=spec, stats="max")[0]
        ),
    }
    return interleave(cases, "ten training steps", rounds, calls=10, warmup=0)


def own_modules(size: dict[str, int], rounds: int) -> list[Row]:
    """Training steps of a decoder of qkeel's modules, by torch's attention and by the compiled one, measured or not."""
    spec = qkeel.preset("qwen3")
    config = DecoderConfig(
        vocab_size=VOCABULARY, d_model=size["dim"], n_layers=size["layers"], n_heads=size["dim"] // 64, spec=spec
    )
    tokens = torch.randint(0, VOCABULARY, (size["batch"], size["length"]))

    native = "native" if ready() else "auto"

    def case(impl: str, watcher: Callable[[nn.Module, Optimizer], Handle] | None = None) -> Callable[[], None]:
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

    cases: dict[str, Callable[[], object]] = {
        "compiled attention": case(native),
        "again (noise)": case(native),
        "torch's SDPA": case("sdpa"),
        "largest logits and entropies from the kernel, a Tap": case(
            native, lambda model, _: Tap(model, measure_rows=stats_of_rows)
        ),
        "full statistics by a pass, a Tap": case(native, lambda model, _: Tap(model)),
        'watch(stats="entropy"), weights and journal too': case(
            native, lambda model, optimizer: qkeel.watch(model, optimizer, stats="entropy")
        ),
        "watch, weights and journal too": case(native, qkeel.watch),
    }
    return interleave(cases, "compiled attention", rounds)


def bracket(size: dict[str, int], rounds: int) -> list[Row]:
    """One SDPA call forward and backward, under the mode and without."""
    shape = size["batch"], size["dim"] // 64, size["length"], 64
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))

    def plain() -> None:
        scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    def seen() -> None:
        with BracketMode(_raise):
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        out.sum().backward()

    return interleave({"SDPA f+b": plain, "again (noise)": lambda: plain(), "bracket": seen}, "SDPA f+b", rounds, 20)


def _raise(error: Exception) -> None:
    raise error


def peak(act: Callable[[], object]) -> int:
    """The most bytes of tensors held at once over those held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        act()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def memory(lengths: list[int]) -> dict[str, float]:
    """MiB beyond q, k and v of exact statistics, one sequence of 4 heads of 64; beside them a T×T matrix of floats."""
    found = {}
    for t in lengths:
        q, k, v = (torch.randn(1, 4, t, 64) for _ in range(3))
        call = make_call(qkeel.AttentionSpec(), q, k, v)
        found[f"T={t}"] = round(peak(lambda call=call: logit_stats(call)) / 2**20, 2)
        found[f"T={t}, 4 T² floats"] = round(4 * 4 * t * t / 2**20, 2)
    return found


def discovery(layers: int, dim: int, rounds: int = 3) -> dict[str, float]:
    """Median seconds of CPU time of find_sites and of a forward pass."""
    model, tokens = GPT(dim, layers), torch.randint(0, VOCABULARY, (1, 64))
    cases = {"find_sites": lambda: find_sites(model, tokens), "forward pass": lambda: model(tokens)}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            start = time.process_time()
            case()
            times[name].append(time.process_time() - start)
    return {name: round(statistics.median(ts), 3) for name, ts in times.items()}


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="tiny sizes: only to see that it runs")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="tables whose title holds these words; nothing written"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    toy = args.toy
    size = {
        "dim": 64 if toy else 256,
        "layers": 1 if toy else 4,
        "length": 32 if toy else 512,
        "batch": 1 if toy else 4,
    }
    found: dict[str, object] = {}
    tables = {"bracket on one SDPA call": lambda: bracket(size, 2 * args.rounds + 1)}
    tables["lse-guided maximum, qkeel.attention"] = lambda: maximum(size, args.rounds)
    tables["every step measured, qkeel's modules"] = lambda: own_modules(size, 2 * args.rounds + 1)
    tables["training steps, eager"] = lambda: steps(size, args.rounds, compiled=False)
    if not (toy or args.no_compile):
        tables["training steps, compiled"] = lambda: steps(size, args.rounds, compiled=True)
    for title, table in tables.items():
        if args.only not in title:
            continue
        rows = table()
        show(f"{title}, {size}", rows, rows[0].name)
        found[title] = [row.as_dict() for row in rows]
    if args.only:
        return
    found["peak MiB of exact statistics"] = memory([64, 128] if toy else [1024, 2048, 4096, 8192])
    found["discovery, CPU s"] = discovery(2 if toy else 24, 128 if toy else 1024)
    for title in ("peak MiB of exact statistics", "discovery, CPU s"):
        print(f"\n{title}: {found[title]}")
    about = {"torch": torch.__version__, "date": datetime.date.today().isoformat(), "rounds": args.rounds, "size": size}
    name = args.out / f"watch-{about['date']}{'-toy' if toy else ''}"
    args.out.mkdir(parents=True, exist_ok=True)
    name.with_suffix(".json").write_text(
        json.dumps({"about": about, "tables": found}, indent=1, ensure_ascii=False) + "\n"
    )
    name.with_suffix(".md").write_text(markdown(found))
    print(f"\nwritten: {name}.json, .md")


def markdown(found: dict[str, object]) -> str:
    """The tables for docs/benchmarks.md."""
    lines = []
    for title, rows in found.items():
        lines += [f"\n### {title}\n", "| case | min | median | max |", "|---|---|---|---|"]
        if isinstance(rows, list):
            lines += [f"| {r['case']} | " + " | ".join(f"{x:.3f}" for x in r["ratio"]) + " |" for r in rows]
        elif isinstance(rows, dict):
            lines[-2:] = ["| case | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())]
    return "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    main()
