"""Configurations that are put together from two others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import transformers as t
from transformers import PretrainedConfig

_TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIZES = {
    k: v
    for k, v in _TEXT.items()
    if "token" not in k and k not in ("vocab_size", "max_position_embeddings")
}


def _pair(encoder: PretrainedConfig, home: Any) -> PretrainedConfig:
    config = home.from_encoder_decoder_configs(encoder, t.BertConfig(**_TEXT))
    config.decoder_start_token_id = config.pad_token_id = 0
    return config


_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
_DETR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_queries": 6,
}


def _detector(
    home: Any, stages: tuple[str, ...] = ("stage4",), **more: Any
) -> PretrainedConfig:
    """A detector on a ResNet of transformers; the default backbone is timm's."""
    return home(
        backbone_config=t.ResNetConfig(**_RESNET, out_features=list(stages)),
        **{**_DETR, **more},
    )


_DINO = {
    **_SIZES,
    "num_hidden_layers": 4,
    "image_size": 32,
    "patch_size": 8,
    "out_indices": [1, 2, 3, 4],
}
_NECK = {
    "reassemble_hidden_size": 32,
    "neck_hidden_sizes": [8, 8, 16, 16],
    "fusion_hidden_size": 8,
}


def _depth(home: Any, **more: Any) -> PretrainedConfig:
    backbone = t.Dinov2Config(**_DINO, reshape_hidden_states=False)
    return home(backbone_config=backbone, patch_size=8, **_NECK, **more)


@contextmanager
def all_shared(name: str) -> Iterator[None]:
    """Lets drafters be built: transformers 5.23 demands that all their layers share keys, and raises if they do."""
    text = DRAFTERS.get(name)
    if text is None:
        yield
        return
    with mock.patch.object(
        text,
        "kv_sharing_modes",
        property(lambda config: ["reuse"] * config.num_hidden_layers),
    ):
        yield


DRAFTERS: dict[str, Any] = {
    "gemma4_assistant": t.Gemma4TextConfig,
    "gemma4_unified_assistant": t.Gemma4UnifiedTextConfig,
}


def _assistant(home: Any, text: Any) -> PretrainedConfig:
    """A drafter whose layers all read keys and values of the model that they draft for."""
    kinds = ["sliding_attention", "full_attention"]
    more = (
        {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        if text is t.Gemma4TextConfig
        else {}
    )
    sizes = {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "num_global_key_value_heads": 2,
    }
    return home(
        text_config=text(
            **_TEXT, **sizes, **more, layer_types=kinds, num_kv_shared_layers=2
        ),
        backbone_hidden_size=32,
    )


COMPOSED: dict[str, Callable[[], PretrainedConfig]] = {
    "encoder-decoder": lambda: _pair(t.BertConfig(**_TEXT), t.EncoderDecoderConfig),
    "vision-encoder-decoder": lambda: _pair(
        t.ViTConfig(**_SIZES, image_size=32, patch_size=8), t.VisionEncoderDecoderConfig
    ),
    "speech-encoder-decoder": lambda: _pair(
        t.Wav2Vec2Config(
            **_SIZES, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4
        ),
        t.SpeechEncoderDecoderConfig,
    ),
    "detr": lambda: _detector(t.DetrConfig),
    "table-transformer": lambda: _detector(t.TableTransformerConfig),
    "conditional_detr": lambda: _detector(t.ConditionalDetrConfig),
    "dab-detr": lambda: _detector(t.DabDetrConfig, hidden_size=32),
    "deformable_detr": lambda: _detector(
        t.DeformableDetrConfig, ("stage2", "stage3", "stage4")
    ),
    "depth_anything": lambda: _depth(t.DepthAnythingConfig),
    "prompt_depth_anything": lambda: _depth(t.PromptDepthAnythingConfig),
    "gemma4_assistant": lambda: _assistant(t.Gemma4AssistantConfig, t.Gemma4TextConfig),
    "gemma4_unified_assistant": lambda: _assistant(
        t.Gemma4UnifiedAssistantConfig, t.Gemma4UnifiedTextConfig
    ),
}
