"""What a QK-Clip costs while no head is over its threshold: milliseconds of whole training steps, one process a case.

`python -m benchmarks.idle_clip [--compiled]` trains a model of 4 layers and width 256 on 2 × 512 tokens with and
without the clip in turn, each in a process of its own, because a compiled model keeps what was compiled for another.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import torch
from torch.nn.functional import cross_entropy

import qkeel
from benchmarks.watch import GPT, VOCABULARY


def milliseconds(
    remedy: str, compiled: bool, steps: int, warm: int = 20, length: int = 512
) -> float:
    """The median processor time of a training step, after the passes that are observed as a whole."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(256, 4)
    for block in model.blocks:  # by its name, as models call it
        block.attention.attend = lambda q, k, v: (
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        )
    tokens = torch.randint(VOCABULARY, (2, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    qkeel.apply(model, remedy, optimizer, batch=tokens)
    run = torch.compile(model) if compiled else model
    times = []
    for _ in range(warm + steps):
        start = time.process_time()
        cross_entropy(run(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times[warm:])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.idle_clip", description=__doc__
    )
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", help="one case, in this process")
    parser.add_argument(
        "--toy", action="store_true", help="two steps in this process: it runs"
    )
    options = parser.parse_args()
    print(f"torch {torch.__version__}: milliseconds of a step", file=sys.stderr)
    if options.toy:
        for remedy in ("none", "qk_clip:threshold=100", "none"):
            toy = milliseconds(remedy, False, 2, warm=0, length=16)
            print(f"{remedy:<24} {toy:8.1f} ms")
        return
    if options.case is not None:
        print(milliseconds(options.case, options.compiled, options.steps))
        return
    command = [sys.executable, "-m", "benchmarks.idle_clip", "--steps", str(options.steps)]  # fmt: skip
    command += ["--compiled"] * options.compiled
    for _ in range(options.rounds):
        for remedy in ("none", "qk_clip:threshold=100"):
            done = subprocess.run(
                [*command, "--case", remedy], capture_output=True, text=True, check=True
            )
            print(f"{remedy:<24} {float(done.stdout):8.1f} ms", flush=True)


if __name__ == "__main__":
    main()
