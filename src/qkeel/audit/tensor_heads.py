"""Determines which rows of which tensors of a checkpoint form which head, from names, shapes and config.json."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from qkeel.errors import DataError
from qkeel.safetensors_io import Checkpoint, StoredTensor

# Head counts, head sizes and scale, read from config.json or flags, never from weights.

ConfigMapping = Mapping[str, Any]  # config.json, or a part of it: whatever JSON holds


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys of config.json by meaning; the first one present counts.
N_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")
N_KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "d_kv")
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
ONE_PLUS = ("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma", "t5gemma", "t5_gemma_module")
ONE_PLUS += ("t5gemma2", "t5gemma2_text", "t5gemma2_encoder", "t5gemma2_decoder", "qwen3_next", "qwen3_5")
ONE_PLUS += ("qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text", "minimax_m3_vl")
ONE_PLUS += ("minimax_m3_vl_text", "muse_glimmer", "muse_glimmer_text", "muse_spark", "nemotron", "step3p5", "step3p7")
# Model types that do not divide logits by √head_dim (transformers 5.23, modeling files).
UNSCALED = _words(
    """
    t5 mt5 umt5 longt5 switch_transformers pop2piano udop gpt_neo gemma3n gemma3n_text gemma4 gemma4_text
    gemma4_vision gemma4_unified gemma4_unified_text diffusion_gemma diffusion_gemma_text embedding_gemma2
    embedding_gemma2_text dia dia_encoder dia_decoder pix2struct_text_model pix2struct_vision_model
    """
)
# Model types whose logits tests/audit/test_conventions.py compares with the bounds, in the code of transformers 5.23.
# The bounds of any other type rest on what names usually mean.
VERIFIED = _words(
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
    1/√head_dim."""

    n_heads: int | None = None  #: query heads
    n_kv_heads: int | None = None  #: key heads
    head_dim: int | None = None  #: d, the width of one head's query
    nope_dim: int | None = None  #: latent attention: unrotated dimensions of a head
    rope_dim: int | None = None  #: latent attention: rotated dimensions of a head
    value_dim: int | None = None  #: dimensions of one head's value
    scale: float | None = None
    rope_factor: float = 1.0  #: factor above 1 on cos and sin (YaRN, LongRoPE)
    model_type: str | None = None  #: as in config.json; decides whether norms multiply by w or 1 + w
    normed: bool = False  #: config.json says that q and k are normed
    norm_after: bool = False  #: config.json says that the block's norms follow attention
    layout: str | None = None  #: fused weight: "blocks" for [q | k | v], or "groups" for q, k, v per key head

    @property
    def one_plus(self) -> bool:
        """True if norms multiply by 1 + w."""
        return self.model_type in ONE_PLUS

    def scale_of(self, head_dim: int) -> float:
        """Returns the factor on q·k."""
        return head_dim**-0.5 if self.scale is None else self.scale


def read_geometry(config: ConfigMapping, tensor: str, flags: Geometry) -> Geometry:
    """Returns the sizes for the named tensor; flags override config.json."""
    part = section(config, tensor)
    # An encoder-decoder may give its halves different numbers of heads.
    keys = ("decoder_attention_heads", *N_HEADS) if "decoder." in tensor else N_HEADS
    found = Geometry(
        n_heads=_first(part, keys),
        n_kv_heads=_kv_heads(part),
        head_dim=_first(part, HEAD_DIM),
        nope_dim=_first(part, ("qk_nope_head_dim",)),
        rope_dim=_first(part, ("qk_rope_head_dim",)),
        value_dim=_first(part, ("v_head_dim",)),
        scale=_scale(part, tensor),
        rope_factor=_rope_factor(part),
        model_type=part.get("model_type", config.get("model_type")),
        normed=any(part.get(key) is True for key in ("use_qk_norm", "qk_layernorm", "qk_norm")),
        norm_after=any(part.get(key) is True for key in ("swin_norm", "norm_after")),
        layout=_layout(part),
    )
    given = {field.name: getattr(flags, field.name) for field in dataclasses.fields(flags)}
    said = {name: value for name, value in given.items() if value is not None and value != getattr(_NO_FLAGS, name)}
    return dataclasses.replace(found, **said)


_NO_FLAGS = Geometry()


def _layout(config: ConfigMapping) -> str | None:
    """Returns the layout of a fused weight where the versions of a model type differ: ChatGLM-6B interleaves q, k and v
    per head, and its successors have blocks."""
    if config.get("model_type") != "chatglm":
        return None
    return "blocks" if "multi_query_attention" in config else "groups"


def section(config: ConfigMapping, tensor: str) -> ConfigMapping:
    """Returns the part of a composite config that describes the named tensor or module."""
    for key, words in SECTIONS:
        part = config.get(key)
        if isinstance(part, Mapping) and any(word in tensor for word in words):
            return part
    return config


def _first(config: ConfigMapping, keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, (str, bool, float)):
            raise DataError(f"config.json has {value!r:.60} for {key}; expected a whole number: correct or restore it")
        if isinstance(value, int) and value > 0:
            return value
    return None


def _kv_heads(config: ConfigMapping) -> int | None:
    nested = config.get("attn_config")
    if isinstance(nested, Mapping) and "kv_n_heads" in nested:
        return _first(nested, ("kv_n_heads",))
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        return 1  # Falcon, GPT-BigCode
    found = _first(config, N_KV_HEADS)
    if found is not None or "decoder_attention_heads" in config:
        return found
    return _first(config, N_HEADS)  # models without grouped keys omit the field


def _scale(config: ConfigMapping, tensor: str) -> float | None:
    """Returns the scale of the named tensor's layer, or None for 1/√head_dim.

    DeepSeek's YaRN multiplies that by (0.1·m·ln s + 1)². Falcon-H1 multiplies the layer's input by one number and the
    keys by another one. Ministral 3 multiplies q by 1 + β ln(1 + ⌊position / L⌋), which is largest at the last
    position.
    """
    nested = config.get("attn_config")
    if isinstance(nested, Mapping) and (given := _positive(nested, "softmax_scale")):
        return given
    if config.get("model_type") in UNSCALED or config.get("scale_attn_weights") is False:
        return 1.0
    if scalar := _positive(config, "query_pre_attn_scalar"):
        return scalar**-0.5
    if multiplier := _positive(config, "attention_multiplier"):
        return multiplier
    number = re.search(r"\.(\d+)\.", tensor)
    if config.get("scale_attn_by_inverse_layer_idx") is True and number:
        return _usual_scale(config) / (int(number[1]) + 1)
    keys, inputs = _positive(config, "key_multiplier"), _positive(config, "attention_in_multiplier")
    if keys or inputs:
        # A bias is not multiplied with the input, so a multiplier below 1 gives no smaller bound.
        return _usual_scale(config) * (keys or 1.0) * max(1.0, inputs or 1.0) ** 2
    width = (_first(config, ("qk_nope_head_dim",)) or 0) + (_first(config, ("qk_rope_head_dim",)) or 0)
    for rope in _ropes(config):
        over, factor = _positive(rope, "mscale_all_dim"), _positive(rope, "factor") or 1.0
        if width and over and factor > 1:
            return width**-0.5 * (0.1 * over * math.log(factor) + 1) ** 2
        beta, before = _positive(rope, "llama_4_scaling_beta"), _positive(rope, "original_max_position_embeddings")
        last = _positive(config, "max_position_embeddings")
        if beta and before and last:
            return _usual_scale(config) * (1 + beta * math.log(1 + (last - 1) // before))
    return None


def _usual_scale(config: ConfigMapping) -> float:
    """Returns 1/√head_dim, NaN if the config does not give the size of a head."""
    size, heads = _first(config, HEAD_DIM), _first(config, N_HEADS)
    if size is None and heads and (width := _first(config, ("hidden_size", "n_embd", "d_model"))):
        size = width // heads
    return size**-0.5 if size else math.nan


def _ropes(config: ConfigMapping) -> list[ConfigMapping]:
    """Returns the rotary options of a config: one mapping, or one for each type of layer."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return []
    return [part for part in rope.values() if isinstance(part, Mapping)] or [rope]


def _positive(config: ConfigMapping, key: str) -> float | None:
    """Returns the named number; None if it is missing, null or 0.

    Raises:
        DataError: the value is neither a positive number nor missing, null or 0.
    """
    value = config.get(key)
    if value is None or (value == 0 and not isinstance(value, str)):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise DataError(
            f"config.json has {str(value)[:60]!r} for {key}; expected a number above 0: correct or restore it"
        )
    return float(value)


def _rope_factor(config: ConfigMapping) -> float:
    """Returns the largest factor on cos and sin over the types of layers, at least 1.

    YaRN: 0.1 m ln s + 1 (Peng et al. 2023, arXiv 2309.00071, equation 22; m, m_all as in DeepSeek's config).
    LongRoPE: √(1 + ln s / ln L) (Ding et al. 2024, arXiv 2402.13753, as in transformers 5.23).
    """
    return max([1.0, *(_one_rope_factor(rope, config) for rope in _ropes(config))])


def _one_rope_factor(rope: ConfigMapping, config: ConfigMapping) -> float:
    kind = rope.get("rope_type", rope.get("type"))
    factor = _positive(rope, "factor") or 1.0
    if given := [x for key in ("attention_factor", "long_mscale", "short_mscale") if (x := _positive(rope, key))]:
        return max(given)
    if kind == "yarn" and factor > 1:
        m, over = _positive(rope, "mscale"), _positive(rope, "mscale_all_dim")
        top = 0.1 * (m if m and over else 1.0) * math.log(factor) + 1
        return top / (0.1 * over * math.log(factor) + 1) if m and over else top
    before = _positive(rope, name := "original_max_position_embeddings") or _positive(config, name)
    after = _positive(config, "max_position_embeddings")
    if kind == "longrope" and before and before > 1 and after:
        return math.sqrt(1 + math.log(max(after / before, 1.0)) / math.log(before))
    return 1.0


# Tables of names and shapes that show which rows of which weight make head h, and the code that applies them.
#
# A checkpoint contains no code, so only here are names interpreted. Nothing is guessed silently: config.json or a flag
# decides what a name leaves open, conventions are noted in the result, and the rest is listed as unknown.

# Query and key in separate weights: the last part of the module's name.
SEPARATE = (
    ("q_proj", "k_proj"),
    ("query", "key"),
    ("wq", "wk"),
    ("to_q", "to_k"),
    ("q_lin", "k_lin"),
    ("query_proj", "key_proj"),
    ("linear_q", "linear_k"),
    ("q", "k"),
)
# Query, key and value in one weight. blocks: [q | k | v]; groups: for each key head its queries, its key, its value
# (with as many key heads as heads: q, k, v interleaved per head); None: the name leaves it open, see GROUPED.
FUSED: dict[str, str | None] = {
    "qkv": "blocks",
    "qkv_proj": "blocks",
    "c_attn": "blocks",
    "Wqkv": "blocks",
    "in_proj_weight": "blocks",
    "query_key_value": None,
    "wqkv": "groups",
    "linear_qkv": "groups",
}
# Model types that override the table above (transformers 5.23, modeling files).
GROUPED = frozenset(["gpt_neox", "gpt_neox_japanese", "bloom", "falcon", "persimmon", "internlm2", "gpt_bigcode"])
OTHER = {"codegen": "its qkv_proj is cut into 4 parts of [q | v | k] (a relic of its training on TPUs)"}
# Model types whose q_proj holds, per head, the query and a gate of the same width.
GATED = frozenset(["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"])
# Gains of a q/k norm next to the projections: (query, key).
GAINS = (
    ("q_norm", "k_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
    ("query_norm", "key_norm"),
    ("norm_q", "norm_k"),
    ("q_ln", "k_ln"),
)
# The norm whose output the projections read, next to the attention module or one or two levels up.
INPUT_NORMS = ("input_layernorm", "attention_norm", "attn_norm", "layernorm_before", "pre_attention_layernorm")
# Model types in which the norm of such a name follows attention.
NOT_BEFORE = frozenset(["swinv2", "swin2sr"])
# Names of norms that precede attention in some models and follow it in others, with the model types in which they
# precede it (transformers 5.23, modeling files). In all other types such a norm gives no bound.
EITHER_NORM: Mapping[str, frozenset[str]] = {
    "ln_1": _words(
        """
        bridgetower bridgetower_text_model bridgetower_vision_model codegen decision_transformer gpt2
        gpt_bigcode gpt_neo gptj imagegpt
        """
    ),
    "layer_norm1": _words(
        """
        altclip altclip_text_model altclip_vision_model blip blip-2 blip_2_vision_model blip_text_model
        blip_vision_model chinese_clip chinese_clip_vision_model clip clip_text_model clip_vision_model git
        git_vision_model groupvit groupvit_text_model groupvit_vision_model idefics2 idefics2_vision idefics3
        idefics3_vision instructblip instructblip_vision_model instructblipvideo instructblipvideo_vision_model
        janus janus_vision_model kosmos-2 kosmos_2_vision_model metaclip_2 metaclip_2_text_model
        metaclip_2_vision_model mlcd_vision_model owlv2 owlv2_text_model owlv2_vision_model owlvit
        owlvit_text_model owlvit_vision_model phi4_multimodal_vision siglip siglip2 siglip2_text_model
        siglip2_vision_model siglip_text_model siglip_vision_model smolvlm smolvlm_vision video_llama_3_vision
        """
    ),
    "norm1": _words(
        """
        cohere_compass_vision dinov2 dinov2_with_registers dinov3_vit eomt eomt_dinov3 ernie4_5_vl_moe_vision
        exaone4_5_vision glm4v_moe_vision glm4v_vision glm_image_vision glm_ocr_vision kimi_k25_vision mgp-str
        qwen2_5_omni_vision_encoder qwen2_5_vl_vision qwen2_vl_vision qwen3_5_moe_vision qwen3_5_vision
        qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision radio sapiens2
        tipsv2_vision_model videomt vitdet vjepa2
        """
    ),
    "self_attn_layer_norm": _words(
        """
        audioflamingo3_encoder bigbird_pegasus biogpt blenderbot kosmos-2 kosmos-2.5 kosmos_2_5_text_model
        kosmos_2_text_model m2m_100 mbart musicgen_decoder musicgen_melody_decoder nllb-moe pegasus pegasus_x
        qwen2_5_omni_audio_encoder qwen2_audio_encoder qwen3_asr_encoder qwen3_omni_moe_audio_encoder
        seamless_m4t speech_to_text voxtral_encoder voxtral_realtime_encoder wav2vec2-bert
        wav2vec2-conformer whisper xglm
        """
    ),
    "ln1": frozenset(),
    "ln_attn": frozenset(["falcon"]),
}
_ATTENTION = re.compile(r"^(.*?\b\w*(?:attn|attention)\w*)\.", re.IGNORECASE)
_CROSS = re.compile(r"cross|xattn|encoder_attn|enc_attn|src_attn|encdec|attn2", re.IGNORECASE)
_SCALES = ("_scale_inv", "_scale", ".SCB", ".absmax")
_SCALES_OF_8_BITS = ("scale_weight", "weight_scale", "scale")  # beside an 8-bit weight

Tensors = Mapping[str, StoredTensor]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Rows (axis 0) or columns (axis 1) of a weight: `rows` of them from each of `starts`, with one start per head."""

    tensor: str
    axis: int = 0
    starts: tuple[int, ...]
    rows: int
    bias: str | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SitePlan:
    """The weights of one attention layer in a checkpoint. Only MLA, whose logit is a sum of two products, has rope
    parts."""

    name: str
    layout: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    query: Slice
    key: Slice
    query_rope: Slice | None = None
    key_rope: Slice | None = None
    query_gain: str | None = None
    key_gain: str | None = None
    query_input: str | None = None
    key_input: str | None = None
    rope_input: str | None = None
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    def slices(self) -> list[Slice]:
        """Returns the parts that exist."""
        return [s for s in (self.query, self.key, self.query_rope, self.key_rope) if s is not None]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """Something that looks like attention but could not be read, and the reason."""

    name: str  #: name of the module or weight
    reason: str  #: why it could not be read


PlansOrUnknown = list[SitePlan | Unknown]


def recognise(tensors: Tensors, geometry: Callable[[str], Geometry]) -> PlansOrUnknown:
    """Returns every attention layer of a checkpoint in the order of its tensors, and the candidates that cannot be
    read."""
    found: PlansOrUnknown = []
    for name, tensor in tensors.items():
        module, dot, leaf = _split(name)
        if not dot and module == "":
            continue
        got = _site(tensors, module, leaf, tensor, geometry(name))
        if got is not None:
            found.append(got)
    return found + _left_over(tensors, [f.name for f in found])


def missing_layers(checkpoint: Checkpoint, sites: Sequence[SitePlan | Unknown]) -> list[Unknown]:
    """Returns the layers that config.json announces and of which no tensor is there, as after a partial download.

    Layers are the numbered modules in which attention lies. Where only one of them holds attention, others may share
    its weights, so nothing is missing.
    """
    numbers: dict[str, set[int]] = {}
    for site in sites:
        match = re.match(r"(.*?)\.?(\d+)(\.|$)", site.name)
        if match:
            numbers.setdefault(match[1], set()).add(int(match[2]))
    stacks = {stack for stack, layers in numbers.items() if len(layers) > 1}
    for name in checkpoint.tensors:
        match = re.match(r"(.*?)\.?(\d+)\.", name)
        if match and match[1] in stacks:
            numbers[match[1]].add(int(match[2]))
    unknown = []
    for stack in sorted(stacks):
        keys = N_LAYERS
        for word, special in N_LAYERS_OF.items():
            keys = special if word in stack else keys
        total = _first(section(checkpoint.config, stack), keys) or 0
        for layer in sorted(set(range(total)) - numbers[stack]):
            why = f"config.json says {total} layers, and no tensor of this one is in the checkpoint; download it again"
            unknown.append(Unknown(f"{stack}.{layer}".lstrip("."), why))
    return unknown


def _split(name: str) -> tuple[str, bool, str]:
    """`a.b.q_proj.weight` -> a.b, q_proj; `a.b.in_proj_weight` -> a.b, in_proj_weight."""
    path = name.removesuffix(".weight")
    module, _, leaf = path.rpartition(".")
    return module, path != name or leaf == "in_proj_weight", leaf


def _site(
    tensors: Tensors, module: str, leaf: str, tensor: StoredTensor, geometry: Geometry
) -> SitePlan | Unknown | None:
    at = f"{module}." if module else ""
    key = next((k for q, k in SEPARATE if q == leaf and f"{at}{k}.weight" in tensors), None)
    made: SitePlan | Unknown | None = None
    if leaf in ("q_b_proj", "q_proj") and f"{at}kv_a_proj_with_mqa.weight" in tensors:
        made = _latent(tensors, at, leaf, geometry)
    elif leaf == "q_up" and f"{at}k_up.weight" in tensors:
        made = _own_latent(tensors, at, geometry)
    elif key is not None:
        made = _separate(tensors, at, leaf, key, geometry)
    elif leaf in FUSED and tensor.name.endswith(("weight",)):
        made = _fused(tensors, at, leaf, geometry)
    if isinstance(made, SitePlan):
        return _readable(tensors, _with_norms(tensors, made, geometry))
    return None if made is None else Unknown(module or leaf, made.reason)


def _readable(tensors: Tensors, plan: SitePlan) -> SitePlan | Unknown:
    for part in plan.slices():
        tensor = tensors[part.tensor]
        known = [part.tensor + end for end in _SCALES]
        if tensor.dtype.startswith("F8"):
            known += [f"{part.tensor.removesuffix('weight')}{name}" for name in _SCALES_OF_8_BITS]
        scale = next((name for name in known if name in tensors), None)
        if not tensor.floating or scale:
            why = f"scales in {scale}" if scale else f"stored as {tensor.dtype}"
            return Unknown(plan.name, f"{part.tensor} is quantised ({why}); scan the checkpoint before quantisation")
    return plan


def _separate(tensors: Tensors, at: str, q: str, k: str, geometry: Geometry) -> SitePlan | Unknown:
    query, key = tensors[f"{at}{q}.weight"], tensors[f"{at}{k}.weight"]
    for name, tensor in ((q, query), (k, key)):
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            return Unknown("", f"{name} has shape {list(tensor.shape)}, expected a matrix")
    heads = geometry.n_heads
    if heads is None:
        return Unknown("", f"the number of heads is not known; give --n-heads ({q} has {query.shape[0]} rows)")
    per_head, rest = divmod(query.shape[0], heads)
    gated = geometry.model_type in GATED
    if rest or (gated and per_head % 2):
        return Unknown(
            "", f"{q} has {query.shape[0]} rows, which do not split evenly into {heads} heads; give --n-heads"
        )
    size = per_head // 2 if gated else per_head
    groups, rest = divmod(key.shape[0], size)
    wrong = _contradiction(geometry, size, groups, heads) if not rest else f"{k} has {key.shape[0]} rows"
    if wrong:
        return Unknown("", f"{heads} heads of {size} do not fit: {wrong}; give --n-heads and --n-kv-heads")
    return SitePlan(
        name=at[:-1],
        layout="gated q, k apart" if gated else "q, k apart",
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=size,
        query=_even(tensors, f"{at}{q}", heads, per_head, size),
        key=_even(tensors, f"{at}{k}", groups, size, size),
    )


def _contradiction(geometry: Geometry, size: int, groups: int, heads: int) -> str:
    if geometry.n_kv_heads not in (None, groups):
        return f"there are {groups} key heads of that width, but config or flags say {geometry.n_kv_heads}"
    if heads % max(groups, 1):
        return f"{groups} key heads do not divide {heads} heads"
    if geometry.head_dim not in (None, size):
        return f"config or flags say head_dim {geometry.head_dim}"
    return ""


def _even(tensors: Tensors, module: str, heads: int, step: int, rows: int, first: int = 0) -> Slice:
    bias = f"{module}.bias"
    starts = tuple(first + step * h for h in range(heads))
    return Slice(tensor=f"{module}.weight", starts=starts, rows=rows, bias=bias if bias in tensors else None)


def _fused(tensors: Tensors, at: str, leaf: str, geometry: Geometry) -> SitePlan | Unknown:
    bare = leaf == "in_proj_weight"
    name = f"{at}{leaf}" if bare else f"{at}{leaf}.weight"
    bias = f"{at}in_proj_bias" if bare else f"{at}{leaf}.bias"
    shape, heads, kind = tensors[name].shape, geometry.n_heads, geometry.model_type
    layout = geometry.layout or ("groups" if kind in GROUPED else FUSED[leaf])
    if kind in OTHER and not geometry.layout:
        return Unknown("", f"{OTHER[kind]}: not read")
    if len(shape) != 2 or shape[0] == shape[1] or 0 in shape:
        return Unknown("", f"{leaf} has shape {list(shape)}, expected a matrix that is not square")
    if heads is None:
        return Unknown("", f"the number of heads is not known; give --n-heads ({leaf} is {shape[0]} x {shape[1]})")
    if layout is None:
        return Unknown(
            "",
            f"{leaf} is ambiguous: it could be [q | k | v] or q, k, v per head; give --layout blocks or --layout "
            "groups",
        )
    groups = geometry.n_kv_heads or heads
    width = _width(shape, heads, groups, geometry.head_dim)
    if not width or heads % groups:
        size = f"{shape[0]} x {shape[1]}"
        return Unknown("", f"{leaf} is {size}, whose shape gives no width for {heads} heads and {groups} key heads")
    q, k = _starts(layout, heads, groups, width)
    axis = 0 if shape[0] == width * (heads + 2 * groups) else 1
    own = bias if bias in tensors else None
    said = geometry.layout is not None or kind is not None
    return SitePlan(
        name=at[:-1] or leaf,
        layout="[q | k | v]" if layout == "blocks" else "q, k, v per key head",
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=width,
        query=Slice(tensor=name, axis=axis, starts=q, rows=width, bias=own),
        key=Slice(tensor=name, axis=axis, starts=k, rows=width, bias=own),
        assumed=() if said else (f"order of q, k, v taken from the convention for {leaf}",),
    )


def _width(shape: tuple[int, ...], heads: int, groups: int, head_dim: int | None) -> int:
    """Returns the head_dim of a fused weight, or 0. nn.Linear has outputs in rows, GPT-2's Conv1D in columns."""
    parts = heads + 2 * groups
    fits = [n // parts for n in shape if n % parts == 0]
    if head_dim is not None:
        return head_dim if head_dim in fits else 0
    # Without head_dim, the input is usually as wide as all heads together.
    usual = [n // parts for n, inputs in (shape, shape[::-1]) if n % parts == 0 and n // parts * heads == inputs]
    return min(usual) if usual else fits[0] if len(fits) == 1 else 0


def _starts(layout: str, heads: int, groups: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the first row of each query head and of each key head."""
    if layout == "blocks":
        return tuple(h * width for h in range(heads)), tuple((heads + g) * width for g in range(groups))
    share = heads // groups
    step = (share + 2) * width
    query = tuple((h // share) * step + (h % share) * width for h in range(heads))
    return query, tuple(g * step + share * width for g in range(groups))


def _latent(tensors: Tensors, at: str, leaf: str, geometry: Geometry) -> SitePlan | Unknown:
    """Plans DeepSeek's MLA: q_b has [nope | rope] per head, kv_b [nope | value] per head, kv_a [latent | rope]."""
    heads, nope, rope, value = geometry.n_heads, geometry.nope_dim, geometry.rope_dim, geometry.value_dim
    if heads is None or nope is None or rope is None or value is None:
        return Unknown(
            "", "MLA needs num_attention_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim in config.json"
        )
    need = {leaf: heads * (nope + rope), "kv_b_proj": heads * (nope + value)}
    for name, rows in need.items():
        stored = tensors.get(f"{at}{name}.weight")
        if stored is None or len(stored.shape) != 2 or stored.shape[0] != rows:
            shape = "missing" if stored is None else f"of shape {list(stored.shape)}"
            return Unknown("", f"{name} is {shape}, but config.json requires {rows} rows")
    latent = tensors[f"{at}kv_b_proj.weight"].shape[1]
    if tensors[f"{at}kv_a_proj_with_mqa.weight"].shape[0] != latent + rope:
        return Unknown("", f"kv_a_proj_with_mqa does not have {latent} + {rope} rows")
    return SitePlan(
        name=at[:-1],
        layout="MLA",
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=nope + rope,
        query=_even(tensors, f"{at}{leaf}", heads, nope + rope, nope),
        key=_even(tensors, f"{at}kv_b_proj", heads, nope + value, nope),
        query_rope=_even(tensors, f"{at}{leaf}", heads, nope + rope, rope, nope),
        key_rope=_even(tensors, f"{at}kv_a_proj_with_mqa", 1, rope, rope, latent),
        query_input=_present(tensors, f"{at}q_a_layernorm") if leaf == "q_b_proj" else None,
        key_input=_present(tensors, f"{at}kv_a_layernorm"),
    )


def _own_latent(tensors: Tensors, at: str, geometry: Geometry) -> SitePlan | Unknown:
    """Plans qkeel.nn.MLA, which has a separate weight for every part."""
    heads = geometry.n_heads
    names = ("q_up", "k_up", "q_rope", "k_rope")
    stored = [tensors.get(f"{at}{name}.weight") for name in names]
    if heads is None:
        return Unknown("", "the number of heads is not known; give --n-heads")
    if any(s is None or len(s.shape) != 2 for s in stored) or any(s.shape[0] % heads for s in stored[:3] if s):
        return Unknown("", f"expected matrices {', '.join(names)} whose rows split evenly into {heads} heads")
    up, _, rope, shared = (s.shape[0] for s in stored if s)
    return SitePlan(
        name=at[:-1],
        layout="MLA",
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=up // heads + shared,
        query=_even(tensors, f"{at}q_up", heads, up // heads, up // heads),
        key=_even(tensors, f"{at}k_up", heads, up // heads, up // heads),
        query_rope=_even(tensors, f"{at}q_rope", heads, rope // heads, rope // heads),
        key_rope=_even(tensors, f"{at}k_rope", 1, shared, shared),
        query_input=_present(tensors, f"{at}q_latent_norm"),
        key_input=_present(tensors, f"{at}kv_latent_norm"),
    )


def _present(tensors: Tensors, module: str) -> str | None:
    """Returns the name of a norm's gain, `module.weight` or the bare parameter `module`; None if neither exists."""
    names = (f"{module}.weight", module)
    return next((name for name in names if name in tensors and 0 not in tensors[name].shape), None)


def _with_norms(tensors: Tensors, plan: SitePlan, geometry: Geometry) -> SitePlan:
    """Returns the plan with the norms next to and before the projections."""
    at = f"{plan.name}." if plan.name else ""
    gains = [(_present(tensors, at + q), _present(tensors, at + k)) for q, k in GAINS]
    query, key = next((pair for pair in gains if pair[0] or pair[1]), (None, None))
    mla = plan.query_rope is not None
    before, why = _norm_before(tensors, plan.name, geometry)
    if geometry.normed and not (query or key or mla):
        before, why = None, "config.json says that q and k are normed, and their gains were not found: no bound"
    # Queries without their own latent (DeepSeek-V2-Lite) are projected from the module's input.
    own_query = f"{at}q_up.weight" == plan.query.tensor and f"{at}q_down.weight" not in tensors
    latent = mla and not own_query and not plan.query.tensor.endswith("q_proj.weight")

    def input_of(part: Slice | None) -> str | None:
        """The norm before attention, unless its width is not that of what the weight reads."""
        if before is None or part is None:
            return None
        width = tensors[part.tensor].shape[1 - part.axis]
        return before if math.prod(tensors[before].shape) == width else None

    return dataclasses.replace(
        plan,
        query_gain=query,
        key_gain=key,
        query_input=plan.query_input if latent else input_of(plan.query),
        key_input=plan.key_input if mla else input_of(plan.key),
        rope_input=input_of(plan.key_rope) if mla else None,
        notes=(*plan.notes, why) if why else plan.notes,
    )


def _norm_before(tensors: Tensors, module: str, geometry: Geometry) -> tuple[str | None, str]:
    """Returns the gain of the norm that feeds a module, next to it or one or two levels up, and why there is none.

    The reason is empty if there is a norm, or none with a known name.
    """
    beside = f"{module.removesuffix('multihead_attn')}self_attn."  # torch's decoder layer has both names
    if _CROSS.search(module) or (module.endswith("multihead_attn") and any(n.startswith(beside) for n in tensors)):
        return None, "its name says that its keys come from another sequence: no logit bound"
    kind, why = geometry.model_type, ""
    parents = [module.rpartition(".")[0], module.rpartition(".")[0].rpartition(".")[0]]
    for at in parents:
        for name in (*INPUT_NORMS, *EITHER_NORM):
            found = _present(tensors, f"{at}.{name}" if at else name)
            if found is None:
                continue
            if kind in NOT_BEFORE or geometry.norm_after:
                return None, f"{name} follows attention here: weights alone give no logit bound"
            if name in INPUT_NORMS or kind in EITHER_NORM[name] or (kind is None and name == "ln_1"):  # as in GPT-2
                return found, ""
            why = f"{name} precedes attention in some models and follows it in others: no logit bound"
    return None, why


def _left_over(tensors: Tensors, known: list[str]) -> list[Unknown]:
    """Returns modules with names like attention that contain matrices but do not belong to any site."""
    lost: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        match = _ATTENTION.match(name)
        if match and len(tensor.shape) >= 2 and tensor.floating:
            lost.setdefault(match[1], []).append(name[match.end() :].removesuffix(".weight"))
    shown = []
    for module, leaves in lost.items():
        if not any(site == module or site.startswith(f"{module}.") or module.startswith(f"{site}.") for site in known):
            shown.append(Unknown(module, f"no known names for query and key among {', '.join(sorted(leaves)[:6])}"))
    return shown
