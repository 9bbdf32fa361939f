"""Tiny models from the configuration classes of transformers: rules by field name, and a few overrides."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from tools.zoo.compose import COMPOSED, all_shared
from tools.zoo.examples import PLACES
from tools.zoo.overrides import OVERRIDES as CAUSAL
from tools.zoo.overrides_others import OTHERS
from tools.zoo.tables import Entry

HEADS, GROUPS, HEAD_DIM, WIDTH, LAYERS, VOCAB = 4, 2, 8, 32, 2, 96

# Field name (whole match) -> value. The first rule that fits is taken.
RULES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|.*_vocab_size|vocab_size_.*", VOCAB),
    (
        r"(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers)",
        LAYERS,
    ),
    (r"(num_key_value_heads|num_kv_heads|n_head_kv|num_.*_key_value_heads)", GROUPS),
    (
        r"(num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|num_.*_attention_heads)",
        HEADS,
    ),
    (
        r"(hidden_size.*|d_model|n_embd|dim|embed_dim|word_embed_proj_dim|embedding_size|emb_dim|n_embed)",
        WIDTH,
    ),
    (
        r"(intermediate_size|.*_intermediate_size|n_inner|d_ff|(en|de)coder_ffn_dim|ffn_dim|dff|ffn_hidden_size|d_inner)",
        48,
    ),
    (
        r"(head_dim|qk_nope_head_dim|v_head_dim|d_kv|attention_head_dim|d_head|.*_head_dim)",
        HEAD_DIM,
    ),
    (r"qk_rope_head_dim", 4),
    (r"(q_lora_rank|kv_lora_rank|.*_lora_rank)", 16),
    (
        r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|.*num_experts)",
        4,
    ),
    (
        r"(num_experts_per_tok|moe_top_?k|moe_k|num_experts_per_token|.*topk|top_k_experts)",
        2,
    ),
    (r"(n_group|topk_group|n_shared_experts)", 1),
    (
        r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length)",
        64,
    ),
    (
        r"((text|audio|vision|out|input|output|encoder|decoder|adapter|mm)_hidden_size|.*projection_dim|out_dim)",
        WIDTH,
    ),
    (r"(image_size|input_size|img_size)", 32),
    (r"patch_size", 8),
    (r"(num_mel_bins|n_mels|input_feat_per_channel|feature_projection_input_dim)", 16),
    (r"max_source_positions", 16),
    (r"num_queries", 6),
    (r"[lxr]_layers", 1),
)
OVERRIDES = {**CAUSAL, **OTHERS}

# Values of lists with one entry per stage.
LISTS = {"depths": 1, "num_heads": 2, "num_attention_heads": 2}


def small(entry: Entry) -> PretrainedConfig:
    """The configuration of its class with small sizes."""
    maker = COMPOSED.get(entry.name)
    if maker is not None:
        return maker()
    config_class = getattr(transformers, entry.class_name).config_class
    values = shrink(config_class(), config_class.model_type)
    for name in {entry.name, entry.class_name} - {config_class.model_type}:
        _deepen(values, OVERRIDES.get(name, {}))
    return config_class(**values)


def _deepen(values: dict[str, Any], more: dict[str, Any]) -> None:
    """Put `more` into nested values."""
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _deepen(values[name], value)
        else:
            values[name] = value


def shrink(config: PretrainedConfig, model_type: str) -> dict[str, Any]:
    """The fields of a configuration that its constructor takes, made small."""
    values: dict[str, Any] = {}
    subs = getattr(type(config), "sub_configs", {})
    for name, value in config.to_dict().items():
        if name in subs:
            sub = getattr(config, name)
            if isinstance(sub, PretrainedConfig):
                # Which stages a convolutional backbone hands on; the others' stages are their layers.
                known = sub.to_dict() if "net" in sub.model_type else {}
                taken = {
                    k: v
                    for k in ("out_features", "out_indices")
                    if (v := known.get(k)) is not None
                }
                values[name] = {
                    **taken,
                    **shrink(sub, sub.model_type),
                    "model_type": sub.model_type,
                }
            continue
        new = _value(name, value, config)
        if new is not _SAME:
            values[name] = new
    values.update(
        {
            name: number
            for name, number in PLACES.items()
            if getattr(config, name, None) is not None
        }
    )
    for name in (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
    ):
        if isinstance(getattr(config, name, None), (int, list)):
            values[name] = {
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
            }.get(name, 1)
    _deepen(values, OVERRIDES.get(model_type, {}))
    return values


_SAME = object()


def _value(name: str, value: Any, config: PretrainedConfig) -> Any:
    if name == "layer_types" and isinstance(value, list):
        kinds = list(dict.fromkeys(value))
        return (
            (kinds * LAYERS)[: max(LAYERS, len(kinds))]
            if len(kinds) <= LAYERS
            else kinds
        )
    if isinstance(value, (list, tuple)) and name in LISTS:
        return [LISTS[name]] * len(value)
    if isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [2, 1, 1]}
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


def build(entry: Entry, implementation: str) -> nn.Module:
    """A tiny model of that class in eval mode, with large enough weights for uneven attention."""
    home = getattr(transformers, entry.class_name)
    torch.manual_seed(0)
    config = small(entry)
    chosen: str | dict[str, str] = implementation
    if "net" in getattr(getattr(config, "backbone_config", None), "model_type", ""):
        chosen = {
            "": implementation,
            "backbone_config": "eager",
        }  # convolutions refuse to be asked for sdpa
    with all_shared(entry.name):
        model = home._from_config(
            config, attn_implementation=chosen, dtype=torch.float32
        )
    model.eval()
    if entry.name == "xmod":
        model.set_default_language("en_XX")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if (
                (p.ndim >= 2 or name.endswith("query"))
                and p.is_floating_point()
                and p.numel()
            ):
                # Convolutions in a row with batch norms at rest would let the signal die.
                nn.init.normal_(
                    p,
                    std=min(0.3, (1.7 if p.ndim == 2 else 3.0) / p[:1].numel() ** 0.5),
                )
    return model
