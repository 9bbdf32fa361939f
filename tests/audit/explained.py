"""Tiny models whose attention is known: transformers classes, and hand-written modules that are right or broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
_MOE = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_VQ = {
    "embed_dim": 8,
    "num_embeddings": 8,
    "latent_channels": 8,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
}


def _causal(config: transformers.PretrainedConfig) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _causal(transformers.LlamaConfig(**GROUPED)),
    "qwen3": lambda: _causal(transformers.Qwen3Config(**GROUPED, head_dim=16)),
    "olmo2": lambda: _causal(transformers.Olmo2Config(**GROUPED)),
    "gemma2": lambda: _causal(
        transformers.Gemma2Config(
            **GROUPED, head_dim=16, sliding_window=4, query_pre_attn_scalar=64
        )
    ),
    "gemma3": lambda: _causal(
        transformers.Gemma3TextConfig(
            **GROUPED | {"num_hidden_layers": 2},
            head_dim=16,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "gpt2": lambda: _causal(
        transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=32)
    ),
    "gpt_neox": lambda: _causal(transformers.GPTNeoXConfig(**SIZES)),
    "cohere": lambda: _causal(transformers.CohereConfig(**GROUPED, use_qk_norm=True)),
    "stablelm": lambda: _causal(
        transformers.StableLmConfig(
            **GROUPED, qk_layernorm=True, partial_rotary_factor=0.5
        )
    ),
    "chameleon": lambda: transformers.ChameleonModel(
        transformers.ChameleonConfig(
            **GROUPED, vq_config=_VQ, vocabulary_map={"<image>": 3}
        )
    ),
    "deepseek_v3": lambda: _causal(
        transformers.DeepseekV3Config(
            **SIZES, **_MOE, **_LATENT, num_key_value_heads=4, first_k_dense_replace=1
        )
    ),
    "gpt_oss": lambda: _causal(
        transformers.GptOssConfig(
            **GROUPED,
            head_dim=16,
            num_local_experts=2,
            num_experts_per_tok=1,
            sliding_window=4,
        )
    ),
    "opt": lambda: _causal(
        transformers.OPTConfig(
            **SIZES, ffn_dim=16, word_embed_proj_dim=32, max_position_embeddings=16
        )
    ),
    "t5": lambda: transformers.T5Model(
        transformers.T5Config(
            d_model=32, d_kv=16, d_ff=16, num_layers=1, num_heads=4, vocab_size=32
        )
    ),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "vit": lambda: transformers.ViTModel(
        transformers.ViTConfig(**_VISION, image_size=16, patch_size=4)
    ),
    "swinv2": lambda: transformers.Swinv2Model(
        transformers.Swinv2Config(
            image_size=32,
            patch_size=4,
            embed_dim=32,
            depths=[1],
            num_heads=[4],
            window_size=4,
        )
    ),
}
_VISION = {
    name: SIZES[name]
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
} | {"num_attention_heads": 4}


def batch_for(name: str) -> Any:
    """An example for a model of `MODELS`."""
    ids = torch.randint(4, 32, (2, 12), generator=torch.Generator().manual_seed(0))
    if name == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids}
    size = {"vit": 16, "swinv2": 32}.get(name)
    return (
        ids
        if size is None
        else torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    )


def rope(x: Tensor) -> Tensor:
    """[b t h d] turned in halves, base 10,000."""
    d = x.shape[-1]
    angle = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * c + b * s, b * c - a * s], -1)


class ByHand(nn.Module):
    """Attention whose q and k [b t h d] go through `recipe(self, x, norm)` before the scores."""

    def __init__(self, recipe: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.recipe = recipe
        self.wq, self.wk, self.wv = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """[b t 32] to the same shape."""
        q, k, v = (w(x).unflatten(-1, (4, 8)) for w in (self.wq, self.wk, self.wv))
        q, k = self.recipe(q, self.q_norm), self.recipe(k, self.k_norm)
        return F.scaled_dot_product_attention(
            *(z.transpose(1, 2) for z in (q, k, v)), is_causal=True
        ).flatten(2)


def _thrown_away(x: Tensor, norm: nn.Module) -> Tensor:
    norm(x)
    return x


RECIPES: dict[str, Callable[[Tensor, nn.Module], Tensor]] = {
    "nanochat": lambda x, norm: 1.2 * F.rms_norm(rope(x), (8,), eps=1e-5),
    "norm then rope": lambda x, norm: rope(norm(x)),
    "rope then norm": lambda x, norm: norm(rope(x)),
    "l2": lambda x, norm: F.normalize(x, dim=-1),
    "never called": lambda x, norm: rope(x),
    "thrown away": _thrown_away,
    "over tokens": lambda x, norm: F.rms_norm(
        x.transpose(1, 3), x.shape[1:2]
    ).transpose(1, 3),
    "over heads": lambda x, norm: F.rms_norm(x.transpose(2, 3), (4,)).transpose(2, 3),
    "half a head": lambda x, norm: torch.cat(
        [F.rms_norm(x[..., :4], (4,)), x[..., 4:]], -1
    ),
    "clamped": lambda x, norm: x.clamp(-1, 1),
    "convolved": lambda x, norm: x + F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1],
    "no norm": lambda x, norm: x,
}
