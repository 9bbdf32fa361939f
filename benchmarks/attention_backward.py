"""The compiled gradient of causal attention against torch's fused one: backward alone, and forward with backward.

`python -m benchmarks.attention_backward` prints, for each shape, process CPU time, the ratio to torch in that round,
and beside each backward its GFLOP/s (five products over the visible half) and those of torch.mm. The compiled forward
also returns the largest logit and the entropy of every row, torch's does not. --toy only shows that it runs.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from benchmarks.measure import settle

if __name__ == "__main__":
    settle(module="benchmarks.attention_backward")  # before torch: the allocator reads its settings at the start

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measure import Row, interleave, show
from qkeel.kernels.native import attention

# batch, tokens, query heads, key heads, head_dim
SHAPES = [
    (64, 32, 8, 8, 64),
    (16, 128, 8, 8, 64),
    (4, 512, 8, 8, 64),
    (2, 2048, 8, 8, 64),
    (1, 1024, 32, 32, 64),
    (1, 1024, 16, 4, 128),
]
TORCH, OURS = "torch, fused", "qkeel, compiled C++"
ATEN = torch.ops.aten
Shape = tuple[int, int, int, int, int]


def flops(shape: Shape) -> float:
    """Of one backward: S, dP, dV, dQ, dK of the pairs that are visible."""
    b, t, h, _, d = shape
    return 5 * 2 * b * h * d * t * (t + 1) / 2


def speed_of_mm(rounds: int) -> float:
    """GFLOP/s of torch.mm where it is at its best."""
    x, y = torch.randn(512, 512), torch.randn(512, 512)
    (row,) = interleave({"mm": lambda: torch.mm(x, y)}, "mm", rounds, calls=10)
    return 2 * 512**3 / min(row.times) / 1e6


def bench(shape: Shape, rounds: int, dtype: torch.dtype = torch.float32) -> dict[str, list[Row]]:
    """Backward, and forward with backward."""
    b, t, h, g, d = shape
    q, k, v, up = (torch.randn(b, t, heads, d).to(dtype).transpose(1, 2) for heads in (h, g, g, h))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    own: tuple[Any, ...] = (None, None, d**-0.5, True, 0, 0.0)
    out, lse = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    ours = torch.ops.qkeel_native.attention(q, k, v, *own, True)[:2]
    backward: dict[str, Callable[[], object]] = {
        TORCH: lambda: ATEN._scaled_dot_product_flash_attention_for_cpu_backward(up, q, k, v, out, lse, 0.0, True),
        OURS: lambda: torch.ops.qkeel_native.attention_backward(up, q, k, v, *ours, *own),
    }

    def both(own_kernel: bool) -> object:
        if own_kernel:
            found = torch.ops.qkeel_native.attention(*leaves, *own, True)[0]
        else:
            found = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=h != g)
        return torch.autograd.grad(found, leaves, up)

    ways: dict[str, Callable[[], object]] = {TORCH: lambda: both(False), OURS: lambda: both(True)}
    calls = 4 if b * h * t * t * d < 1 << 27 else 1
    return {
        "backward": interleave(backward, TORCH, rounds, calls),
        "forward + backward": interleave(ways, TORCH, rounds, calls),
    }


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_backward", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, two rounds: only to see that it runs")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["QKEEL_NATIVE"] = "1"
    if not (attention.ready() and attention.backward_ready()):
        raise SystemExit("the kernels could not be compiled; the warning above says why")
    shapes, rounds = ([(2, 16, 2, 2, 16)], 2) if args.toy else (SHAPES, args.rounds)
    print(f"torch.mm of 512 x 512 numbers: {speed_of_mm(rounds):.0f} GFLOP/s")
    for shape in shapes:
        for kind, rows in bench(shape, rounds, getattr(torch, args.dtype)).items():
            show(f"attention, {kind}, {args.dtype}, batch tokens heads key-heads dim = {shape}", rows, TORCH)
            if kind == "backward":
                print("  " + ", ".join(f"{r.name}: {flops(shape) / min(r.times) / 1e6:.0f} GFLOP/s" for r in rows))


if __name__ == "__main__":
    main()
