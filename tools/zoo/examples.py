"""Example batches: token numbers for language models, and for the rest what the signature of forward asks for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

LENGTH, AHEAD, SIDE, FRAMES, SAMPLES, GRID = 7, 5, 64, 32, 4000, 4
# Numbers of the tokens that stand for what is no text; the example texts leave them out.
IMAGE, VIDEO, AUDIO = 90, 91, 92
PLACES = {
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "video_token_id": VIDEO,
    "video_token_index": VIDEO,
    "audio_token_id": AUDIO,
    "audio_token_index": AUDIO,
    "vision_start_token_id": 93,
    "vision_end_token_id": 94,
}
# Images that come as one of several; videos under the name of images; images with their sizes.
ONE_OF_SEVERAL = ("ModernVBert", "UltraVBert", "Idefics", "SmolVLM")
VIDEOS = ("Timesformer", "VideoMAE", "Vivit")
WITH_SIZES = ("Mistral3", "MistralLarge4", "LightOnOcr", "LlavaNext", "LlavaOnevision")
# What stands in the text, and what its features are made of.
PLACED = (
    ("image", IMAGE, ("pixel_values",)),
    ("video", VIDEO, ("pixel_values_videos",)),
    ("audio", AUDIO, ("input_features", "input_values")),
)
# Sound as [b, channels, frames]; the others take [b, frames, channels].
CHANNELS_FIRST = ("Whisper", "AudioFlamingo3", "GlmAsr")


def tokens(model: nn.Module) -> dict[str, Any]:
    """What a language model takes: token numbers, or what a drafter gets from the model that it drafts for."""
    if "shared_kv_states" not in _names(model):
        return _tokens(model)
    text: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    cached = {
        kind: tuple(
            _noise(2, text.num_key_value_heads, LENGTH, text.head_dim) for _ in "kv"
        )
        for kind in text.layer_types
    }
    width = 2 * model.config.backbone_hidden_size  # type: ignore[operator,union-attr]
    positions = torch.full((2, 1), LENGTH)
    return {
        "inputs_embeds": _noise(2, 1, width),
        "position_ids": positions,
        "shared_kv_states": cached,
    }


def _tokens(model: nn.Module) -> dict[str, Any]:
    """Token numbers and, where the model takes one, a mask that hides the end of the second sequence."""
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % 83 + 7
    if type(model).__name__.startswith("Musicgen"):
        batch_of_books = ids.repeat_interleave(model.config.num_codebooks, dim=0)  # type: ignore[union-attr]
        return {"input_ids": batch_of_books, "use_cache": False}
    return {
        "input_ids": ids,
        **_known(model, {"attention_mask": _mask(LENGTH), "use_cache": False}),
    }


def by_signature(model: nn.Module) -> dict[str, Any]:
    """Whatever of tokens, decoder tokens, pixels, sound the model takes."""
    if any(getattr(model.config, name, None) in (IMAGE, AUDIO) for name in PLACES):
        return amid_text(model)
    corners = torch.arange(2 * LENGTH * 2).view(2, LENGTH, 2) % 9
    batch = {
        **_tokens(model),
        "decoder_input_ids": torch.arange(2 * AHEAD).view(2, AHEAD) * 7 % 83 + 7,
        "bbox": torch.cat([corners, corners + 3], dim=-1),
        "visual_feats": _noise(2, 6, getattr(model.config, "visual_feat_dim", 1)),
        "visual_pos": _noise(2, 6, 4),
        "image_attention_mask": torch.ones(2, LENGTH, 1, dtype=torch.int64),
        "use_cache": False,
        **pictures(model),
        **sound(model),
    }
    names = _names(model)
    if "input_ids" not in names:
        batch.pop("attention_mask", None)
    if "input_values" in names or "flattened_patches" in names:
        batch.pop("input_features", None)
    if {"input_ids", "decoder_input_ids", "input_features"} <= set(names):
        del batch["input_ids"], batch["attention_mask"]
    return _known(model, batch)


def amid_text(model: nn.Module) -> dict[str, Any]:
    """Text that holds as many image or audio tokens as the model makes features of two images or sounds."""
    given = _known(model, {**pictures(model), **sound(model)})
    ids = _tokens(model)["input_ids"]
    parts_of_text = [ids[:, :2]]
    for kind, token, needed in PLACED:
        encode = getattr(
            model,
            f"get_{kind}_features",
            getattr(model.base_model, f"get_{kind}_features", None),
        )
        if encode is None or not any(name in given for name in needed):
            continue
        taken = inspect.signature(encode).parameters
        hidden = any(p.kind is p.VAR_POSITIONAL for p in taken.values())
        with torch.no_grad():
            n = _rows(
                encode(
                    **{
                        k: v
                        for k, v in given.items()
                        if k in taken or (hidden and k in needed)
                    }
                )
            )
        parts_of_text.append(torch.full((2, n // 2), token))
    ids = torch.cat([*parts_of_text, ids[:, 2:]], dim=1)
    kinds = {
        "mm_token_type_ids": (ids == IMAGE).long(),
        "token_type_ids": (ids == IMAGE).long(),
    }
    return _known(
        model,
        {
            "input_ids": ids,
            "attention_mask": _mask(ids.shape[1]),
            "use_cache": False,
            **kinds,
            **given,
        },
    )


def _rows(features: Any) -> int:
    """How many tokens' worth of features there are."""
    if isinstance(features, Mapping):
        features = features.get("pooler_output", features.get("last_hidden_state"))
    if isinstance(features, (tuple, list)):
        return sum(_rows(f) for f in features)
    return features.shape[:-1].numel()


def pictures(model: nn.Module) -> dict[str, Any]:
    """Two random images (or videos) in the form that the model takes."""
    names = _names(model)
    config = model.config
    vision: Any = getattr(config, "vision_config", config)
    if "image_grid_thw" in names:
        patch = vision.patch_size
        channels = next(
            (
                n
                for k in ("in_channels", "in_chans", "num_channels")
                if (n := getattr(vision, k, 0))
            ),
            3,
        )
        size = channels * getattr(vision, "temporal_patch_size", 1) * patch * patch
        grid = torch.tensor([[1, GRID, GRID]] * 2)
        return {"pixel_values": _noise(2 * GRID * GRID, size), "image_grid_thw": grid}
    images = _noise(2, *size_of(config))  # type: ignore[arg-type]
    if "spatial_shapes" in names:
        patch = vision.patch_size
        flat = (
            images.unfold(2, patch, patch)
            .unfold(3, patch, patch)
            .permute(0, 2, 3, 4, 5, 1)
            .flatten(3)
            .flatten(1, 2)
        )
        side = images.shape[-1] // patch
        return {
            "pixel_values": flat,
            "spatial_shapes": torch.tensor([[side, side]] * 2),
            "pixel_attention_mask": torch.ones(2, side * side, dtype=torch.int64),
        }
    given = {
        "pixel_values": images,
        "pixel_values_videos": torch.stack([images] * frames_of(config), dim=1),
    }  # type: ignore[arg-type]
    if type(model).__name__.startswith(ONE_OF_SEVERAL):
        given["pixel_values"] = images[:, None]
    if type(model).__name__.startswith(VIDEOS):
        given["pixel_values"] = given["pixel_values_videos"]
    if (
        "pixel_values" in names
        and "pixel_values_videos" in names
        and not type(model).__name__.startswith("Video")
    ):
        del given["pixel_values_videos"]
    side = images.shape[-1]
    if type(model).__name__.startswith(("LlavaNext", "LlavaOnevision")):
        given["pixel_values"] = torch.stack(
            [images] * 3, dim=1
        )  # the whole, and both halves of it
    if "image_sizes" in names and type(model).__name__.startswith(WITH_SIZES):
        given["image_sizes"] = torch.tensor([[side, side]] * 2)
    return given


def sound(model: nn.Module) -> dict[str, Any]:
    """Two random sounds as samples or as spectra."""
    config: Any = model.config
    names = (
        "num_mel_bins",
        "input_feat_per_channel",
        "feature_projection_input_dim",
        "input_dim",
    )
    bins = next(
        (
            n
            for c in parts(config)
            for name in names
            if isinstance(n := c.to_dict().get(name), int)
        ),
        16,
    )
    features = _noise(2, FRAMES, bins)
    if type(model).__name__.startswith(CHANNELS_FIRST):
        features = features.mT
    if type(model).__name__.startswith("AST"):
        return {"input_values": _noise(2, config.max_length, bins)}
    mask = torch.ones(2, FRAMES, dtype=torch.int64)
    return {
        "input_values": _noise(2, SAMPLES),
        "input_features": features,
        "input_features_mask": mask,
        "feature_attention_mask": mask,
    }


def size_of(config: PretrainedConfig) -> tuple[int, int, int]:
    """Channels, height and width that a configuration, or a part of it, names."""
    known = [c.to_dict() for c in parts(config)]
    names = ("image_size", "input_size", "crop_size")
    size = next(
        (c[name] for c in known for name in names if c.get(name) is not None), SIDE
    )
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return (
        next((n for c in known if isinstance(n := c.get("num_channels"), int)), 3),
        height,
        width,
    )


def frames_of(config: PretrainedConfig) -> int:
    """Frames of a video."""
    names = ("num_frames", "frames_per_clip")
    return next(
        (
            n
            for c in parts(config)
            for name in names
            if isinstance(n := c.to_dict().get(name), int)
        ),
        2,
    )


def parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """A configuration and those within it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from parts(value)


def _names(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def _known(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    names = _names(model)
    return {name: value for name, value in batch.items() if name in names}


def _mask(length: int) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, length - 2 :] = 0
    return mask


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))
