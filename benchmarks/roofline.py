"""How far each operator is from what the machine can do: its time, and copies and a matrix product, in one run.

    python -m benchmarks.roofline                        measures, writes benchmarks/results/roofline-DATE.json

An operator is placed by the bytes and floating-point operations that it cannot do without: every tensor read or written
once, every product that a visible pair needs. What it moves or computes besides shows as distance from the roof.
Roofs: a matrix product, and the rate of a copy, or of a multiplication in place for what writes where it read (a copy's
target is fetched before it is overwritten, which no one counts), in the cache that takes twice the operator's bytes.
--no-compile leaves inductor out, --toy only shows that it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

import qkeel
from benchmarks.measure import Bench, BenchRow, Cases, take_turns
from benchmarks.measure import Case as Call
from benchmarks.native import Passes
from benchmarks.steps import adamw_step
from qkeel.kernels.native import ready as kernels_ready
from qkeel.kernels.statistics import logit_stats
from qkeel.ops import KERNELS
from qkeel.spec.call import make_call

WAYS = {
    "eager F.rms_norm + rotate_half": "eager",
    "inductor, the same": "inductor",
}  # shorter, for the picture
TORCH = "torch SDPA"
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """What is done, by what, the bytes and operations that it cannot do without, and what makes a call of it."""

    what: str
    by: str
    bytes: float
    flops: float
    make: Callable[[], Call]
    in_place: bool = False
    drawn_as: str = ""

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.what}: {self.by}" if self.by else self.what

    @property
    def kind(self) -> str:
        """By which it is coloured."""
        return self.drawn_as or self.what


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of all operators: attention of batch · tokens · heads · head_dim, weights of layers · dim²."""

    batch: int = 4
    tokens: int = 1024
    heads: int = 8
    head_dim: int = 64
    layers: int = 2
    dim: int = 1024
    matrix: int = 1024

    @property
    def numbers(self) -> int:
        """Of q, and of k, v and the output."""
        return self.batch * self.tokens * self.heads * self.head_dim

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key visible to it, causal."""
        return self.batch * self.heads * self.tokens * (self.tokens + 1) // 2

    @property
    def weights(self) -> int:
        """Four projections and an MLP of 4·dim a layer."""
        return 12 * self.layers * self.dim**2


TOY = Sizes(batch=1, tokens=16, heads=2, head_dim=64, layers=1, dim=64, matrix=64)


def operators(sizes: Sizes, compiled: bool) -> Iterator[Operator]:
    """The table. A kernel that joins KERNELS, a compiled pass behind statistics or lalr, is measured as it is."""
    size, weights = 4 * sizes.numbers, 4 * sizes.weights  # bytes of a float32 for each
    passes = Passes(
        (sizes.batch, sizes.tokens, sizes.heads, sizes.heads, sizes.head_dim), compiled
    )
    for way_name, way in passes.ways.items():
        name = WAYS.get(way_name, way_name)
        if name.startswith("qkeel") and not kernels_ready():
            print(f"  left out: {name} (not compiled here)")
            continue
        # Forward: read x, write y; 2 operations to sum squares, 2 to scale, 3 to rotate. Backward: read y and dy, write
        # dx; 3 to rotate back dy, 3 y, 4 to sum two products, 4 to combine. Of q and of k.
        n = 2 * sizes.numbers
        yield Operator(
            "norm + rope",
            name,
            2 * 2 * size,
            7 * n,
            functools.partial(passes.forward, way),
        )
        yield Operator(
            "norm + rope, f+b",
            name,
            2 * 5 * size,
            21 * n,
            functools.partial(passes.both, way),
        )
    # Two products per pair forward, five backward; q, k, v, out, then those and four gradients.
    product = 2 * sizes.pairs * sizes.head_dim
    for name in attentions(sizes):
        call = functools.partial(attend, sizes, name)
        both, counted = (
            functools.partial(call, gradient=True),
            functools.partial(call, stats="max"),
        )
        yield Operator("attention", name, 4 * size, 2 * product, call)
        yield Operator("attention, f+b", name, 12 * size, 7 * product, both)
        if name != TORCH:  # the largest logit of every head needs nothing more
            yield Operator(
                "attention, max",
                name,
                4 * size,
                2 * product,
                counted,
                drawn_as="attention",
            )
    # One product per pair.
    yield Operator(
        "statistics pass",
        "",
        2 * size,
        product,
        functools.partial(statistic, sizes),
        drawn_as="statistics",
    )
    # Weight, gradient and two moments read, weight and moments written; 12 operations a weight.
    for remedy, name in (("none", "AdamW, fused"), ("lalr", "AdamW, fused + lalr")):
        step = functools.partial(
            adamw_step, sizes.layers, sizes.dim // 64, sizes.dim, remedy, fused=True
        )
        yield Operator(
            name,
            "",
            7 * weights,
            12 * sizes.weights,
            step,
            in_place=True,
            drawn_as="optimizer",
        )


def inputs(sizes: Sizes, gradient: bool) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output, the heads of a token next to each other in memory."""
    rng, shape = (
        torch.Generator().manual_seed(0),
        (sizes.batch, sizes.tokens, sizes.heads, sizes.head_dim),
    )
    made = [torch.randn(shape, generator=rng).transpose(1, 2) for _ in range(4)]
    return [x.requires_grad_(gradient) for x in made[:3]] + made[3:]


def attentions(sizes: Sizes) -> list[str]:
    """torch's own SDPA and every kernel of ours that takes such a call."""
    q, k, v, _ = inputs(sizes, False)
    call = make_call(qkeel.AttentionSpec(), q, k, v)
    return [
        TORCH,
        *(name for name, kernel in KERNELS.items() if kernel.supports(call) is None),
    ]


def attend(
    sizes: Sizes,
    name: str,
    *,
    gradient: bool = False,
    stats: Literal[False, "max"] = False,
) -> Call:
    """Causal attention by torch or by a kernel of ours, with its backward pass or statistics or without."""
    *qkv, above = inputs(sizes, gradient)
    spec = qkeel.AttentionSpec()

    def forward() -> object:
        if name == TORCH:
            return scaled_dot_product_attention(*qkv, is_causal=True)
        return qkeel.attention(*qkv, spec=spec, impl=name, stats=stats)

    return (lambda: torch.autograd.grad(forward(), qkv, above)) if gradient else forward


def statistic(sizes: Sizes) -> Call:
    """Exact statistics of one call, with nothing else."""
    q, k, v, _ = inputs(sizes, False)
    call = make_call(qkeel.AttentionSpec(), q, k, v)
    return lambda: logit_stats(call)


def cache(level: int, default: int) -> int:
    """Bytes of a cache of the first processor."""
    for index in sorted(CACHES.glob("index*")):
        text = (
            (index / "size").read_text().strip()
            if (index / "level").read_text().strip() == str(level)
            else ""
        )
        if text:
            return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    return default


def streams(size: int, least: int) -> tuple[Cases, int]:
    """A copy and a scaling inside so many bytes, repeated until `least` were read and written; how many those are."""
    x, times = torch.randn(size // 8), max(1, least // size)
    to, own = (
        torch.empty_like(x),
        torch.ones(size // 8),
    )  # half the bytes, each read and written

    def copy() -> None:
        for _ in range(times):
            to.copy_(x)

    def scale() -> None:
        for _ in range(times):
            own.mul_(1.0)

    return {"copy": copy, "in place": scale}, times * size


def measure(sizes: Sizes, rounds: int, compiled: bool) -> dict[str, Any]:
    """Peaks and operators, all cases in each round."""
    levels = {"L2": cache(2, 1 << 19), "L3": cache(3, 1 << 24), "memory": 0}
    least = 1 << (28 if sizes is not TOY else 16)
    spans = {
        "L2": levels["L2"] // 2,
        "L3": levels["L3"] // 4,
        "memory": max(least, 8 * levels["L3"]),
    }
    if sizes is TOY:
        spans = dict.fromkeys(spans, 1 << 16)
    moving = {level: streams(size, least) for level, size in spans.items()}
    a, b = (torch.randn(sizes.matrix, sizes.matrix) for _ in range(2))
    cases: Cases = {"sgemm": lambda: torch.mm(a, b)}
    cases |= {
        f"{how}, {level}": call
        for level, (calls, _) in moving.items()
        for how, call in calls.items()
    }
    table = list(operators(sizes, compiled))
    cases |= {operator.name: operator.make() for operator in table}
    rows = {row.name: row for row in take_turns(cases, rounds)}
    bandwidth = {
        how: {
            level: moved / _seconds(rows[f"{how}, {level}"])
            for level, (_, moved) in moving.items()
        }
        for how in ("copy", "in place")
    }
    peak = 2 * sizes.matrix**3 / _seconds(rows["sgemm"])
    found = [
        _placed(operator, rows[operator.name], bandwidth, peak, levels)
        for operator in table
    ]
    return {"bytes_per_second": bandwidth, "flops_per_second": peak, "operators": found}


def _seconds(row: BenchRow) -> float:
    return statistics.median(row.times) / 1e3


def _placed(
    operator: Operator,
    row: BenchRow,
    bandwidth: dict[str, dict[str, float]],
    peak: float,
    levels: dict[str, int],
) -> dict[str, Any]:
    """Returns where an operator is placed; its share is the time that the roof allows over the time it takes."""
    level = next(
        (name for name, size in levels.items() if 2 * operator.bytes <= size), "memory"
    )
    moving = (
        operator.bytes / bandwidth["in place" if operator.in_place else "copy"][level]
    )
    floor = max(moving, operator.flops / peak)
    return {
        "name": operator.name,
        "kind": operator.kind,
        "bytes": operator.bytes,
        "flops": operator.flops,
        "level": level,
        "cpu_ms": row.as_dict()["cpu_ms"],
        "share": round(floor / _seconds(row), 4),
        "limit": "bytes" if moving * peak > operator.flops else "arithmetic",
    }


def show(found: dict[str, Any]) -> None:
    """Print peaks and operators."""
    for how, rates in found["bytes_per_second"].items():
        print(
            f"{how:<8} (bytes read and written): "
            + "  ".join(f"{n} {r / 1e9:.1f} GB/s" for n, r in rates.items())
        )
    print(f"sgemm {found['flops_per_second'] / 1e9:.0f} GFLOP/s\n")
    print(
        "CPU ms min / median / max; flops per byte; the roof's time over its own; what the roof is"
    )
    for at in found["operators"]:
        low, mid, high = at["cpu_ms"]
        print(
            f"  {at['name']:<46} {low:8.2f} / {mid:8.2f} / {high:8.2f}  {at['flops'] / at['bytes']:7.1f}  "
            f"{at['share']:6.1%}  {at['limit']} ({at['level']})"
        )


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints and writes."""
    bench = Bench(
        "roofline", __doc__, arguments, rounds=11, peer="inductor", writes=True
    )
    os.environ.setdefault("QKEEL_NATIVE", "1")
    sizes = TOY if bench.toy else Sizes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = measure(sizes, bench.rounds, bench.compiled)
    show(found)
    bench.write(
        "roofline",
        about={"compiled_kernels": kernels_ready(), "sizes": dataclasses.asdict(sizes)},
        **found,
    )


if __name__ == "__main__":
    main()
