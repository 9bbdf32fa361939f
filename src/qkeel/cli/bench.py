"""Times attention kernels side by side for `qkeel bench`, with the timing functions that all benchmarks use.

This module imports neither cyclopts nor anything else from the command line, so that it runs wherever torch does.

The grid has one call of each kind for which kernels may differ. Timing is interleaved: A B C, C B A, and so on. Wall
time is unreliable on a shared machine, and absolute times apply to one machine only. Results are therefore given as
milliseconds of process CPU time and as the ratio case / base within the same round, each with its minimum, median and
maximum over rounds. On a GPU, the milliseconds are measured between two events of its stream.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor

from qkeel.kernels.choose import KERNELS
from qkeel.ops import attention
from qkeel.options import lookup
from qkeel.spec import AttentionSpec, ReRope, Rope, Softcap
from qkeel.spec.call import make_call
from qkeel.version import VERSION


def call_line(cell: Cell, rows: list[BenchRow]) -> str:
    """Returns one line: the call, the first kernel's time, the ratios of the others, and the fastest.

    >>> cell = Cell(device="cpu", dtype="float32", head_dim=64, form="folded", gradient=True, statistics="none",
    ...             tokens=128)
    >>> call_line(cell, [BenchRow("sdpa", [1.0, 1.1, 1.4], [1.0, 1.0, 1.0])])
    'folded   float32  d 64  backward  statistics none  T 128   sdpa 1.10 ms  → sdpa'
    """
    base, *others = [(row.name, row.as_dict()) for row in rows]
    direction = "backward" if cell.gradient else "forward "
    what = f"{cell.form:<8} {cell.dtype:<8} d {cell.head_dim:<3} {direction}"
    what += f"  statistics {cell.statistics:<5} T {cell.tokens:<5}"
    ratios = "".join(f"  {name} " + " / ".join(f"{x:.2f}" for x in row["ratio"]) for name, row in others)
    return f"{what} {base[0]} {base[1]['cpu_ms'][1]:.2f} ms{ratios}  → {fastest_first(rows)[0]}"


def machine(device: str) -> dict[str, str]:
    """Returns the device, the processor and the versions with which the times were measured."""
    about = {"device": device, "qkeel": VERSION, "torch": torch.__version__, "processor": _processor()}
    about["python"] = platform.python_version()
    about["vectors"] = torch.backends.cpu.get_cpu_capability()
    return about if device == "cpu" else {**about, "gpu": torch.cuda.get_device_name()}


def _processor() -> str:
    """Returns the processor's name as reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "cpu part"))]
    return f"{platform.machine()} {names[0] if names else platform.processor()}".strip()


# glibc maps and unmaps tensors over 32 MiB again each time, which makes eager code look up to 3x slower.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def settle(threads: int = 1) -> None:
    """Restarts this process once with the same command, fixed allocator settings and `threads` threads.

    The allocator reads its settings when the process starts.
    """
    wanted = {**MALLOC, "OMP_NUM_THREADS": str(threads)}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        sys.stdout.flush()
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@final
@dataclasses.dataclass(frozen=True, slots=True)
class BenchRow:
    """One case: its milliseconds per call in each round, and their ratios to the base in the same round."""

    name: str
    times: list[float]
    ratios: list[float]

    @property
    def ratio(self) -> float:
        """The median over rounds of case / base in the same round."""
        return statistics.median(self.ratios)

    def as_dict(self) -> dict[str, Any]:
        """Returns the row in the format of results files."""
        return {
            "case": self.name,
            "cpu_ms": [round(f(self.times), 4) for f in (min, statistics.median, max)],
            "ratio": [round(f(self.ratios), 4) for f in (min, statistics.median, max)],
        }


def processor_ms(case: Callable[[], object], calls: int) -> float:
    """Returns the milliseconds of process CPU time per call."""
    start = time.process_time()
    for _ in range(calls):
        case()
    return (time.process_time() - start) * 1e3 / calls


def gpu_ms(case: Callable[[], object], calls: int) -> float:
    """Returns the milliseconds per call on the current CUDA stream."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        case()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / calls


def interleave(
    cases: Mapping[str, Callable[[], object]],
    base: str,
    rounds: int = 15,
    calls: int = 1,
    warmup: int = 2,
    clock: Callable[[Callable[[], object], int], float] = processor_ms,
) -> list[BenchRow]:
    """Times every case once per round, reversing the order each round, and returns a row per case.

    Args:
        cases: the functions to call, by name.
        base: the case to which the ratios refer.
        rounds: the number of rounds.
        calls: the number of consecutive calls of a case in a round.
        warmup: the number of calls of each case before the first round.
        clock: a function of a case and a number of calls that returns the milliseconds per call.
    """
    for case in cases.values():
        for _ in range(warmup):
            case()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds):
        for name in cases if i % 2 == 0 else reversed(list(cases)):
            times[name].append(clock(cases[name], calls))
    return [BenchRow(n, ts, [a / b for a, b in zip(ts, times[base])]) for n, ts in times.items()]


# What is applied between q·k and the weights. "folded": only the scale and causality; "masked": a mask; "capped": a
# cap; "distance": a position encoding that cannot be folded into q and k.
Form = Literal["folded", "masked", "capped", "distance"]
Statistics = Literal["none", "exact"]
HEAD_DIMS = (64, 128)
TOKENS = (1, 128, 512, 2048)  # query tokens
SPECS: dict[Form, AttentionSpec] = {
    "folded": AttentionSpec(position=Rope()),
    "masked": AttentionSpec(position=Rope()),
    "capped": AttentionSpec(position=Rope(), cap=Softcap(50.0)),
    "distance": AttentionSpec(position=ReRope(window=256)),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CACHED = 1024  # keys that one query attends to in decoding
AT_ONCE = 1024  # tokens of a batch of short sequences


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The amount of work to measure."""

    dtypes: tuple[str, ...] = tuple(DTYPES)
    head_dims: tuple[int, ...] = HEAD_DIMS
    forms: tuple[Form, ...] = tuple(SPECS)
    statistics: tuple[Statistics, ...] = ("none", "exact")
    heads: int = 8
    rounds: int = 7
    shrink: int = 1  # token counts are divided by it, to check only that everything runs


SIZES = {
    "full": Size(),
    "quick": Size(dtypes=("float32",), head_dims=(64,), forms=("folded", "masked"), rounds=5),
    "toy": Size(dtypes=("float32",), head_dims=(64,), heads=1, rounds=1, shrink=64),
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One call of the grid."""

    device: str
    dtype: str
    head_dim: int
    form: Form
    gradient: bool
    statistics: Statistics
    tokens: int


def grid(size: Size, device: str) -> Iterator[Cell]:
    """Yields every call to measure. A call with one query token is decoding, which has no gradient."""
    for dtype, head_dim, form, asked in itertools.product(size.dtypes, size.head_dims, size.forms, size.statistics):
        for gradient, tokens in itertools.product((False, True), TOKENS):
            if not (gradient and tokens == 1):
                yield Cell(
                    device=device,
                    dtype=dtype,
                    head_dim=head_dim,
                    form=form,
                    gradient=gradient,
                    statistics=asked,
                    tokens=max(1, tokens // size.shrink),
                )


def measure(cell: Cell, size: Size) -> list[BenchRow]:
    """Returns the times of all kernels that support the call, relative to the first; [] if fewer than two do."""
    tensors = _tensors(cell, size)
    mask = None
    if cell.form == "masked":
        mask = torch.ones(tensors[0].shape[0], tensors[1].shape[2], dtype=torch.bool, device=cell.device)
        mask[:, 0] = False  # a padded batch
    call = make_call(SPECS[cell.form], *tensors, mask=mask)
    names = [name for name, kernel in KERNELS.items() if kernel.supports(call) is None]
    if len(names) < 2:
        return []
    cases = {name: _case(cell, tensors, mask, name) for name in names}
    clock = processor_ms if cell.device == "cpu" else gpu_ms
    calls = max(1, 16 // cell.tokens) if size.shrink == 1 else 1
    return interleave(cases, names[0], size.rounds, calls, warmup=1, clock=clock)


def fastest_first(rows: list[BenchRow]) -> tuple[str, ...]:
    """Returns the names of the kernels, sorted by their median ratio."""
    return tuple(row.name for row in sorted(rows, key=lambda row: row.ratio))


def _tensors(cell: Cell, size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v with the memory layout that projections produce: the heads of a token are adjacent."""
    tokens = cell.tokens
    keys = CACHED // size.shrink if tokens == 1 else tokens
    batch = 1 if tokens == 1 else max(1, AT_ONCE // size.shrink // tokens)
    dtype = lookup("dtype", DTYPES, cell.dtype)
    rng = torch.Generator().manual_seed(0)

    def one(t: int) -> Tensor:
        x = torch.randn(batch, t, size.heads, cell.head_dim, generator=rng).to(cell.device, dtype)
        return x.transpose(1, 2).requires_grad_(cell.gradient)

    return one(tokens), one(keys), one(keys)


def _case(cell: Cell, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, name: str) -> Callable[[], object]:
    """Returns the complete call as a user would make it, with its backward pass if the cell has a gradient."""
    spec, above = SPECS[cell.form], torch.randn_like(tensors[0])

    def forward() -> Tensor:
        if cell.statistics == "exact":
            return attention(*tensors, spec=spec, mask=mask, impl=name, stats=True)[0]
        return attention(*tensors, spec=spec, mask=mask, impl=name)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), tensors, above)

    return both if cell.gradient else forward
