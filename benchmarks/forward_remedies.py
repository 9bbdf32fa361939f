"""What qk_norm as a remedy costs on a transformers Llama, and what the norm that Qwen3 has by itself costs.

`python -m benchmarks.forward_remedies`: the same weights in three models, forward and backward, one after the other.
--toy only shows that it runs.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import qkeel
from benchmarks.measure import Bench, Case, between

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
BATCH, TOKENS = 2, 512


def step(model: nn.Module, x: torch.Tensor) -> Case:
    """Returns one forward and backward pass."""

    def run() -> None:
        model(x).logits.square().mean().backward()
        model.zero_grad()

    return run


def main(arguments: list[str] | None = None) -> None:
    """Prints the table, and the remedy's time over that of Qwen3's own norm."""
    bench = Bench("forward_remedies", __doc__, arguments)
    sizes = {**SIZES, **TOY} if bench.toy else SIZES
    torch.manual_seed(0)
    x = torch.randint(0, 256, (BATCH, 16 if bench.toy else TOKENS))
    llama, plain = (LlamaForCausalLM(LlamaConfig(**sizes)) for _ in range(2))
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**sizes))
    qkeel.apply(llama, "qk_norm", batch=x[:, :8])
    qwen3.load_state_dict(llama.state_dict(), strict=True)
    models = {"llama": plain, "llama + qk_norm": llama, "qwen3": qwen3}
    rows = bench.table("forward and backward of a model", {name: step(model, x) for name, model in models.items()})
    ratio = between(rows, "llama + qk_norm", "qwen3")
    print(f"  qk_norm as a remedy / Qwen3's own norm: {ratio:.3f} (median of {bench.rounds} pairs)")


if __name__ == "__main__":
    main()
