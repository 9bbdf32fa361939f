"""`make bench`: prints every table and writes benchmarks/results/<device>-<date>.json."""

from __future__ import annotations

from benchmarks import decode, modules, statistics, steps
from benchmarks.measure import Bench
from qkeel.nn import LatentSizes

SIZES = {
    "full": {
        "modules": modules.FULL,
        "statistics": [(4, 8, 512, 64), (2, 8, 2048, 64), (1, 32, 1024, 64)],
        "steps": {"layers": 14, "heads": 32, "dim": 1024},
        # The sizes of DeepSeek-V3, but for its 128 heads and width 7168.
        "latents": {"batch": 1, "length": 4096, "dim": 2048, "heads": 16},
        "latent sizes": LatentSizes(
            q_latent=1536, kv_latent=512, rope_dim=64, nope_dim=128, value_dim=128
        ),
    },
    "toy": {
        "modules": modules.TOY,
        "statistics": [(1, 2, 40, 16)],
        "steps": {"layers": 2, "heads": 4, "dim": 64},
        "latents": {"batch": 2, "length": 40, "dim": 64, "heads": 4},
        "latent sizes": LatentSizes(),
    },
}


def main(arguments: list[str] | None = None) -> None:
    """Prints and writes every table."""
    bench = Bench("", __doc__, arguments, peer="the compiled modules", writes=True)
    sizes = SIZES["toy" if bench.toy else "full"]
    modules.tables(bench, **sizes["modules"])
    for shape in sizes["statistics"]:
        bench.table(
            f"statistics, batch heads tokens dim = {shape}",
            statistics.cases_with_attention(shape),
        )
    bench.table(f"optimizer step, {sizes['steps']}", steps.step_cases(**sizes["steps"]))
    bench.table(
        f"qk_clip next to the step, {sizes['steps']}",
        steps.clip_cases(**sizes["steps"], device="cpu"),
    )
    decoding, caches = decode.cache_cases(
        **sizes["latents"], sizes=sizes["latent sizes"]
    )
    bench.table(f"one token with a cache, {sizes['latents']}", decoding)
    bench.numbers("cache, bytes per token and layer, float32", caches)
    bench.write("cpu")


if __name__ == "__main__":
    main()
