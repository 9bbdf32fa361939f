"""Commands that look at something: explain, scan, check, replay, export, bench."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, final

import torch
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

from qkeel.audit import Geometry, as_json, table
from qkeel.audit.check import check as judge
from qkeel.audit.check import check_checkpoint, is_run
from qkeel.audit.scan import scan as read
from qkeel.autopilot import replay as replayed
from qkeel.cli.commands import FAILED, OK
from qkeel.cli.parameters import JsonSwitch, Switch, Unset
from qkeel.errors import DataError, InvalidValueError, QkeelError, RunDirectoryError, unknown
from qkeel.frames import Frame, TableFiles
from qkeel.kernels.choose import KERNELS
from qkeel.lab.build_run import build_decoder, learning_rate, rules
from qkeel.lab.config import ModelConfig, RunConfig
from qkeel.metrics import HARMFUL_LOGIT, Status
from qkeel.monitor import PlannedRates
from qkeel.monitor.sinks import load
from qkeel.ops import attention
from qkeel.options import lookup, parse
from qkeel.records import RunDirectory, disk
from qkeel.remedies import ALIASES, REMEDIES, apply, canonical, note
from qkeel.remedies import parse as remedies_of
from qkeel.remedies.retrofit import convert as write_converted
from qkeel.sites import find_sites
from qkeel.spec import PRESETS, AttentionSpec, ReRope, Rope, Softcap
from qkeel.spec.call import make_call
from qkeel.spec.presets import attention_spec
from qkeel.version import VERSION

# The formula and the source of a preset or a remedy, as `qkeel explain` prints them.

_LENGTH = 512  # tokens; for the remedies whose starting scale depends on the training length


def explain(text: str) -> str:
    """Returns the line, the source and the formula of a preset, or of remedies on the baseline.

    A remedy on steps, the loss or a block has a rule; the attention formula is printed if a remedy changes it.
    """
    terms = parse(text)
    names = [term.name for term in terms]
    if len(names) == 1 and names[0] in PRESETS:
        row = PRESETS[names[0]]
        given = text.partition(":")[2]
        line = f"{names[0]} with {given}; as published: {row.line}" if given else row.line
        return f"{text}: {line}\nsource: {row.source}\n\n{attention_spec(text).explain()}"
    for name in names:
        if name not in REMEDIES and name not in ALIASES:
            raise unknown("preset or remedy", name, {*PRESETS, *REMEDIES, *ALIASES})
    about, found = note(text), rules(text)
    if len(found) < len(remedies_of(text)):
        found.append(_formula(text))
    elif found:
        found.append("what attention computes stays the model's own")
    return "\n".join([f"{canonical(text)}: {about.line}", f"source: {about.source}", "", *found])


def _formula(text: str) -> str:
    decoder = build_decoder(ModelConfig(d_model=8, n_layers=1, n_heads=2), vocab_size=2)
    apply(text, decoder, torch.optim.AdamW(decoder.parameters()), train_length=_LENGTH)
    return find_sites(decoder)[0].spec.explain()


# `qkeel scan`: a checkpoint read head by head, with a progress bar.


def scan(
    checkpoint: Path,
    /,
    *,
    n_heads: Unset[int] = None,
    n_kv_heads: Unset[int] = None,
    layout: Unset[Literal["blocks", "groups"]] = None,
    every_head: Switch = False,
    tensors: Switch = False,
    tensors_only: Switch = False,
    json_: JsonSwitch = False,
) -> int:
    """Read a checkpoint without running it: per layer and head, norms of the q and k weights and the logits they allow.

    Exit code 1 if a weight is NaN or infinite.

    Args:
        checkpoint: A .safetensors file, a folder of shards, or a Hugging Face folder.
        n_heads: Query heads per layer, if config.json does not give them.
        n_kv_heads: Key heads per layer, if config.json does not give them.
        layout: Order in a fused qkv weight: blocks is [q | k | v], groups is queries, key, value per key head.
        every_head: One line per head instead of the largest of each layer.
        tensors: Also print a table of all tensors.
        tensors_only: Print only the table of all tensors; attention need not be recognised.
        json_: Print everything as JSON.
    """
    flags = Geometry(n_heads=n_heads, n_kv_heads=n_kv_heads, layout=layout)
    refuse_hub_name(checkpoint)
    with progress_bar() as on_progress:
        found = read(checkpoint, flags=flags, on_progress=on_progress, heads=not tensors_only)
    if json_:
        print(json.dumps(as_json(found)))
    else:
        print(table(found, every_head=every_head, tensors=tensors or tensors_only))
    return FAILED if any(t.non_finite for t in found.tensors) else OK


def refuse_hub_name(path: Path) -> None:
    """Raise an error if the path is the name of a model on the Hugging Face hub.

    Raises: DataError: there is no such file or folder, and it looks like a name of the hub.
    """
    if not path.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(path)) and path.suffix != ".safetensors":
        raise DataError(f"{path} does not exist. It looks like a hub name: download it with hf download {path}")


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading")
        yield lambda done, total: progress.update(task, completed=done, total=total)


# `qkeel check`: is the attention of a run or a checkpoint healthy? One sentence, and an exit code for CI.


def check(
    path: Path,
    /,
    *,
    threshold: float = HARMFUL_LOGIT,
    table: Switch = False,
    strict: Switch = False,
    n_heads: Unset[int] = None,
    n_kv_heads: Unset[int] = None,
    json_: JsonSwitch = False,
) -> int:
    """Say in one sentence whether the attention of a run or a checkpoint is healthy.

    Exit code 0 if it is, 1 if not, 2 for wrong usage. The weights of a checkpoint give an upper bound on its logits; a
    bound over the threshold gives "not known", with exit code 0, or 1 with --strict. In Python: qkeel.check(model,
    batch).

    Args:
        path: Directory of a run, or a .safetensors file, a folder of shards, or a Hugging Face folder.
        threshold: Largest accepted attention logit, in nats.
        table: Also print the numbers of each layer.
        strict: Also exit with code 1 if the answer cannot be decided from the weights alone.
        n_heads: Query heads per layer of a checkpoint, if config.json does not give them.
        n_kv_heads: Key heads per layer of a checkpoint, if config.json does not give them.
        json_: Print status, sentence, largest logit and threshold as JSON.
    """
    if not threshold > 0:
        raise InvalidValueError(f"expected a threshold above 0 nats, got {threshold:g}")
    if is_run(path):
        found = judge(path, threshold=threshold)
    else:
        refuse_hub_name(path)
        with progress_bar() as on_progress:
            found = check_checkpoint(path, Geometry(n_heads=n_heads, n_kv_heads=n_kv_heads), threshold, on_progress)
    if json_:
        largest = found.largest if math.isfinite(found.largest) else None
        said = {"status": str(found.status), "sentence": found.sentence, "largest": largest, "threshold": threshold}
        print(json.dumps(said))
    else:
        print(found)
        if table and found.rows:
            print(found.table())
    return FAILED if found.status is Status.NOT_HEALTHY or (strict and not found.healthy) else OK


# `qkeel replay`: what a policy of the autopilot would have done on a recorded run.


def replay(run: Path, /, *, policy: Annotated[str, Parameter(alias="-p")] = "ladder") -> int:
    """Print what a policy of the autopilot would have done on a recorded run, when and why.

    The records do not change: after the policy's first action, they show what happened without it.

    Args:
        run: The directory of a watched or trained run.
        policy: Name of the policy with its options, like ladder:threshold=50.
    """
    found = replayed(run, policy, planned=_planned(RunDirectory(run)))
    for one in found:
        print(one)
    print(f"{len(found)} decisions and effects of {policy} on {run}" if found else f"{policy} would not have acted")
    return OK


def _planned(run: RunDirectory) -> PlannedRates | None:
    """The schedule of a run of the lab; that of a watched one is in its events, where it was known."""
    try:
        config = RunConfig.from_dict(run.config())
    except (KeyError, TypeError, ValueError, QkeelError):
        return None
    return PlannedRates.of([learning_rate(config.optim, step, config.steps) for step in range(config.steps)])


# `qkeel export`: the records of a run as tables.


def export(run: Path, /, *, to: Literal["csv", "parquet"], out: Unset[Path] = None) -> int:
    """Write the records of a run as tables, CSV or Parquet.

    The files are steps (one row per record), heads (one row per record, layer and head), and eval_steps and eval_heads
    (the same for passes in evaluation mode). The run is not changed.

    Args:
        run: Directory of a run or of a watched model.
        to: The format: csv, or parquet, which needs pyarrow.
        out: The folder to write; it must be new or empty [default: NAME-tables].
    """
    loaded = load(run)
    frames: dict[str, Frame] = {
        "steps": loaded.steps,
        "heads": loaded.heads,
        "eval_steps": loaded.eval_steps,
        "eval_heads": loaded.eval_heads,
    }
    place = out or Path(f"{run.resolve().name}-tables")
    files = TableFiles(place, to)
    if not disk.make_directory(place) and any(place.iterdir()):
        raise RunDirectoryError(f"expected a new or empty folder to write tables to, but {place} is not empty")
    for name, frame in frames.items():
        if len(frame):
            files.append(name, frame)
    for path in files.close():
        print(path)
    return OK


# `qkeel bench`: the attention kernels timed side by side on this machine.
#
# It prints one line for each call of a grid, or everything as one JSON object. The grid has one call of each kind that
# kernels differ on.
#
# Timing is interleaved: A B C, C B A, …; process CPU time; the ratio to a base taken round by round. Wall time says
# little on a shared machine and absolute times belong to one machine, so a table shows min / median / max of CPU
# milliseconds and the median over rounds of case / base *in the same round*. On a GPU the milliseconds are those
# between two events of its stream.


def bench(
    *,
    size: Literal["quick", "full", "toy"] = "quick",
    device: Unset[Literal["cpu", "cuda"]] = None,
    json_: JsonSwitch = False,
) -> int:
    """Time every attention kernel on this machine, side by side.

    Prints the median time of the first kernel and, for every other one, the ratio to it: least / median / greatest of
    the rounds. It uses one thread. Times are process time on a CPU and stream time on a GPU. `impl=` in code pins a
    kernel.

    Args:
        size: quick takes one or two minutes (float32, heads of 64); full about ten; toy only shows that it runs.
        device: Where to measure [default: cuda if there is one].
        json_: Print one JSON object with everything.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise InvalidValueError("expected a CUDA device for --device cuda, but torch sees none; use --device cpu")
    settle()
    torch.set_num_threads(1)
    device = device or ("cuda" if available else "cpu")
    about, calls = machine(device), []
    if not json_:
        print("  ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    for cell in grid(SIZES[size], device):
        rows = measure(cell, SIZES[size])
        if json_:
            times = [row.as_dict() for row in rows]
            calls.append({"cell": dataclasses.asdict(cell), "rows": times, "order": fastest_first(rows)})
        elif rows:
            print(call_line(cell, rows), flush=True)
    if json_:
        print(json.dumps({"about": about, "calls": calls}))
    return OK


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
    """Returns the device, the versions and the processor that the times belong to."""
    about = {"device": device, "qkeel": VERSION, "torch": torch.__version__, "processor": _processor()}
    about["python"] = platform.python_version()
    about["vectors"] = torch.backends.cpu.get_cpu_capability()
    return about if device == "cpu" else {**about, "gpu": torch.cuda.get_device_name()}


def _processor() -> str:
    """Returns the processor's name as the system gives it."""
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
    """One case: its milliseconds per round, and its ratios to the base in the same round."""

    name: str
    times: list[float]
    ratios: list[float]

    @property
    def ratio(self) -> float:
        """The median over rounds of case / base in the same round."""
        return statistics.median(self.ratios)

    def as_dict(self) -> dict[str, Any]:
        """Returns the row in the form of results files."""
        return {
            "case": self.name,
            "cpu_ms": [round(f(self.times), 4) for f in (min, statistics.median, max)],
            "ratio": [round(f(self.ratios), 4) for f in (min, statistics.median, max)],
        }


def processor_ms(case: Callable[[], object], calls: int) -> float:
    """Returns milliseconds of process CPU time per call."""
    start = time.process_time()
    for _ in range(calls):
        case()
    return (time.process_time() - start) * 1e3 / calls


def gpu_ms(case: Callable[[], object], calls: int) -> float:
    """Returns milliseconds of the current CUDA stream per call."""
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
    """Times every case once a round, the order reversed each round, and returns a row per case.

    Args:
        cases: name -> what to call. base: the case that ratios refer to. rounds: the number of rounds. warmup: calls
            of each case before the first round. calls: consecutive calls of a case in a round. clock: returns the
            milliseconds per call of that many calls.
    """
    for case in cases.values():
        for _ in range(warmup):
            case()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for i in range(rounds):
        for name in cases if i % 2 == 0 else reversed(list(cases)):
            times[name].append(clock(cases[name], calls))
    return [BenchRow(n, ts, [a / b for a, b in zip(ts, times[base])]) for n, ts in times.items()]


# What lies between q·k and the weights. "folded": nothing but the scale and causality; "masked": a mask; "capped": a
# cap; "distance": a position that does not fold into q and k.
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
CACHED = 1024  # keys that one query sees in decoding
AT_ONCE = 1024  # tokens of a batch of short sequences


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The amount of work that is measured."""

    dtypes: tuple[str, ...] = tuple(DTYPES)
    head_dims: tuple[int, ...] = HEAD_DIMS
    forms: tuple[Form, ...] = tuple(SPECS)
    statistics: tuple[Statistics, ...] = ("none", "exact")
    heads: int = 8
    rounds: int = 7
    shrink: int = 1  # tokens are divided by it, which only shows that everything runs


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
    """Returns the times of all kernels that support the call, relative to the first; [] if only one does."""
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
    """Returns q, k, v as projections lay them out: the heads of a token next to each other in memory."""
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
    """Returns the whole call as a user makes it, with its backward pass if the cell has a gradient."""
    spec, above = SPECS[cell.form], torch.randn_like(tensors[0])

    def forward() -> Tensor:
        if cell.statistics == "exact":
            return attention(*tensors, spec=spec, mask=mask, impl=name, stats=True)[0]
        return attention(*tensors, spec=spec, mask=mask, impl=name)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), tensors, above)

    return both if cell.gradient else forward


# `qkeel convert`: a checkpoint with q/k norms as an architecture that others load.


def convert(
    checkpoint: Path,
    /,
    *,
    to: Literal["qwen3", "olmo2", "gemma3"],
    out: Path,
    norm_eps: Unset[float] = None,
) -> int:
    """Write a checkpoint with q/k norms as a Qwen3, OLMo 2 or Gemma 3 checkpoint, with the same outputs.

    The norms come from qkeel.retrofit(model, "qk_norm", batches); save the model with save_pretrained first. Nothing is
    run or unpickled; what the architecture cannot compute is refused with the reason.

    Args:
        checkpoint: A Hugging Face folder: config.json and safetensors, in one file or in shards.
        to: The architecture to write.
        out: The folder to write; it must be new or empty.
        norm_eps: The eps of the q/k norms, if it differs from rms_norm_eps in config.json.
    """
    print(write_converted(checkpoint, to, out, norm_eps=norm_eps))
    return OK
