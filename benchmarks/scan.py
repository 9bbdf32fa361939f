"""`scan` against reading the same bytes, from a warm page cache and from disk, side by side, and its memory.

Wall time and, since that says little on a shared machine, processor time. Torch computes with one thread; `scan` has
threads of its own for eigenvalues.

python -m benchmarks.scan [gigabytes] [--toy]
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measure import Bench, Case, Cases
from benchmarks.timing import processor_ms
from qkeel.audit.scan import scan

D, HEADS, GROUPS, WIDTH, MLP, VOCABULARY = 2048, 16, 8, 128, 5632, 32000
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}
_BUFFER = 1 << 22
Clock = Callable[[Case, int], float]


def write_checkpoint(
    folder: Path, gigabytes: float, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """A random decoder of the usual proportions (grouped keys, gated feed-forward), written in pieces."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, D)}
    per_layer = D * (2 * HEADS + 2 * GROUPS) * WIDTH + 3 * D * MLP
    layers = max(
        1, round((gigabytes * 1e9 / dtype.itemsize - VOCABULARY * D) / per_layer)
    )
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (D,),
            f"{at}self_attn.q_proj.weight": (HEADS * WIDTH, D),
            f"{at}self_attn.k_proj.weight": (GROUPS * WIDTH, D),
            f"{at}self_attn.v_proj.weight": (GROUPS * WIDTH, D),
            f"{at}self_attn.o_proj.weight": (D, HEADS * WIDTH),
            f"{at}mlp.gate_proj.weight": (MLP, D),
            f"{at}mlp.up_proj.weight": (MLP, D),
            f"{at}mlp.down_proj.weight": (D, MLP),
        }
    header, place = {}, 0
    for name, shape in shapes.items():
        size = dtype.itemsize * torch.Size(shape).numel()
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [place, place + size],
        }
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = (0.02 * torch.randn(1 << 22)).to(dtype).view(torch.uint8).numpy().tobytes()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, place, len(block)):
            file.write(block[: place - start])
    config = {
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": WIDTH,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"


def read(file: Path) -> None:
    """Read a file from front to back into one small buffer."""
    buffer = bytearray(_BUFFER)
    with open(file, "rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def forget(file: Path) -> None:
    """Ask the system to drop the file from its page cache."""
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def wall_ms(case: Case, calls: int) -> float:
    """Returns milliseconds by the clock on the wall."""
    start = time.perf_counter()
    case()
    return (time.perf_counter() - start) * 1e3


def compare(bench: Bench, file: Path, *, cold: bool, what: str) -> None:
    """Prints times and their ratio to reading, by the clock and of the processor, read and scan in turn."""
    cases: Cases = {
        "read": lambda: read(file),
        "scan": lambda: scan(file.parent),
    }
    size = file.stat().st_size / 1e9
    for name, clock in (("wall", wall_ms), ("processor", processor_ms)):

        def timed(case: Case, calls: int, clock: Clock = clock) -> float:
            if cold:
                forget(file)
            return clock(case, calls)

        title = f"{what}, {'from disk' if cold else 'page cache warm'}, {size:.2f} GB, {name} time"
        for row in bench.table(title, cases, warmup=0, clock=timed):
            print(
                f"  {row.name:<20} {1e3 * size / statistics.median(row.times):.2f} GB/s"
            )


def main(arguments: list[str] | None = None) -> None:
    """Prints times, rates and the peak memory."""
    flags = {"gigabytes": {"nargs": "?", "type": float, "default": 1.0}}
    bench = Bench("scan", __doc__, arguments, rounds=5, flags=flags)
    gigabytes = 0.0 if bench.toy else bench.options.gigabytes
    for dtype, name in list(NAMES.items())[: 1 if bench.toy else None]:
        with tempfile.TemporaryDirectory() as folder:
            file = write_checkpoint(Path(folder), gigabytes, dtype)
            read(file)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for cold in (False,) if bench.toy else (False, True):
                compare(bench, file, cold=cold, what=name)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"peak memory of the process: {peak / 1e6:.2f} GB ({before / 1e6:.2f} GB before the scans)"
        )


if __name__ == "__main__":
    main()
