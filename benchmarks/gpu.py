"""What the GPU kernels take, as ratios to what cannot be avoided: `make gpu`, or `python -m benchmarks.gpu`.

Five tables, interleaved, CUDA events, the L2 cache overwritten before every call:

- norm and rotation of q and k against a copy of both (forward) and against five passes over them (with backward);
- statistics against the attention forward they belong to;
- the bracket from the logsumexp against attention forward and backward;
- heads of weights copied with their norms, interpolated and scaled against a copy of them;
- lalr and qk_clip against the fused AdamW step.

Writes benchmarks/results/<device>-<date>.json and the tables as Markdown next to it. --toy with --device cpu and
TRITON_INTERPRET=1 only shows that it runs: nothing it prints then says anything of a GPU.
"""

from __future__ import annotations

import dataclasses
import platform
import re
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import flex_maxima
from benchmarks.measure import Bench, Case, Cases, Row, about, take_turns
from benchmarks.steps import clip_cases, optimizer_cases
from qkeel.functional.rope import rope_frequencies, rope_table
from qkeel.kernels.stats.logsumexp import attend_with_logsumexp, bracket
from qkeel.kernels.triton import available, norm_rope
from qkeel.kernels.triton import statistics as row_kernels
from qkeel.spec import AttentionSpec
from qkeel.spec.call import make_call

COPY, PASSES, ATTENTION, BOTH = "copy of q and k", "five passes", "attention forward", "attention forward and backward"
HEADS = "copy of all heads"


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

    def __call__(self, case: Case, calls: int) -> float:
        """Returns the milliseconds of one call."""
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
        return norm_rope.norm_rope(x, g, (cos, sin), 1, 1e-6, True)

    def made_again(x: Tensor, g: Tensor) -> Tensor:
        return norm_rope.norm_rope(x, g, (cos, sin), 1, 1e-6, False)

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
    both["qkeel, Triton, x made again"] = lambda: _gradients(
        [made_again(x, g) for x, g in zip(leaves, gains)], [*leaves, *gains], above
    )
    return forward, both


def _gradients(outs: list[Tensor], leaves: list[Tensor], above: list[Tensor]) -> object:
    return torch.autograd.grad(outs, leaves, above)


def statistics_cases(sizes: Sizes, device: str, compiled: bool) -> tuple[Cases, Cases]:
    """Returns statistics next to attention forward; the bracket from the logsumexp next to forward and backward."""
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
        "statistics alone, Triton": lambda: row_kernels.row_statistics(*bare[:2], scale, causal=True),
    }
    if compiled:
        mask = flex_maxima.visible(call)
        forward["FlexAttention"] = lambda: flex_maxima.compiled()(*bare, block_mask=mask, enable_gqa=True)
        forward["FlexAttention, maxima and logsumexp"] = lambda: flex_maxima.attend_with_maxima(call)
    return forward, {BOTH: train, "the same, bracket from its logsumexp": train_with_lse}


def heads_cases(sizes: Sizes, device: str) -> Cases:
    """Returns what lalr and qk_clip do with the query and key weights of all layers, and a copy of them."""
    counts = [n for _ in range(sizes.layers) for n in (sizes.heads, sizes.key_heads)]
    views = [torch.randn(n, sizes.head_dim, sizes.dim, device=device) for n in counts]
    room, table = [torch.empty_like(view) for view in views], available.head_table(views)
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


def tables(sizes: Sizes, device: str, rounds: int, compiled: bool) -> dict[str, list[Row]]:
    """Returns every table: its title, and its rows, of which the first is what the ratios are to."""
    clock, found = Clock(device), {}
    shape = f"{sizes.heads} + {sizes.key_heads} heads, d {sizes.head_dim}, {sizes.tokens} tokens, {sizes.dtype}"
    weights = f"{sizes.layers} layers, {sizes.heads} + {sizes.key_heads} heads, d {sizes.head_dim}, width {sizes.dim}"
    model, size = (
        f"{sizes.layers} layers, {sizes.heads} heads, width {sizes.dim}",
        (sizes.layers, sizes.heads, sizes.dim),
    )

    def add(title: str, cases: Cases) -> None:
        found[title] = take_turns(cases, rounds, warmup=3 if clock.cuda else 1, clock=clock)

    forward, both = norm_rope_cases(sizes, device, compiled)
    add(f"norm and rotation, forward; {shape}", forward)
    add(f"norm and rotation, forward and backward; {shape}", both)
    forward, both = statistics_cases(sizes, device, compiled)
    add(f"statistics; {shape}", forward)
    add(f"logsumexp only; {shape}", both)
    add(f"heads of weights, float32; {weights}", heads_cases(sizes, device))
    add(f"optimizer step; {model}", optimizer_cases(*size, device))
    add(f"qk_clip next to the step; {model}", clip_cases(*size, device))
    return found


def markdown(notes: dict[str, Any], found: dict[str, list[Row]]) -> str:
    """Returns the tables as docs/gpu.md has them."""
    lines = [f"{notes['device']}, torch {notes['torch']}, Triton {notes['triton']}, {notes['date']}.", ""]
    for title, rows in found.items():
        lines += [f"{title}; ratio to {rows[0].name}, median of {notes['rounds']} rounds", ""]
        lines += ["| | ms min / median / max | ratio |", "|---|---|---|"]
        for row in rows:
            low, mid, high = min(row.times), statistics.median(row.times), max(row.times)
            lines.append(f"| {row.name} | {low:.3f} / {mid:.3f} / {high:.3f} | {row.ratio:.3f} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints and writes."""
    flags = {"--device": {"choices": ("cuda", "cpu"), "default": "cuda"}}
    peer = "torch.compile and FlexAttention"
    bench = Bench("gpu", __doc__, arguments, rounds=25, peer=peer, writes=True, flags=flags)
    device = bench.options.device
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here; --device cpu --toy with TRITON_INTERPRET=1 shows that it runs")
    if not available.loaded():
        raise SystemExit("Triton cannot be imported here; the warning above says why")
    import triton

    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu, {platform.machine()}, interpreter"
    notes = about("make gpu", bench.rounds) | {"device": name, "triton": triton.__version__}
    found = tables(TOY if bench.toy else Sizes(), device, bench.rounds, bench.compiled)
    text = markdown(notes, found)
    print(text)
    rows = {title: {"base": part[0].name, "rows": [row.as_dict() for row in part]} for title, part in found.items()}
    path = bench.write(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"), about=notes, tables=rows)
    path.write_text(path.read_text().replace("cpu_ms", "ms"))
    path.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
