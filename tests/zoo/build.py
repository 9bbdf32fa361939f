"""Tiny models from the configuration classes of transformers: rules by field name, and a few overrides."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from tests.zoo.overrides import OVERRIDES, PARTS
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

HEADS, GROUPS, HEAD_DIM, WIDTH, LAYERS, VOCAB = 4, 2, 8, 32, 2, 96

# Field name (whole match) -> value. The first rule that fits is taken.
RULES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|.*_vocab_size|vocab_size_.*", VOCAB),
    (r"(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers)", LAYERS),
    (r"(num_key_value_heads|num_kv_heads|n_head_kv|num_.*_key_value_heads)", GROUPS),
    (r"(num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|num_.*_attention_heads)", HEADS),
    (r"(hidden_size.*|d_model|n_embd|dim|embed_dim|word_embed_proj_dim|embedding_size|emb_dim|n_embed)", WIDTH),
    (
        r"(intermediate_size|.*_intermediate_size|n_inner|d_ff|(en|de)coder_ffn_dim|ffn_dim|dff|ffn_hidden_size|d_inner)",
        48,
    ),
    (r"(head_dim|qk_nope_head_dim|v_head_dim|d_kv|attention_head_dim|d_head|.*_head_dim)", HEAD_DIM),
    (r"qk_rope_head_dim", 4),
    (r"(q_lora_rank|kv_lora_rank|.*_lora_rank)", 16),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|.*num_experts)", 4),
    (r"(num_experts_per_tok|moe_top_?k|moe_k|num_experts_per_token|.*topk|top_k_experts)", 2),
    (r"(n_group|topk_group|n_shared_experts)", 1),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length)", 64),
)


def small(config_class: type[PretrainedConfig], model_type: str) -> PretrainedConfig:
    """A configuration of that class with small sizes."""
    if model_type in PARTS:
        part = type(getattr(config_class(), PARTS[model_type]))
        return part(**shrink(part(), model_type))
    default = config_class()
    values = shrink(default, model_type)
    return config_class(**values)


def shrink(config: PretrainedConfig, model_type: str) -> dict[str, Any]:
    """The fields of a configuration that its constructor takes, made small."""
    values: dict[str, Any] = {}
    subs = getattr(type(config), "sub_configs", {})
    for name, value in config.to_dict().items():
        if name in subs:
            sub = getattr(config, name)
            if isinstance(sub, PretrainedConfig):
                values[name] = {**shrink(sub, sub.model_type), "model_type": sub.model_type}
            continue
        new = _value(name, value, config)
        if new is not _SAME:
            values[name] = new
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        if isinstance(getattr(config, name, None), (int, list)):
            values[name] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}.get(name, 1)
    values.update(OVERRIDES.get(model_type, {}))
    return values


_SAME = object()


def _value(name: str, value: Any, config: PretrainedConfig) -> Any:
    if name == "layer_types" and isinstance(value, list):
        kinds = list(dict.fromkeys(value))
        return (kinds * LAYERS)[: max(LAYERS, len(kinds))] if len(kinds) <= LAYERS else kinds
    if isinstance(value, bool) or not isinstance(value, int):
        return _SAME
    attribute = {v: k for k, v in getattr(type(config), "attribute_map", {}).items()}
    for alias in (name, attribute.get(name, name)):
        for pattern, number in RULES:
            if re.fullmatch(pattern, alias):
                if "key_value" in pattern and value == _heads(config):
                    return HEADS
                if name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
                    return layers(config)
                return min(number, value) if value > 0 else value
    return _SAME


def _heads(config: PretrainedConfig) -> int:
    return config.to_dict().get("num_attention_heads", 0)


def layers(config: PretrainedConfig) -> int:
    """Two layers, or as many as there are kinds."""
    kinds = getattr(config, "layer_types", None)
    return max(LAYERS, len(set(kinds))) if isinstance(kinds, list) and kinds else LAYERS


def build(model_type: str, implementation: str) -> nn.Module:
    """A tiny causal language model of that type in eval mode, with large enough weights for uneven attention."""
    config = small(CONFIG_MAPPING[model_type], model_type)
    torch.manual_seed(0)
    home = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]._from_config if model_type in PARTS else None
    model = (home or AutoModelForCausalLM.from_config)(config, attn_implementation=implementation, dtype=torch.float32)
    model.eval()
    if model_type == "xmod":
        model.set_default_language("en_XX")
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2 and p.is_floating_point():
                nn.init.normal_(p, std=0.3)
    return model


def example(model: nn.Module) -> dict[str, torch.Tensor]:
    """Token numbers and, where the model takes one, a mask that hides the end of the second sequence."""
    ids = torch.arange(14).view(2, 7) * 5 % 83 + 7
    if type(model).__name__.startswith("Musicgen"):
        batch_of_books = ids.repeat_interleave(model.config.num_codebooks, dim=0)  # type: ignore[union-attr]
        return {"input_ids": batch_of_books, "use_cache": False}  # type: ignore[dict-item]
    known = inspect.signature(model.forward).parameters
    batch = {"input_ids": ids}
    if "attention_mask" in known:
        mask = torch.ones_like(ids)
        mask[1, 5:] = 0
        batch["attention_mask"] = mask
    if "use_cache" in known:
        batch["use_cache"] = False  # type: ignore[assignment]
    return batch
