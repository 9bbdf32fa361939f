"""Head counts, head sizes and scales of a checkpoint, read from config.json or flags, never from weights."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, final

from qkeel.errors import DataError

# config.json, or a part of it: whatever JSON holds.
ConfigMapping = Mapping[str, Any]


def words(text: str) -> frozenset[str]:
    """Returns the words of a table."""
    return frozenset(text.split())


# Keys of config.json by meaning; the first one present counts.
N_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "attention_heads",
    "encoder_attention_heads",
)
N_KV_HEADS = (
    "num_key_value_heads",
    "n_kv_heads",
    "num_kv_heads",
    "multi_query_group_num",
    "n_head_kv",
)
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "d_kv")
# Whether q and k are normed: by any of these keys.
NORMED = (
    "use_qk_norm",
    "qk_layernorm",
    "qk_norm",
    "use_qk_layernorm",
    "query_key_norm",
)
N_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Words in the name of a stack of layers -> the keys of its own number.
N_LAYERS_OF = {
    "encoder": ("encoder_layers", "num_encoder_layers", *N_LAYERS),
    "decoder": ("decoder_layers", "num_decoder_layers"),
    "single_transformer": ("num_single_layers",),
}
# Parts of a composite config, and words in their tensors' names; the first match counts.
SECTIONS = (
    ("vision_config", ("vision", "visual", "image")),
    ("audio_config", ("audio",)),
    ("encoder", ("encoder.",)),
    ("decoder", ("decoder.",)),
    ("text_config", ("",)),
    ("llm_config", ("",)),
    ("thinker_config", ("",)),
    ("model", ("",)),  # a qkeel run
)
# Model types whose norms multiply by 1 + w (transformers 5.23, modeling files). A part of a composite model has a type
# of its own.
ONE_PLUS = words(
    """
    gemma gemma2 gemma3 gemma3_text recurrent_gemma vaultgemma t5gemma t5_gemma_module t5gemma2 t5gemma2_text
    t5gemma2_encoder t5gemma2_decoder qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen4_exp
    qwen4_exp_text minimax_m3_vl minimax_m3_vl_text muse_glimmer muse_glimmer_text muse_spark nemotron step3p5 step3p7
    """
)
# Model types that do not divide logits by √head_dim (transformers 5.23, modeling files).
UNSCALED = words(
    """
    t5 mt5 umt5 longt5 switch_transformers pop2piano udop gpt_neo gemma3n gemma3n_text gemma4 gemma4_text
    gemma4_vision gemma4_unified gemma4_unified_text diffusion_gemma diffusion_gemma_text embedding_gemma2
    embedding_gemma2_text dia dia_encoder dia_decoder pix2struct_text_model pix2struct_vision_model
    """
)
# Model types whose logits tests/audit/test_conventions.py compares with the bounds, in the code of transformers 5.23.
# The bounds of any other type rest on what names usually mean.
VERIFIED = words(
    """
    cohere2 deepseek_v2 deepseek_v3 exaone4 falcon_h1 gemma gemma2 gemma3_text gemma3n_text gemma4_text glm4 gpt2
    gpt_bigcode gpt_neox gpt_oss granite llama ministral3 mistral nemotron olmo2 olmo3 persimmon phi phi3 qwen2
    qwen3 qwen3_5_moe_text qwen3_5_text qwen3_next smollm3 starcoder2
    """
)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes of an attention layer, each None if neither config nor flags give it. A `scale` of None means
    1/√head_dim.

    >>> Geometry(n_heads=8).scale_of(64)
    0.125
    """

    n_heads: int | None = None  #: query heads
    n_kv_heads: int | None = None  #: key heads
    head_dim: int | None = None  #: d, the width of one head's query
    nope_dim: int | None = None  #: latent attention: unrotated dimensions of a head
    rope_dim: int | None = None  #: latent attention: rotated dimensions of a head
    value_dim: int | None = None  #: dimensions of one head's value
    scale: float | None = None
    rope_factor: float = 1.0  #: factor above 1 on cos and sin (YaRN, LongRoPE)
    #: as in config.json; decides whether norms multiply by w or 1 + w
    model_type: str | None = None
    normed: bool = False  #: config.json says that q and k are normed
    #: config.json says that the block's norms follow attention
    norm_after: bool = False
    #: fused weight: "blocks" for [q | k | v], or "groups" for q, k, v per key head
    layout: str | None = None
    stages: tuple[
        tuple[str, int], ...
    ] = ()  #: query heads of the layers whose name starts with or contains a stage

    @property
    def one_plus(self) -> bool:
        """True if norms multiply by 1 + w."""
        return self.model_type in ONE_PLUS

    def scale_of(self, head_dim: int) -> float:
        """Returns the factor on q·k."""
        return head_dim**-0.5 if self.scale is None else self.scale


def read_geometry(config: ConfigMapping, tensor: str, flags: Geometry) -> Geometry:
    """Returns the sizes for the named tensor; flags override config.json."""
    entries = section(config, tensor)
    if str(entries.get("_class_name", "")).startswith("UNet"):
        entries = _unet(entries, tensor)
    # An encoder-decoder may give its halves different numbers of heads.
    keys = ("decoder_attention_heads", *N_HEADS) if "decoder." in tensor else N_HEADS
    geometry = Geometry(
        n_heads=first_number(entries, keys),
        n_kv_heads=_kv_heads(entries),
        head_dim=first_number(entries, HEAD_DIM),
        nope_dim=first_number(entries, ("qk_nope_head_dim",)),
        rope_dim=first_number(entries, ("qk_rope_head_dim",)),
        value_dim=first_number(entries, ("v_head_dim",)),
        scale=_scale(entries, tensor),
        rope_factor=_rope_factor(entries),
        model_type=entries.get("model_type", config.get("model_type")),
        normed=any(entries.get(key) is True for key in NORMED),
        norm_after=any(entries.get(key) is True for key in ("swin_norm", "norm_after")),
    )
    overrides = {
        field.name: value
        for field in dataclasses.fields(flags)
        if (value := getattr(flags, field.name)) != field.default
    }
    for stage, heads in flags.stages:
        if stage in tensor:
            overrides |= {"n_heads": heads, "n_kv_heads": heads}
    return dataclasses.replace(geometry, **overrides)


def _unet(config: ConfigMapping, tensor: str) -> ConfigMapping:
    """Returns the config of one stage of a diffusers UNet, where `attention_head_dim` is the number of heads, one for
    all stages or a list from the outermost to the innermost."""
    heads = config.get("num_attention_heads") or config.get("attention_head_dim")
    stage = re.search(r"(down|up)_blocks\.(\d+)", tensor)
    if isinstance(heads, list) and heads:
        number = len(heads) - 1 if stage is None else int(stage[2])
        order = heads[::-1] if stage is not None and stage[1] == "up" else heads
        heads = order[min(number, len(heads) - 1)]
    return {"_class_name": config["_class_name"], "num_attention_heads": heads}


def section(config: ConfigMapping, tensor: str) -> ConfigMapping:
    """Returns the part of a composite config that describes the named tensor or module."""
    for key, words in SECTIONS:
        entries = config.get(key)
        if isinstance(entries, Mapping) and any(word in tensor for word in words):
            return entries
    return config


def first_number(config: ConfigMapping, keys: tuple[str, ...]) -> int | None:
    """Returns the whole number of the first of the keys that has one above 0, or None.

    Raises:
        DataError: the value is no whole number.
    """
    for key in keys:
        value = config.get(key)
        if isinstance(value, (str, bool, float)):
            raise DataError(
                f"config.json has {value!r:.60} for {key}; expected a whole number: correct or restore it"
            )
        if isinstance(value, int) and value > 0:
            return value
    return None


def _kv_heads(config: ConfigMapping) -> int | None:
    nested = config.get("attn_config")
    if isinstance(nested, Mapping) and "kv_n_heads" in nested:
        return first_number(nested, ("kv_n_heads",))
    if (
        config.get("multi_query") is True
        and config.get("new_decoder_architecture") is not True
    ):
        # Falcon, GPT-BigCode.
        return 1
    key_heads = first_number(config, N_KV_HEADS)
    # The halves of an encoder-decoder may differ in their heads, and N_HEADS would give those of the encoder to both.
    if key_heads is not None or "decoder_attention_heads" in config:
        return key_heads
    # Models without grouped keys omit the field.
    return first_number(config, N_HEADS)


def _scale(config: ConfigMapping, tensor: str) -> float | None:
    """Returns the scale of the named tensor's layer, or None for 1/√head_dim.

    DeepSeek's YaRN multiplies that by (0.1·m·ln s + 1)². Falcon-H1 multiplies the layer's input by one number and the
    keys by another one. Ministral 3 multiplies q by 1 + β ln(1 + ⌊position / L⌋), which is largest at the last
    position.
    """
    nested = config.get("attn_config")
    if isinstance(nested, Mapping) and (scale := _positive(nested, "softmax_scale")):
        return scale
    if (
        config.get("model_type") in UNSCALED
        or config.get("scale_attn_weights") is False
    ):
        return 1.0
    if scalar := _positive(config, "query_pre_attn_scalar"):
        return scalar**-0.5
    if multiplier := _positive(config, "attention_multiplier"):
        return multiplier
    nope = first_number(config, ("qk_nope_head_dim",)) or 0
    width = nope + (first_number(config, ("qk_rope_head_dim",)) or 0)
    size, heads = first_number(config, HEAD_DIM), first_number(config, N_HEADS)
    hidden = first_number(config, ("hidden_size", "n_embd", "d_model"))
    if size is None and heads and hidden:
        size = hidden // heads
    # NaN: the config does not give the size.
    usual = size**-0.5 if size else math.nan
    number = re.search(r"\.(\d+)\.", tensor)
    if config.get("scale_attn_by_inverse_layer_idx") is True and number:
        return usual / (int(number[1]) + 1)
    keys = _positive(config, "key_multiplier")
    inputs = _positive(config, "attention_in_multiplier")
    if keys or inputs:
        # A bias is not multiplied with the input, so a multiplier below 1 gives no smaller bound.
        return usual * (keys or 1.0) * max(1.0, inputs or 1.0) ** 2
    last = _positive(config, "max_position_embeddings")
    for rope in _ropes(config):
        over, factor = _positive(rope, "mscale_all_dim"), _positive(rope, "factor")
        if width and over and factor and factor > 1:
            return width**-0.5 * (0.1 * over * math.log(factor) + 1) ** 2
        beta = _positive(rope, "llama_4_scaling_beta")
        before = _positive(rope, "original_max_position_embeddings")
        if beta and before and last:
            return usual * (1 + beta * math.log(1 + (last - 1) // before))
    return None


def _ropes(config: ConfigMapping) -> list[ConfigMapping]:
    """Returns the rotary options of a config: one mapping, or one for each type of layer."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return []
    by_type = [entries for entries in rope.values() if isinstance(entries, Mapping)]
    return by_type or [rope]


def _positive(config: ConfigMapping, key: str) -> float | None:
    """Returns the named number; None if it is missing, null or 0.

    Raises:
        DataError: the value is neither a positive number nor missing, null or 0.
    """
    value = config.get(key)
    if value is None or (value == 0 and not isinstance(value, str)):
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value < math.inf
    ):
        raise DataError(
            f"config.json has {str(value)[:60]!r} for {key}; expected a number above 0: correct or restore it"
        )
    return float(value)


def _rope_factor(config: ConfigMapping) -> float:
    """Returns the largest factor on cos and sin over the types of layers, at least 1.

    YaRN: 0.1 m ln s + 1 (Peng et al. 2023, arXiv 2309.00071, equation 22; m, m_all as in DeepSeek's config).
    LongRoPE: √(1 + ln s / ln L) (Ding et al. 2024, arXiv 2402.13753, as in transformers 5.23).
    """
    largest = 1.0
    after = _positive(config, "max_position_embeddings")
    for rope in _ropes(config):
        kind, factor = (
            rope.get("rope_type", rope.get("type")),
            _positive(rope, "factor"),
        )
        stated = [
            _positive(rope, key) or 0.0
            for key in ("attention_factor", "long_mscale", "short_mscale")
        ]
        name = "original_max_position_embeddings"
        before = _positive(rope, name) or _positive(config, name)
        if any(stated):
            largest = max(largest, *stated)
        elif kind == "yarn" and factor and factor > 1:
            m, over = _positive(rope, "mscale"), _positive(rope, "mscale_all_dim")
            log = 0.1 * math.log(factor)
            yarn = (m * log + 1) / (over * log + 1) if m and over else log + 1
            largest = max(largest, yarn)
        elif kind == "longrope" and before and before > 1 and after:
            growth = math.log(max(after / before, 1.0)) / math.log(before)
            largest = max(largest, math.sqrt(1 + growth))
    return largest
