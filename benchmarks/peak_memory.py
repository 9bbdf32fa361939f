"""The peak memory of a measured training step over that of the plain step, at a length where a T×T matrix would show.

A step is forward, backward and AdamW of a few blocks whose attention is torch's SDPA. Counted is what torch's allocator
hands out for tensors in the step, by its own profiler, so the figure has no noise and does not depend on what the
process has loaded. Every step of the watched model is measured, with all statistics; its first one looks for attention
as well.

python -m benchmarks.peak_memory [--length 8192]
"""

from __future__ import annotations

import json
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import qkeel
from benchmarks.measure import Bench

WIDTH, HEADS, LAYERS, STEPS = 128, 2, 4, 3
GOAL = 1.05


class Block(nn.Module):
    """Causal attention and an MLP, each on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def allocated(recorded: profile) -> int:
    """Returns the largest number of bytes that tensors held at once in a profile, beyond those held before it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [event["args"] for event in events if event["name"] == "[memory]"]
    before = memory[0]["Total Allocated"] - memory[0]["Bytes"]
    return max(event["Total Allocated"] for event in memory) - before


def peaks(length: int, *, watched: bool) -> list[int]:
    """Returns the peak of each of a few training steps, in bytes."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters())
    steps = []
    with qkeel.watch(model, optimizer) if watched else nullcontext():
        for _ in range(STEPS):
            with profile(
                activities=[ProfilerActivity.CPU], profile_memory=True
            ) as recorded:
                model(torch.randn(1, length, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            steps.append(allocated(recorded))
    return steps


def main(arguments: list[str] | None = None) -> None:
    """Prints the peaks and their ratio."""
    flags = {
        "--length": {"type": int, "default": 8192, "help": "tokens of the sequence"},
    }
    bench = Bench("peak_memory", __doc__, arguments, rounds=None, flags=flags)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    length = 256 if bench.toy else bench.options.length
    plain, measured = (peaks(length, watched=watched) for watched in (False, True))
    values = {"plain, MB": max(plain) / 1e6}
    for step, (without, with_) in enumerate(zip(plain, measured), 1):
        values |= {f"measured, step {step}, MB": with_ / 1e6}
        values |= {f"ratio, step {step}": with_ / without}
    bench.numbers(f"peak of a step over {length:,} tokens", values | {"goal": GOAL})


if __name__ == "__main__":
    main()
