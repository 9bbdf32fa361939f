"""What watching costs a training run on a GPU: time, launches, waits, memory, and whether its losses stay the same.

`python -m benchmarks.on_gpu.watched` trains a model of 100 million weights, --large one of a billion, --compiled the
first with its blocks under torch.compile. They are written without qkeel: bfloat16 by autocast, AdamW fused, random
bytes. Ten training steps are a case, so that one of them is measured where every 10th is. Launches and waits are those
of the CUDA runtime in one step, by torch's profiler.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import qkeel
from benchmarks.hook_by_hand import by_hand
from benchmarks.measure import Bench
from benchmarks.on_gpu.machine import (
    ALL_EACH,
    ALL_TENTH,
    CLIP,
    DEVICE,
    LALR,
    MAX_EACH,
    MAX_TENTH,
    PEAK,
    STEPS,
    Clock,
    write,
)
from benchmarks.watch import GPT, VOCABULARY
from qkeel.monitor import Adaptive, Every

NEVER = 1 << 40  # steps: never again after the first
OFF, EQUAL_STEPS = "nobody watches", 20
LAUNCHES = {
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemsetAsync",
}
LAUNCHES |= {"cudaMemcpyAsync"}
WAITS = {
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
}  # the profiler's own is of the device
Step = Callable[[], Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and its batch."""

    dim: int
    layers: int
    batch: int
    tokens: int


SMALL = Size(dim=768, layers=12, batch=16, tokens=1024)
LARGE = Size(dim=2048, layers=20, batch=4, tokens=1024)
TOY = Size(dim=64, layers=2, batch=2, tokens=8)
WAYS: dict[str, dict[str, Any] | None] = {
    OFF: None,
    "between measured steps": {"every": Adaptive(least=NEVER, most=NEVER)},
    ALL_TENTH: {"every": Every(10)},
    MAX_TENTH: {"every": Every(10), "stats": "max"},
    ALL_EACH: {},
    MAX_EACH: {"stats": "max"},
}
EAGER = "nobody watches, not compiled"
BY_HAND = "a hook by hand, T×T, at every step"
REMEDIES = {CLIP: "qk_clip:threshold=100", LALR: "lalr"}
EAGER_WAYS = (OFF, ALL_TENTH, ALL_EACH, MAX_EACH)
COMPILED = (OFF, ALL_TENTH)
MEASURED = (OFF, ALL_EACH)
FEW = (
    OFF,
    "between measured steps",
    ALL_TENTH,
)  # a billion weights are 16 GB a case


def trained(
    size: Size,
    device: str,
    how: dict[str, Any] | None,
    remedy: str = "none",
    compiled: bool = False,
) -> tuple[Step, Callable[[], None]]:
    """A function that makes one training step and returns its loss, and what ends the watching."""
    torch.manual_seed(0)
    model = GPT(size.dim, size.layers).to(device)
    for block in model.blocks if compiled else ():  # one graph for all of them
        block.compile(backend="inductor" if device == "cuda" else "aot_eager")
    tokens = torch.randint(VOCABULARY, (size.batch, size.tokens)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    handle = qkeel.apply(model, remedy, optimizer, batch=tokens)
    monitor = None if how is None else qkeel.watch(model, optimizer, rules=[], **how)

    def step() -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def end() -> None:
        handle.remove()
        if monitor is not None:
            monitor.remove()

    return step, end


def hooked_by_hand(size: Size, device: str) -> Step:
    """A training step with the hook that people write, which is in place in this step alone."""
    step, _ = trained(size, device, None)
    public = F.scaled_dot_product_attention
    optimizer = torch.optim.SGD([torch.zeros(1, device=device)], lr=0.0)

    def hooked() -> Tensor:
        hook = by_hand(None, optimizer, None)  # type: ignore[arg-type]
        try:
            loss = step()
            optimizer.step()
            return loss
        finally:
            hook.remove()  # type: ignore[attr-defined]
            F.scaled_dot_product_attention = public

    return hooked


def ten(step: Step) -> Callable[[], None]:
    """Ten steps."""

    def call() -> None:
        for _ in range(10):
            step()

    return call


def counted(step: Step, device: str) -> tuple[dict[str, int], dict[str, float]]:
    """Launches, copies and waits of one step, and the milliseconds of its longest kernels by name."""
    step()
    kinds = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if device == "cuda" else []),
    ]
    with profile(activities=kinds) as seen:
        step()
    calls = Counter({event.key: event.count for event in seen.key_averages()})
    numbers = {
        "launches": sum(calls[name] for name in LAUNCHES),
        "waits": sum(calls[name] for name in WAITS),
    }
    kernels = sorted(
        seen.key_averages(), key=lambda event: -event.self_device_time_total
    )[:15]
    return numbers, {
        event.key[:80]: event.self_device_time_total / 1e3 for event in kernels
    }


def losses(
    size: Size, device: str, how: dict[str, Any] | None, compiled: bool
) -> Tensor:
    """The losses of a short run by deterministic algorithms."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(
        True
    )  # a warning alone leaves cuDNN's backward pass as it is
    try:
        step, end = trained(size, device, how, compiled=compiled)
        found = torch.stack([step() for _ in range(EQUAL_STEPS)])
        end()
        return found.cpu()
    finally:
        torch.use_deterministic_algorithms(before)


def memory(size: Size, device: str, ways: Sequence[str]) -> dict[str, float]:
    """MiB at the most in a measured step beyond what is held before it, by way; nothing where no CUDA device is."""
    found = {}
    for name in ways if device == "cuda" else ():
        step, end = trained(size, device, WAYS[name])
        for _ in range(2):
            step()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(10):
            step()
        found[name] = round((torch.cuda.max_memory_allocated() - held) / 2**20, 1)
        end()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and writes after each table."""
    flags: dict[str, dict[str, Any]] = {
        **DEVICE,
        "--large": {"action": "store_true", "help": "a billion weights"},
    }
    flags["--compiled"] = {
        "action": "store_true",
        "help": "its blocks under torch.compile",
    }
    bench = Bench(
        "on_gpu.watched", __doc__, arguments, rounds=3, writes=True, flags=flags
    )
    device, large, compiled = (
        bench.options.device,
        bench.options.large,
        bench.options.compiled,
    )
    size, ways = (
        LARGE if large else SMALL,
        FEW if large else COMPILED if compiled else EAGER_WAYS,
    )
    size = TOY if bench.toy else size
    told = (
        f"{size.layers} layers, width {size.dim}, {size.batch} × {size.tokens} tokens"
    )
    made = {
        name: trained(size, device, WAYS[name], compiled=compiled)[0] for name in ways
    }
    if compiled:
        made[EAGER] = trained(size, device, None)[0]
    for name, remedy in {} if large else REMEDIES.items():
        made[name] = trained(size, device, None, remedy, compiled)[0]
    cases = {name: ten(step) for name, step in made.items()}
    if not (compiled or large):
        cases[BY_HAND] = ten(hooked_by_hand(size, device))
    bench.table(f"{STEPS}; {told}", cases, warmup=1, clock=Clock(device, ahead=False))
    write(bench, "watched")
    for name, step in made.items():
        numbers, longest = counted(step, device)
        bench.numbers(f"one step, {name}", numbers)
        if name == ALL_EACH:
            bench.numbers("the longest kernels of a measured step, ms", longest)
    made.clear()
    cases.clear()
    write(bench, "watched")
    if not compiled:
        peaks = memory(size, device, MEASURED if not large else FEW)
        bench.numbers("MiB at the most in ten steps", peaks)
        if peaks:
            bench.numbers(PEAK, {name: x / peaks[OFF] for name, x in peaks.items()})
    if not large:
        plain = losses(size, device, None, compiled)
        same = {
            name: float(torch.equal(plain, losses(size, device, WAYS[name], compiled)))
            for name in ways
        }
        bench.numbers(
            f"losses of {EQUAL_STEPS} steps are the same bits (1) or not (0)", same
        )
    write(bench, "watched")


if __name__ == "__main__":
    main()
