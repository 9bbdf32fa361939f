"""What the GPU kernels take, as ratios to what cannot be avoided: `make gpu`, or `python -m benchmarks.gpu`.

Five tables, interleaved, CUDA events, the L2 cache overwritten before every call:

- norm and rotation of q and k against a copy of both (forward) and against five passes over them (with backward);
- statistics against the attention forward they belong to;
- the bracket from the logsumexp against attention forward and backward;
- heads of weights copied with their norms, moved and scaled against a copy of them;
- lalr and qk_clip against the fused AdamW step.

Writes benchmarks/results/<device>-<date>.json and the tables as Markdown beside it. --toy with --device cpu and
TRITON_INTERPRET=1 only shows that it runs: nothing it prints then says anything of a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import qkeel
from benchmarks.measure import Row
from benchmarks.steps import BASE as STEP
from benchmarks.steps import clip_cases, optimizer_cases
from qkeel.functional.rope import rope_frequencies, rope_table
from qkeel.kernels import flex, triton_norm_rope, triton_statistics
from qkeel.kernels.logsumexp import attend_with_logsumexp, bracket
from qkeel.kernels.native import gpu
from qkeel.spec import AttentionSpec
from qkeel.spec.call import make_call

COPY, PASSES, ATTENTION, BOTH = "copy of q and k", "five passes", "attention forward", "attention forward and backward"
HEADS = "copy of all heads"
Cases = dict[str, Callable[[], object]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured; the default is Qwen3-8B at 8192 tokens."""

    tokens: int = 8192
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    layers: int = 8
    dim: int = 2048
    dtype: torch.dtype = torch.bfloat16


TOY = Sizes(tokens=6, heads=2, key_heads=1, head_dim=16, layers=2, dim=16, dtype=torch.float16)


class Clock:
    """Milliseconds of single calls on a device."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        # Larger than any L2: what a call reads is not there yet. The host runs ahead while it is overwritten.
        self.cache = torch.empty(1 << 28, dtype=torch.float32, device=device) if self.cuda else torch.empty(1)

    def time(self, case: Callable[[], object]) -> float:
        """Of one call."""
        if not self.cuda:
            start = time.perf_counter()
            case()
            return (time.perf_counter() - start) * 1e3
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):
            self.cache.zero_()
        before.record()
        case()
        after.record()
        after.synchronize()
        return before.elapsed_time(after)

    def interleave(self, cases: Cases, base: str, rounds: int) -> list[Row]:
        """Every case once a round, the order reversed each round; ratios of the same round."""
        for case in cases.values():
            for _ in range(3 if self.cuda else 1):
                case()
        times: dict[str, list[float]] = {name: [] for name in cases}
        for i in range(rounds):
            for name in list(cases) if i % 2 == 0 else list(reversed(cases)):
                times[name].append(self.time(cases[name]))
        return [Row(n, ts, [a / b for a, b in zip(ts, times[base])]) for n, ts in times.items()]


def norm_rope_cases(sizes: Sizes, device: str, compiled: bool) -> tuple[Cases, Cases]:
    """RMS norm with a gain per dimension and RoPE: forward, and forward with backward."""
    shapes = [(1, sizes.tokens, n, sizes.head_dim) for n in (sizes.heads, sizes.key_heads)]
    q, k = (torch.randn(s, device=device, dtype=sizes.dtype).transpose(1, 2) for s in shapes)
    above, room = [torch.randn_like(x) for x in (q, k)], [torch.empty_like(x) for x in (q, k)]
    gain = torch.rand(sizes.head_dim, device=device, dtype=sizes.dtype) + 0.5
    positions = torch.arange(sizes.tokens, device=device)[None, None]
    cos, sin = rope_table(positions, rope_frequencies(sizes.head_dim), torch.float32)
    wide_cos, wide_sin = (torch.cat([x, x], -1).to(sizes.dtype) for x in (cos, sin))

    def fused(x: Tensor, g: Tensor) -> Tensor:
        return triton_norm_rope.norm_rope(x, g, (cos, sin), 1, 1e-6, True)

    def anew(x: Tensor, g: Tensor) -> Tensor:
        return triton_norm_rope.norm_rope(x, g, (cos, sin), 1, 1e-6, False)

    def eager(x: Tensor, g: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], g, 1e-6)
        half = x.shape[-1] // 2
        return y * wide_cos + torch.cat([-y[..., half:], y[..., :half]], -1) * wide_sin

    def copy() -> None:
        for to, x in zip(room, (q, k)):
            to.copy_(x)

    def passes() -> None:
        copy()
        for to, x, up in zip(room, (q, k), above):
            torch.add(x, up, out=to)

    ways = {"qkeel, Triton": fused, "eager F.rms_norm and rotate_half": eager}
    if compiled:
        ways["torch.compile, the same"] = torch.compile(eager)
    forward: Cases = {COPY: copy}
    both: Cases = {PASSES: passes}
    leaves, gains = [x.detach().requires_grad_() for x in (q, k)], [gain.clone().requires_grad_() for _ in range(2)]
    for name, way in ways.items():
        forward[name] = lambda way=way: [way(x, gain) for x in (q, k)]
        both[name] = lambda way=way: _gradients([way(x, g) for x, g in zip(leaves, gains)], [*leaves, *gains], above)
    both["qkeel, Triton, x made anew"] = lambda: _gradients(
        [anew(x, g) for x, g in zip(leaves, gains)], [*leaves, *gains], above
    )
    return forward, both


def _gradients(outs: list[Tensor], leaves: list[Tensor], above: list[Tensor]) -> object:
    return torch.autograd.grad(outs, leaves, above)


def statistics_cases(sizes: Sizes, device: str, compiled: bool) -> tuple[Cases, Cases]:
    """Beside attention forward; and the bracket from the logsumexp beside forward and backward."""
    shapes = [(1, n, sizes.tokens, sizes.head_dim) for n in (sizes.heads, sizes.key_heads, sizes.key_heads)]
    q, k, v = (torch.randn(s, device=device, dtype=sizes.dtype, requires_grad=True) for s in shapes)
    bare = [x.detach() for x in (q, k, v)]
    call, scale = make_call(AttentionSpec(), *bare), sizes.head_dim**-0.5
    tracked = make_call(AttentionSpec(), q, k, v)
    above = torch.randn_like(q)

    def attend() -> object:
        return F.scaled_dot_product_attention(*bare, is_causal=True, enable_gqa=True)

    def with_lse() -> object:
        pair = attend_with_logsumexp(call)
        return None if pair is None else bracket(call, pair[1], "bracket")

    def certified() -> object:
        pair = attend_with_logsumexp(call)
        return None if pair is None else bracket(call, pair[1], "max")

    def train() -> object:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), above)

    def train_with_lse() -> object:
        pair = attend_with_logsumexp(tracked)
        if pair is None:
            return None
        return torch.autograd.grad(pair[0], (q, k, v), above), bracket(call, pair[1], "bracket")

    forward: Cases = {
        ATTENTION: attend,
        "the same, bracket from its logsumexp": with_lse,
        "the same, certified maximum": certified,
        "statistics alone, Triton": lambda: triton_statistics.row_statistics(*bare[:2], scale, causal=True),
    }
    if compiled:
        mask = flex.visible(call)
        forward["FlexAttention"] = lambda: flex.compiled()(*bare, block_mask=mask, enable_gqa=True)
        forward["FlexAttention, maxima and logsumexp"] = lambda: flex.attend_with_maxima(call)
    return forward, {BOTH: train, "the same, bracket from its logsumexp": train_with_lse}


def heads_cases(sizes: Sizes, device: str) -> Cases:
    """What lalr and qk_clip do with the query and key weights of all layers, beside a copy of them."""
    counts = [n for _ in range(sizes.layers) for n in (sizes.heads, sizes.key_heads)]
    views = [torch.randn(n, sizes.head_dim, sizes.dim, device=device) for n in counts]
    room, table = [torch.empty_like(view) for view in views], gpu.head_table(views)
    old, close = table.copy(), torch.full((sum(counts),), 1 - 1e-6, device=device)
    ones, columns = torch.ones_like(close), [x.view(-1, 1, 1) for x in (1 - close).split(counts)]

    def measured() -> object:
        torch._foreach_copy_(room, views)
        return [torch.linalg.vector_norm(x, dim=(1, 2)) for x in room]

    return {
        HEADS: lambda: torch._foreach_copy_(room, views),
        "copied and measured, Triton": table.copy_and_norms,
        "copied and measured, torch": measured,
        "moved, Triton": lambda: table.move(old, close, None),
        "moved, torch": lambda: torch._foreach_lerp_(views, room, columns),
        "scaled, all heads over, Triton": lambda: table.scale(close),
        "scaled, no head over, Triton": lambda: table.scale(ones),
    }


def tables(sizes: Sizes, device: str, rounds: int, compiled: bool) -> dict[str, tuple[str, list[Row]]]:
    """Every table: its title, what its ratios are to, its rows."""
    clock = Clock(device)
    shape = f"{sizes.heads} + {sizes.key_heads} heads, d {sizes.head_dim}, {sizes.tokens} tokens, {sizes.dtype}"
    forward, both = norm_rope_cases(sizes, device, compiled)
    found = {
        f"norm and rotation, forward; {shape}": (COPY, clock.interleave(forward, COPY, rounds)),
        f"norm and rotation, forward and backward; {shape}": (PASSES, clock.interleave(both, PASSES, rounds)),
    }
    forward, both = statistics_cases(sizes, device, compiled)
    found[f"statistics; {shape}"] = ATTENTION, clock.interleave(forward, ATTENTION, rounds)
    found[f"logsumexp only; {shape}"] = BOTH, clock.interleave(both, BOTH, rounds)
    model = (sizes.layers, sizes.heads, sizes.dim)
    shape = f"{sizes.layers} layers, {sizes.heads} + {sizes.key_heads} heads, d {sizes.head_dim}, width {sizes.dim}"
    found[f"heads of weights, float32; {shape}"] = HEADS, clock.interleave(heads_cases(sizes, device), HEADS, rounds)
    shape = f"{sizes.layers} layers, {sizes.heads} heads, width {sizes.dim}"
    found[f"optimizer step; {shape}"] = STEP, clock.interleave(optimizer_cases(*model, device), STEP, rounds)
    found[f"qk_clip beside the step; {shape}"] = STEP, clock.interleave(clip_cases(*model, device), STEP, rounds)
    return found


def markdown(about: dict[str, object], found: dict[str, tuple[str, list[Row]]]) -> str:
    """The tables as they stand in docs/gpu.md."""
    lines = [f"{about['device']}, torch {about['torch']}, Triton {about['triton']}, {about['date']}.", ""]
    for title, (base, rows) in found.items():
        lines += [f"{title}; ratio to {base}, median of {about['rounds']} rounds", ""]
        lines += ["| | ms min / median / max | ratio |", "|---|---|---|"]
        for row in rows:
            low, mid, high = min(row.times), statistics.median(row.times), max(row.times)
            lines.append(f"| {row.name} | {low:.3f} / {mid:.3f} / {high:.3f} | {statistics.median(row.ratios):.3f} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, two rounds: only to see that it runs")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile and FlexAttention out")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here; --device cpu --toy with TRITON_INTERPRET=1 shows that it runs")
    if not gpu.loaded():
        raise SystemExit("Triton cannot be imported here; the warning above says why")
    import triton

    sizes, rounds = (TOY, 2) if args.toy else (Sizes(), args.rounds)
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"cpu, {platform.machine()}, interpreter"
    about: dict[str, object] = {
        "qkeel": qkeel.__version__,
        "device": device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "rounds": rounds,
        "command": "make gpu",
    }
    found = tables(sizes, args.device, rounds, not (args.toy or args.no_compile))
    print(markdown(about, found))
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    path = args.out / f"{name}-{about['date']}{'-toy' if args.toy else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {title: {"base": base, "rows": [row.as_dict() for row in part]} for title, (base, part) in found.items()}
    text = json.dumps({"about": about, "tables": rows}, indent=1, ensure_ascii=False).replace("cpu_ms", "ms")
    path.write_text(text + "\n")
    path.with_suffix(".md").write_text(markdown(about, found))
    print(f"written: {path} and {path.with_suffix('.md').name}")


if __name__ == "__main__":
    main()
