"""What qk_norm as a remedy costs on a transformers Llama, beside the norm that Qwen3 has by itself.

`python -m benchmarks.forward_remedies`: the same weights in three models, forward and backward, one after the other.
--toy only shows that it runs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import qkeel

SIZES = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 1024,
    "vocab_size": 256,
    "head_dim": 64,
}
TOY = {"hidden_size": 64, "head_dim": 8, "num_hidden_layers": 1, "intermediate_size": 64}
BATCH, TOKENS, ROUNDS = 2, 512, 15


def step(model: nn.Module, x: torch.Tensor) -> float:
    """Seconds of one forward and backward pass."""
    start = time.perf_counter()
    model(x).logits.square().mean().backward()
    model.zero_grad()
    return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> None:
    """Print medians and ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward_remedies", description=__doc__)
    parser.add_argument("--toy", action="store_true", help="one layer, 16 tokens, one round: only to see that it runs")
    toy = parser.parse_args(arguments).toy
    sizes = {**SIZES, **TOY} if toy else SIZES
    torch.manual_seed(0)
    x = torch.randint(0, 256, (BATCH, 16 if toy else TOKENS))
    llama, plain = (LlamaForCausalLM(LlamaConfig(**sizes)) for _ in range(2))
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**sizes))
    qkeel.apply("qk_norm", llama, example=x[:, :8])
    qwen3.load_state_dict(llama.state_dict(), strict=True)
    models = {"llama": plain, "llama + qk_norm": llama, "qwen3": qwen3}
    times: dict[str, list[float]] = {name: [] for name in models}
    for i in range((1 if toy else ROUNDS) + 2):
        for name, model in models.items():
            seconds = step(model, x)
            if i >= 2:
                times[name].append(seconds)
    median = {name: statistics.median(t) for name, t in times.items()}
    pairs = [a / b for a, b in zip(times["llama + qk_norm"], times["qwen3"])]
    for name, t in median.items():
        print(f"{name:16} {t * 1e3:8.1f} ms   {t / median['llama']:.3f} of plain llama")
    print(f"qk_norm as a remedy / Qwen3's own norm: {statistics.median(pairs):.3f} (median of {ROUNDS} pairs)")


if __name__ == "__main__":
    main()
