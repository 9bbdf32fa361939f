"""The peak memory of a measured training step over that of the plain step, at a length where a T×T matrix would show.

Each of the two runs in a process of its own, as the peak of a process never falls. A step is forward, backward and
AdamW of a few blocks whose attention is torch's SDPA. What the process holds before its first step is left out, so the
figure is that of gradients, optimizer states and activations. Every step of the watched process is measured, with all
statistics; its first one looks for attention as well.

python -m benchmarks.peak_memory [--length 8192]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import warnings
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def peak(length: int, *, watched: bool) -> int:
    """Returns by how many bytes the memory of this process grows over a few training steps, at most."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*[Block() for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with qkeel.watch(model, optimizer) if watched else nullcontext():
        for _ in range(STEPS):
            model(torch.randn(1, length, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def in_a_process(length: int, *, watched: bool) -> int:
    """Returns `peak`, from a new process."""
    command = [sys.executable, "-m", "benchmarks.peak_memory", "--length", str(length)]
    command += ["--peak", "watched" if watched else "plain"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(out.split()[-1])


def main(arguments: list[str] | None = None) -> None:
    """Prints the peaks and their ratio."""
    flags = {
        "--length": {"type": int, "default": 8192, "help": "tokens of the sequence"},
        "--peak": {"choices": ("plain", "watched"), "help": "of this process alone"},
    }
    bench = Bench("peak_memory", __doc__, arguments, rounds=None, flags=flags)
    length = 256 if bench.toy else bench.options.length
    if bench.options.peak:
        warnings.simplefilter("ignore")
        print(peak(length, watched=bench.options.peak == "watched"))
        return
    measure = peak if bench.toy else in_a_process
    plain, watched = (max(1, measure(length, watched=x)) for x in (False, True))
    values = {"plain, MB": plain / 1e6, "measured, MB": watched / 1e6}
    values |= {"ratio": watched / plain, "goal": GOAL}
    bench.numbers(f"peak of a step over {length:,} tokens", values)


if __name__ == "__main__":
    main()
