"""Whole training steps of models of transformers: `attn_implementation="qkeel"` next to "sdpa", float32 on a CPU.

`python -m benchmarks.transformers_attention` writes benchmarks/results/transformers-DATE.json. Four layers of width
256, head_dim 32, random weights, no dropout, fused AdamW. "watched" measures the largest logit of every
head at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import nn

import qkeel
from benchmarks.measure import Bench, Case
from qkeel.integrations import register_attention
from qkeel.kernels.attention import compiled as compiled_attention

_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "vocab_size": 512,
}
_HEADS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
_GPT2: dict[str, Any] = {"n_embd": 256, "n_head": 8, "n_layer": 4, "vocab_size": 512}
_NONE = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
MODELS: dict[str, Callable[[int], transformers.PretrainedConfig]] = {
    "Llama": lambda t: transformers.LlamaConfig(
        **_SIZES, **_HEADS, max_position_embeddings=t
    ),
    "Qwen3": lambda t: transformers.Qwen3Config(
        **_SIZES, **_HEADS, max_position_embeddings=t
    ),
    "GPT-2": lambda t: transformers.GPT2Config(**_GPT2, **_NONE, n_positions=t),
}


def step(
    config: transformers.PretrainedConfig,
    implementation: str,
    tokens: int,
    batch: int,
    watched: bool,
) -> Case:
    """One training step of a model of its own."""
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation
    )
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, fused=True)
    x = torch.randint(512, (batch, tokens))
    if watched:
        qkeel.watch(model, optimizer, stats="max", rules=[])

    def run() -> None:
        optimizer.zero_grad()
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
        optimizer.step()

    return run


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    needs = (compiled_attention.ready,)
    bench = Bench(
        "transformers_attention", __doc__, arguments, rounds=7, needs=needs, writes=True
    )
    transformers.logging.set_verbosity_error()
    name = register_attention()
    for tokens, batch in ((16, 1),) if bench.toy else ((512, 2), (1024, 1)):
        for kind, config_of in MODELS.items():
            made = {
                told: step(config_of(tokens), implementation, tokens, batch, watched)
                for told, implementation, watched in (
                    ("sdpa", "sdpa", False),
                    ("qkeel", name, False),
                    ("qkeel, watched", name, True),
                    ("sdpa, watched", "sdpa", True),
                )
            }
            bench.table(f"{kind}, {batch} x {tokens} tokens", made)
    bench.write("transformers")


if __name__ == "__main__":
    main()
