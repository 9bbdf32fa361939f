"""`make bench`: prints every table and writes benchmarks/results/<device>-<date>.json."""

from __future__ import annotations

from benchmarks.measure import settle

if __name__ == "__main__":
    settle()  # before torch: the allocator reads its settings when the process starts

import argparse
import json
from pathlib import Path

import torch

from benchmarks import latents, modules, statistics, steps
from benchmarks.measure import Row, about, show
from qkeel.nn import LatentSizes

SIZES = {
    "full": {
        "modules": {"dim": 512, "heads": 8, "batch": 4, "length": 512},
        "statistics": [(4, 8, 512, 64), (2, 8, 2048, 64), (1, 32, 1024, 64)],
        "steps": {"layers": 14, "heads": 32, "dim": 1024},
        # The sizes of DeepSeek-V3, but for its 128 heads and width 7168.
        "latents": {
            "batch": 1,
            "length": 4096,
            "dim": 2048,
            "heads": 16,
            "sizes": LatentSizes(q_latent=1536, kv_latent=512, rope_dim=64, nope_dim=128, value_dim=128),
        },
    },
    "toy": {
        "modules": {"dim": 64, "heads": 4, "batch": 2, "length": 32},
        "statistics": [(1, 2, 40, 16)],
        "steps": {"layers": 2, "heads": 4, "dim": 64},
        "latents": {"batch": 2, "length": 40, "dim": 64, "heads": 4, "sizes": LatentSizes()},
    },
}


def run(size: str, rounds: int, compiled: bool) -> dict[str, object]:
    """Every table, printed as it comes and returned for the results file."""
    sizes = SIZES[size]
    found: dict[str, object] = {}

    def table(title: str, rows: list[Row], base: str) -> None:
        show(title, rows, base)
        found[title] = [row.as_dict() for row in rows]

    for kind, rows in modules.bench(**sizes["modules"], rounds=rounds, compiled=compiled).items():
        table(f"attention modules, {kind}, {sizes['modules']}", rows, modules.BASE)
    memory = modules.activation_memory(**sizes["modules"])
    found["activation memory, units of batch·length·dim float32"] = memory
    print("\nkept for backward by one module, in units of batch·length·dim float32 numbers")
    for name, units in memory.items():
        print(f"  {name:<40} {units:6.2f}")
    for shape in sizes["statistics"]:
        table(f"statistics, batch heads tokens dim = {shape}", statistics.bench(shape, rounds), statistics.BASE)
    table(f"optimizer step, {sizes['steps']}", steps.bench(**sizes["steps"], rounds=rounds), steps.BASE)
    table(f"qk_clip beside the step, {sizes['steps']}", steps.bench_clip(**sizes["steps"], rounds=rounds), steps.BASE)
    decoding, size = latents.bench(**sizes["latents"], rounds=rounds)
    table(f"one token with a cache, {sizes['latents']}", decoding, latents.BASE)
    found["cache, bytes per token and layer, float32"] = size
    print("\nbytes that a token takes in the cache of one layer, float32")
    for name, number in size.items():
        print(f"  {name:<40} {number:6}")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, two rounds: only to see that it runs")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled modules out (saves minutes)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size, rounds = ("toy", 2) if args.toy else ("full", args.rounds)
    tables = run(size, rounds, compiled=not (args.toy or args.no_compile))
    run_of = about("make bench", rounds)
    path = args.out / f"cpu-{run_of['date']}{'-toy' if args.toy else ''}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": run_of, "tables": tables}, indent=1, ensure_ascii=False) + "\n")
    print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
