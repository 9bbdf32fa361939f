"""What the GPU kernels take, as ratios to what cannot be avoided: a section of `make gpu`.

`python -m benchmarks.on_gpu.kernels` has tables, interleaved, CUDA events, the L2 cache overwritten before every
call; --only norm, statistics or weights leaves the others out:

- norm and rotation of q and k against a copy of both (forward) and against five passes over them (with backward);
- statistics against the attention forward they belong to;
- lalr and qk_clip against the fused AdamW step.

--toy with --device cpu and TRITON_INTERPRET=1 only shows that it runs: nothing it prints then says anything of a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from benchmarks.measure import Bench, Cases
from benchmarks.native import Own, Passes, pass_cases
from benchmarks.on_gpu.machine import DEVICE, Clock, write
from benchmarks.steps import clip_cases, optimizer_cases
from qkeel.functional.rope import rope_frequencies, rope_table
from qkeel.kernels import triton_access as available
from qkeel.kernels.attention.flex import Flex
from qkeel.kernels.logits import triton_extremes as extremes
from qkeel.kernels.logits import triton_row_fields as row_fields
from qkeel.kernels.norm_rope.operator import norm_rope, norm_rope_two
from qkeel.spec import AttentionSpec
from qkeel.spec.call import make_call

ATTENTION = "attention forward"
AT_ONCE = "qkeel, Triton, q and k at once"
TRITON = torch.ops.qkeel_triton
PARTS = ("norm", "statistics", "weights")


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


TOY = Sizes(
    tokens=6, heads=2, key_heads=1, head_dim=16, layers=2, dim=16, dtype=torch.float16
)


def norm_rope_passes(sizes: Sizes, device: str, compiled: bool) -> Passes:
    """RMS norm with a gain per dimension and RoPE, q and k as Triton keeps what backward needs, or makes it again."""
    own: dict[str, Own] = {
        "qkeel, Triton": lambda x, gain, table: norm_rope(
            TRITON, x, gain, table, 1, 1e-6, True
        ),
        "qkeel, Triton, x made again": lambda x, gain, table: norm_rope(
            TRITON, x, gain, table, 1, 1e-6, False
        ),
    }
    shape = (1, sizes.tokens, sizes.heads, sizes.key_heads, sizes.head_dim)
    return Passes(shape, compiled, own, (device, sizes.dtype))


def at_once(passes: Passes, sizes: Sizes, back: bool) -> Callable[[], object]:
    """q and k together, and the way back."""
    q, k = (x.detach().requires_grad_() for x in passes.x)
    gains = passes.gain.clone().requires_grad_(), passes.gain.clone().requires_grad_()
    positions = torch.arange(sizes.tokens, device=q.device)[None, None]
    table = rope_table(positions, rope_frequencies(sizes.head_dim), torch.float32)

    def call() -> object:
        with torch.set_grad_enabled(back):
            out = norm_rope_two(TRITON, q, k, gains, table, (1, 1), 1e-6, (True, True))
        return torch.autograd.grad(out, (q, k, *gains), passes.above) if back else out

    return call


def statistics_cases(sizes: Sizes, device: str, compiled: bool) -> Cases:
    """Returns statistics next to attention forward."""
    shapes = [
        (1, n, sizes.tokens, sizes.head_dim)
        for n in (sizes.heads, sizes.key_heads, sizes.key_heads)
    ]
    q, k, v = (torch.randn(shape, device=device, dtype=sizes.dtype) for shape in shapes)
    call, scale = make_call(AttentionSpec(), q, k, v), sizes.head_dim**-0.5
    cases: Cases = {
        ATTENTION: lambda: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        ),
        "all statistics alone, Triton": lambda: row_fields.row_fields(
            q, k, scale, 10.0, causal=True
        ),
        "largest and smallest logit alone": lambda: extremes.extremes(
            q, k, scale, causal=True
        ),
    }
    if compiled:
        cases["FlexAttention"] = lambda: Flex()(call)
        cases["FlexAttention, maxima and logsumexp"] = lambda: Flex().with_maxima(call)
    return cases


def found(bench: Bench, sizes: Sizes, device: str, part: str) -> dict[str, Cases]:
    """The tables of one part: "norm", "statistics" or "weights"."""
    shape = f"{sizes.heads} + {sizes.key_heads} heads, d {sizes.head_dim}, {sizes.tokens} tokens, {sizes.dtype}"
    model, size = (
        f"{sizes.layers} layers, width {sizes.dim}",
        (sizes.layers, sizes.heads, sizes.dim),
    )
    if part == "norm":
        passes = norm_rope_passes(sizes, device, bench.compiled)
        kinds = zip(pass_cases(passes).items(), (False, True))
        return {
            f"norm and rotation, {kind}; {shape}": {
                **cases,
                AT_ONCE: at_once(passes, sizes, back),
            }
            for (kind, cases), back in kinds
        }
    if part == "statistics":
        return {f"statistics; {shape}": statistics_cases(sizes, device, bench.compiled)}
    return {
        f"optimizer step; {model}": optimizer_cases(*size, device),
        f"qk_clip next to the step; {model}": clip_cases(*size, device),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints and writes after each table."""
    flags = {**DEVICE, "--only": {"choices": PARTS}}
    peer = "torch.compile and FlexAttention"
    bench = Bench(
        "on_gpu.kernels",
        __doc__,
        arguments,
        rounds=25,
        peer=peer,
        writes=True,
        flags=flags,
    )
    device = bench.options.device
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "there is no CUDA device here; --device cpu --toy with TRITON_INTERPRET=1 shows that it runs"
        )
    if not available.loaded():
        raise SystemExit("Triton cannot be imported here; the warning above says why")
    clock = Clock(device)
    for part in PARTS if bench.options.only is None else (bench.options.only,):
        for title, cases in found(
            bench, TOY if bench.toy else Sizes(), device, part
        ).items():
            bench.table(title, cases, warmup=3 if clock.cuda else 1, clock=clock)
            write(bench, "kernels")


if __name__ == "__main__":
    main()
