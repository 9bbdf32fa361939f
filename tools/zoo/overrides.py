"""What the rules of build.py do not get right, per model type."""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}

# None takes a field away, so that the configuration's default stays.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 96},
    "big_bird": {"attention_type": "original_full"},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "hidden_size": 32},
    },
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "head_dim": 4,
        "first_k_dense_replace": 1,
    },
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "Dots3NoteForCausalLM": {
        "per_layer_config": {},
        "head_dim": 12,
        "qk_rope_head_dim": 4,
    },
    "Dots3NoteForConditionalGeneration": {
        "text_config": {"per_layer_config": {}},
        "vision_config": {
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
            "mlp_layer_types": ["dense", "dense"],
        },
        "audio_config": {"adapter_out_dim": 32, "adapter_input_size": 32},
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
    },
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
        "num_layers": 2,
    },
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "moe_intermediate_size": 16,
    },
    "longcat_flash": {
        "head_dim": 4,
        "qk_head_dim": 12,
        "qk_rope_head_dim": 4,
        "num_key_value_heads": 4,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "lru_width": 32,
        "attention_window_size": 16,
    },
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 8],
    },
    "zamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
    },
}

# Models that return less of their weights than they compute; what their modules hand on stands in for it.
_POINTS = "the weights of sampled points that it returns as attentions are no products of queries and keys"
CUT: dict[str, str] = {
    "CpmAntForCausalLM": "cuts the rows and columns of its 32 prompt tokens out of the weights it returns",
    "DeformableDetrForObjectDetection": _POINTS,
    "GroundingDinoForObjectDetection": _POINTS,
    "MMGroundingDinoForObjectDetection": _POINTS,
    "RfDetrForObjectDetection": _POINTS,
}

# What these return as cross-attentions are such weights too; the rest is as usual.
POINTS = tuple(
    f"{n}ForObjectDetection"
    for n in ("RTDetr", "RTDetrV2", "PPDocLayoutV3", "PPDocLayoutV4")
)

_CHUNKS = (4, "vision tower: two layers, for each of two images; weights dropped")

# Attentions, counted from the configuration, whose weights nobody gives away.
UNRETURNED: dict[str, tuple[int, str]] = {
    "Inkling2ForCausalLM": (
        4,
        "residual streams that attend to each other: twice per layer, once in the first, once at the end",
    ),
    "CohereCompassForConditionalGeneration": _CHUNKS,
    "Cosmos3EdgeForConditionalGeneration": _CHUNKS,
    "Cosmos3OmniForConditionalGeneration": _CHUNKS,
    "Exaone4_5_ForConditionalGeneration": _CHUNKS,
    "HyperCLOVAXVisionV2ForConditionalGeneration": _CHUNKS,
    "Qwen2_5_VLForConditionalGeneration": _CHUNKS,
    "Qwen2VLForConditionalGeneration": _CHUNKS,
    "GlmOcrForConditionalGeneration": _CHUNKS,
    "Glm4vMoeForConditionalGeneration": _CHUNKS,
    "Glm4vForConditionalGeneration": _CHUNKS,
    "Glm46VForConditionalGeneration": _CHUNKS,
    "Qwen3_5ForConditionalGeneration": _CHUNKS,
    "Qwen3_5MoeForConditionalGeneration": _CHUNKS,
    "Qwen3VLForConditionalGeneration": _CHUNKS,
    "Qwen3VLMoeForConditionalGeneration": _CHUNKS,
    "Qwen4ExpForConditionalGeneration": _CHUNKS,
    "CvtForImageClassification": (6, "1 + 2 + 3 layers"),
    "Florence2ForConditionalGeneration": (
        8,
        "vision tower: a spatial and a channel attention in each of four stages",
    ),
    "LxmertForQuestionAnswering": (
        3,
        "self-attentions of the cross encoder and one of its two cross-attentions",
    ),
    "LevitForImageClassification": (
        5,
        "three stages of one layer and two attentions that shrink between them",
    ),
    "MobileViTForImageClassification": (9, "2 + 4 + 3 layers, fixed in the code"),
    "ProphetNetForConditionalGeneration": (
        4,
        "encoder and cross-attention, two layers each: returned before the softmax",
    ),
    "PegasusXForConditionalGeneration": (
        4,
        "encoder: a local and a global attention in each of two layers",
    ),
    "SqueezeBertForMaskedLM": (2, "two layers: returned before the softmax"),
    "TimesformerForVideoClassification": (
        2,
        "attention over time in each of two layers; that over space is returned",
    ),
}

# Architectures without a softmax of queries times keys: state spaces, convolutions, Fourier transforms, other kernels.
_NONE = """falcon_mamba mamba mamba2 rwkv xlstm
    bit efficientnet focalnet hgnet_v2 mobilenet_v1 mobilenet_v2 mobilevitv2 poolformer pp_lcnet regnet resnet
    swiftformer textnet fnet mra yoso"""
WITHOUT_ATTENTION = frozenset(_NONE.split())

# What else a pass does not say, by class.
_FULL = "full attention, as for short sequences; block-sparse attention is not tried"
_LIFTED = "built without transformers' check of shared layers, which it cannot pass"
NOTES: dict[str, str] = {
    "BigBirdForCausalLM": _FULL,
    "BigBirdForMaskedLM": _FULL,
    "BigBirdPegasusForCausalLM": _FULL,
    "BigBirdPegasusForConditionalGeneration": _FULL,
    "NystromformerForMaskedLM": "as many landmarks as keys: exact attention; the approximation is not tried",
    "Gemma4AssistantForCausalLM": _LIFTED,
    "Gemma4UnifiedAssistantForCausalLM": _LIFTED,
}

# Packages that are not installed here.
NEEDS: dict[str, str] = {
    "gemma3n": "timm",
    "omdet-turbo": "timm",
    "edgetam": "timm",
    "timm_wrapper": "timm",
    "fast_vlm": "timm",
    "perception_lm": "timm",
    "dinat": "natten",
    "layoutlmv2": "detectron2",
    "eomt": "scipy",
    "eomt_dinov3": "scipy",
    "mask2former": "scipy",
    "maskformer": "scipy",
    "oneformer": "scipy",
    "videomt": "scipy",
    "inkling_mm_model": "scipy",
}

# Why a failure is one; they count as failures all the same.
REASONS: dict[str, str] = {
    "led": "sliding chunks are written into a new tensor piece by piece; the scores' way ends there",
    "longformer": "sliding chunks are written into a new tensor piece by piece; the scores' way ends there",
    "reformer": "the first token may attend to itself only through a mask value of -1e5: it counts as seeing nothing",
}
