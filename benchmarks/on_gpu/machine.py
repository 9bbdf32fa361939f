"""What a GPU can do at most: the rates of a copy and of a matrix product, and the kernels that SDPA chooses on it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend

from benchmarks.measure import Bench, Case
from qkeel.kernels import triton_access as available

MODEL_OF_100M, MODEL_OF_1B = (
    "a watched model of 100M weights",
    "a watched model of 1B weights",
)
COMPILED_MODEL = "a watched model of 100M weights, compiled"
# Tables and cases of watched models, which goals are about.
STEPS, PEAK = "ten training steps", "peak memory, of plain steps"
ALL_EACH, ALL_TENTH = "everything, at every step", "everything, every 10th step"
MAX_EACH, MAX_TENTH = "largest logits, at every step", "largest logits, every 10th step"
CLIP, LALR = "qk_clip, threshold 100", "lalr"
DEVICE = {"--device": {"choices": ("cuda", "cpu"), "default": "cuda"}}


class Clock:
    """Milliseconds of single calls on a device.

    With `ahead` the device waits until the host has launched the call, so that they are the device's own; without, they
    are those that a training run takes, in which the host may be the slower one.
    """

    def __init__(self, device: str, ahead: bool = True) -> None:
        self.cuda, self.ahead = device == "cuda", ahead
        # Larger than any L2: what a call reads is not there yet. The host runs ahead while it is overwritten.
        self.cache = (
            torch.empty(1 << 28, dtype=torch.float32, device=device)
            if self.cuda
            else torch.empty(1)
        )

    def __call__(self, case: Case, calls: int) -> float:
        """Returns the milliseconds of one call."""
        if not self.cuda:
            start = time.perf_counter()
            case()
            return (time.perf_counter() - start) * 1e3
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):
            self.cache.zero_()
        if self.ahead:
            torch.cuda._sleep(8_000_000)  # cycles: some 4 ms
        before.record()
        case()
        after.record()
        after.synchronize()
        return before.elapsed_time(after)


def write(bench: Bench, name: str) -> None:
    """Writes the tables, their times under a name that says nothing of a processor's."""
    path = bench.write(name, tables=bench.tables)
    path.write_text(path.read_text().replace("cpu_ms", "ms"))


def rates(bench: Bench, device: str) -> dict[str, float]:
    """Terabytes a second of a copy, reading and writing counted, and operations of a product in bfloat16."""
    numbers, side = (1 << 12, 64) if bench.toy else (1 << 29, 8192)
    x, left, right = (
        torch.randn(n, device=device, dtype=torch.bfloat16)
        for n in (numbers, side * side, side * side)
    )
    to, left, right = torch.empty_like(x), left.view(side, side), right.view(side, side)
    cases = {"copy": lambda: to.copy_(x), "product": lambda: left @ right}
    ms = {
        row.name: sorted(row.times)[len(row.times) // 2]
        for row in bench.table("rates", cases, clock=Clock(device))
    }
    return {
        "copy, TB/s": 4 * numbers / ms["copy"] / 1e9,
        "product, TFLOP/s": 2 * side**3 / ms["product"] / 1e9,
    }


def choices(device: str) -> dict[str, str]:
    """The kernel that SDPA takes for a causal call, by dtype, head_dim and whether keys are grouped."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        for d in (64, 80, 128, 256):
            for groups in (4, 2):
                q, k = (
                    torch.empty(1, heads, 64, d, device=device, dtype=dtype)
                    for heads in (4, groups)
                )
                chosen = torch._fused_sdp_choice(
                    q, k, k, None, 0.0, True, scale=None, enable_gqa=groups != 4
                )
                keys = "grouped keys" if groups != 4 else "a key each"
                found[f"{str(dtype)[6:]}, d {d}, {keys}"] = SDPBackend(
                    chosen
                ).name.lower()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes."""
    bench = Bench(
        "on_gpu.machine", __doc__, arguments, rounds=15, writes=True, flags=DEVICE
    )
    device = bench.options.device
    bench.numbers("rates of the device", rates(bench, device))
    bench.tables["SDPA chooses"] = choices(device)
    bench.tables["versions"] = {
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "Triton can be used": str(available.loaded()),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "host threads": str(torch.get_num_threads()),
    }
    write(bench, "machine")


if __name__ == "__main__":
    main()
