"""Overrides for the second table, by model type or class name; as in overrides.py."""

from __future__ import annotations

from typing import Any


def _mrope(*sections: int) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": list(sections),
        }
    }


_SWIN = {
    "image_size": 64,
    "patch_size": 4,
    "window_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 2],
}
_SAM = {
    "vision_config": {
        "output_channels": 32,
        "num_pos_feats": 16,
        "window_size": 2,
        "global_attn_indexes": [1],
    },
    "prompt_encoder_config": {"hidden_size": 32},
    "mask_decoder_config": {"hidden_size": 32, "num_hidden_layers": 2},
}
_DPT = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8}

OTHERS: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 640},
    "aria": {"projector_patch_to_query_dict": {16: 6}},
    "blip-2": {
        "use_qformer_text_input": True,
        "qformer_config": {"use_qformer_text_input": True},
    },
    "cvt": {"depth": [1, 2, 3]},
    "donut-swin": _SWIN,
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], **_DPT},
    "esm": {
        "vocab_size": 96,
        "mask_token_id": 5,
        "position_embedding_type": "rotary",
        "pad_token_id": 1,
    },
    "esmc": {"vocab_size": 96},
    "glm46v": {"text_config": _mrope(2, 1, 1)},
    "glm4v": {"text_config": _mrope(2, 1, 1)},
    "glm4v_moe": {"text_config": _mrope(1, 1, 0)},
    "glm_ocr": {"text_config": _mrope(2, 1, 1)},
    "glmasr": {"audio_config": {"intermediate_size": 128}},
    "glpn": {"sr_ratios": [1, 1, 1, 1], "image_size": 64},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "levit": {"image_size": 64, "patch_size": 16},
    "lilt": {"hidden_size": 48},
    "llava_next": {"image_grid_pinpoints": [[32, 64], [64, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 64], [64, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 64], [64, 32]]},
    "mistral4": {"head_dim": 4},
    "mobilevit": {"image_size": 64},
    "mobilevitv2": {"image_size": 64},
    "perceiver": {
        "d_latents": 32,
        "num_latents": 8,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "qk_channels": 32,
        "v_channels": 32,
    },
    "pegasus_x": {
        "block_size": 7,
        "stagger_local_blocks": False,
    },  # the same for whole blocks of 7 tokens
    "qwen2_5_vl": {"text_config": _mrope(2, 1, 1)},
    "qwen2_vl": {"text_config": _mrope(2, 1, 1)},
    "ReformerForMaskedLM": {
        "is_decoder": False,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 8],
    },
    "sam": _SAM,
    "segformer": {"sr_ratios": [1, 1, 1, 1], "image_size": 64},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "swin": _SWIN,
    # Without padding to whole windows, whose rows the weights that are returned contain and qkeel leaves out.
    "swinv2": {"window_size": 2},
    "vjepa2": {
        "crop_size": 32,
        "frames_per_clip": 4,
        "pred_hidden_size": 32,
        "pred_num_attention_heads": 4,
        "pred_num_hidden_layers": 2,
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "wav2vec2-bert": {"vocab_size": 96},
    "wav2vec2-conformer": {"vocab_size": 96},
    "yolos": {"image_size": [32, 32]},
}
