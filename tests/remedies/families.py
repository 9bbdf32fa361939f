"""Tiny models of families nobody prepared, with their heads written down by hand: what a remedy has to find out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

VOCAB, D, HEADS, LAYERS = 32, 32, 4, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 6,
    "first_k_dense_replace": LAYERS,
}


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows (axis 0) or columns (axis 1) of a parameter."""

    name: str
    index: tuple[int, ...]
    axis: int = 0
    bias: str = ""

    def of(self, model):
        p = model.get_parameter(self.name).detach()
        return p.index_select(self.axis, torch.tensor(self.index))

    def of_bias(self, model):
        return model.get_parameter(self.bias).detach()[list(self.index)]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The parts that make the heads of one attention; with `q_rope` and `k_rope` it is latent attention."""

    site: str
    q: list[Part]
    k: list[Part]
    q_rope: list[Part] = dataclasses.field(default_factory=list)
    k_rope: list[Part] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Family:
    build: Callable[[], nn.Module]
    layer: Callable[[int], Layer]

    def model(self, dtype=torch.float64):
        """Weights with heads of different sizes, and biases that are not zero."""
        torch.manual_seed(0)
        model = self.build().to(dtype)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in model.named_parameters():
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.copy_(p + noise * (0.1 if p.ndim == 1 else 0.15))
                assert p.isfinite().all(), name
        return model.train()

    def layers(self):
        return [self.layer(i) for i in range(LAYERS)]


def blocks(
    name,
    n,
    size,
    *,
    start=0,
    step=None,
    axis=0,
    bias="",
):
    """n parts of `size` rows, the first at `start`, `step` apart."""
    step = step or size
    return [
        Part(name, tuple(range(start + i * step, start + i * step + size)), axis, bias)
        for i in range(n)
    ]


class Encoder(nn.Module):
    """torch.nn.TransformerEncoder: one fused in_proj_weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D)
        layer = nn.TransformerEncoderLayer(D, HEADS, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x)))


def _plain(prefix, kv, *, bias=False):
    def layer(i):
        site = f"{prefix}.{i}.self_attn"
        q, k = (f"{site}.{p}_proj" for p in "qk")
        return Layer(
            site,
            blocks(f"{q}.weight", HEADS, 8, bias=f"{q}.bias" if bias else ""),
            blocks(f"{k}.weight", kv, 8, bias=f"{k}.bias" if bias else ""),
        )

    return layer


def _gpt2(i):
    name, bias = (
        f"transformer.h.{i}.attn.c_attn.{kind}" for kind in ("weight", "bias")
    )
    q, k = (blocks(name, HEADS, 8, start=start, axis=1, bias=bias) for start in (0, D))
    return Layer(f"transformer.h.{i}.attn", q, k)


def _neox(i):
    site = f"gpt_neox.layers.{i}.attention"
    name, bias = (f"{site}.query_key_value.{kind}" for kind in ("weight", "bias"))
    q, k = (blocks(name, HEADS, 8, start=start, step=24, bias=bias) for start in (0, 8))
    return Layer(site, q, k)


def _latent(query):
    def layer(i):
        site = f"model.layers.{i}.self_attn"
        q, up, down = (
            f"{site}.{query}.weight",
            f"{site}.kv_b_proj.weight",
            f"{site}.kv_a_proj_with_mqa.weight",
        )
        return Layer(
            site,
            blocks(q, HEADS, 6, step=10),
            blocks(up, HEADS, 6, step=12),
            blocks(q, HEADS, 4, start=6, step=10),
            blocks(down, 1, 4, start=10),
        )

    return layer


def _encoder(i):
    site = f"encoder.layers.{i}.self_attn"
    q, k = (
        blocks(f"{site}.in_proj_weight", HEADS, 8, start=s, bias=f"{site}.in_proj_bias")
        for s in (0, D)
    )
    return Layer(site, q, k)


def _causal(config):
    return transformers.AutoModelForCausalLM.from_config(config)


FAMILIES: dict[str, Family] = {
    "llama": Family(
        lambda: _causal(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)),
        _plain("model.layers", 2),
    ),
    "qwen2": Family(
        lambda: _causal(transformers.Qwen2Config(**SIZES, num_key_value_heads=2)),
        _plain("model.layers", 2, bias=True),
    ),
    "gpt2": Family(
        lambda: _causal(
            transformers.GPT2Config(
                vocab_size=VOCAB,
                n_embd=D,
                n_layer=LAYERS,
                n_head=HEADS,
                bos_token_id=1,
                eos_token_id=2,
                attn_pdrop=0.0,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
            )
        ),
        _gpt2,
    ),
    "gpt_neox": Family(lambda: _causal(transformers.GPTNeoXConfig(**SIZES)), _neox),
    "deepseek_v3": Family(
        lambda: _causal(
            transformers.DeepseekV3Config(**SIZES, **LATENT, q_lora_rank=12)
        ),
        _latent("q_b_proj"),
    ),
    "deepseek_v3 without a query latent": Family(
        lambda: _causal(
            transformers.DeepseekV3Config(**SIZES, **LATENT, q_lora_rank=None)
        ),
        _latent("q_proj"),
    ),
    "nn.TransformerEncoder": Family(Encoder, _encoder),
}


def batch(seed=0, length=9):
    return torch.randint(
        3, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed)
    )


def run(model, x):
    """Logits of the vocabulary."""
    out = model(x)
    return out if isinstance(out, Tensor) else out.logits
