"""Which rows of which tensors of a checkpoint form the queries and keys of which head.

A checkpoint contains no code, so only here are names interpreted. Nothing is guessed silently: config.json or a flag
decides what a name leaves open, conventions are noted in the result, and the rest is listed as unknown.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import final

from qkeel.audit.checkpoint_config import (
    N_LAYERS,
    N_LAYERS_OF,
    Geometry,
    first_number,
    section,
    words,
)
from qkeel.safetensors_io import Checkpoint, StoredTensor

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
    "linear1": "blocks",
    "qkv_x": "blocks",
}
# Model types that override the table above (transformers 5.23, modeling files).
GROUPED = frozenset(
    [
        "gpt_neox",
        "gpt_neox_japanese",
        "bloom",
        "falcon",
        "persimmon",
        "internlm2",
        "gpt_bigcode",
    ]
)
OTHER = {
    "codegen": "its qkv_proj is cut into 4 parts of [q | v | k] (a relic of its training on TPUs)"
}
# Model types whose q_proj holds, per head, the query and a gate of the same width.
GATED = frozenset(
    ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"]
)
# Gains of a q/k norm next to the projections: (query, key).
GAINS = (
    ("q_norm", "k_norm"),
    ("norm.query_norm", "norm.key_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
    ("query_norm", "key_norm"),
    ("norm_q", "norm_k"),
    ("q_norm_x", "k_norm_x"),
    ("ln_q", "ln_k"),
    ("q_ln", "k_ln"),
)
# The norm whose output the projections read, next to the attention module or one or two levels up.
INPUT_NORMS = (
    "input_layernorm",
    "attention_norm",
    "attn_norm",
    "layernorm_before",
    "pre_attention_layernorm",
)
# Model types in which the norm of such a name follows attention.
NOT_BEFORE = frozenset(["swinv2", "swin2sr"])
# Names of norms that precede attention in some models and follow it in others, with the model types in which they
# precede it (transformers 5.23, modeling files). In all other types such a norm gives no bound.
EITHER_NORM: Mapping[str, frozenset[str]] = {
    "ln_1": words(
        """
        bridgetower bridgetower_text_model bridgetower_vision_model codegen decision_transformer gpt2
        gpt_bigcode gpt_neo gptj imagegpt
        """
    ),
    "layer_norm1": words(
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
    "norm1": words(
        """
        cohere_compass_vision dinov2 dinov2_with_registers dinov3_vit eomt eomt_dinov3 ernie4_5_vl_moe_vision
        exaone4_5_vision glm4v_moe_vision glm4v_vision glm_image_vision glm_ocr_vision kimi_k25_vision mgp-str
        qwen2_5_omni_vision_encoder qwen2_5_vl_vision qwen2_vl_vision qwen3_5_moe_vision qwen3_5_vision
        qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision radio sapiens2
        tipsv2_vision_model videomt vitdet vjepa2
        """
    ),
    "self_attn_layer_norm": words(
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
# Attention of two streams of tokens (image and text) that see each other: the names of one stream's projections, and of
# those of the other stream beside them. Any head's query may meet any key, so a bound takes the larger of both.
JOINT = {"to_q": "add_q_proj", "to_k": "add_k_proj", "qkv_x": "qkv_y"}
JOINT_GAINS = {
    "norm_q": "norm_added_q",
    "norm_k": "norm_added_k",
    "q_norm_x": "q_norm_y",
    "k_norm_x": "k_norm_y",
}
# The same where each stream has a module of its own, named alike but for one word (Flux and SD3 by their authors).
JOINT_MODULES = (("img_attn", "txt_attn"), ("x_block", "context_block"))
# Names of modules whose queries and keys nothing here reads, beside projections that are read.
_OTHER_QK = re.compile(r"(^|_)(q|k|query|key|qkv|kv)(_|$)")
_ATTENTION = re.compile(r"^(.*?\b\w*(?:attn|attention)\w*)\.", re.IGNORECASE)
_CROSS = re.compile(
    r"cross|xattn|encoder_attn|enc_attn|src_attn|encdec|attn2", re.IGNORECASE
)
_SCALES = ("_scale_inv", "_scale", ".SCB", ".absmax")
_SCALES_OF_8_BITS = ("scale_weight", "weight_scale", "scale")  # beside an 8-bit weight
_ADAPTERS = ("lora_A.weight", "lora_A.default.weight", "lora_down.weight")
# What GPTQ, AWQ, compressed-tensors, HQQ and bitsandbytes store in place of a weight.
_QUANTISED = (
    "qweight",
    "qzeros",
    "weight_packed",
    "W_q",
    "weight.absmax",
    "weight.quant_map",
    "weight_scale",
)

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
class StreamWeights:
    """The weights that make the queries, or the keys, of one stream of tokens.

    `gain` is that of their norm, and `input` that of the norm whose output the weight reads. Only MLA, whose logit is
    a sum of two products, has a rotated part, which reads `rope_input`.
    """

    weight: Slice
    gain: str | None = None
    input: str | None = None
    rope: Slice | None = None
    rope_input: str | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SitePlan:
    """The weights of one attention layer in a checkpoint, with one query side and one key side per stream of tokens."""

    name: str
    layout: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    queries: tuple[StreamWeights, ...]
    keys: tuple[StreamWeights, ...]
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    def slices(self) -> list[Slice]:
        """Returns all parts of weights."""
        sides = (*self.queries, *self.keys)
        return [
            weight_slice
            for side in sides
            for weight_slice in (side.weight, side.rope)
            if weight_slice is not None
        ]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """Something that looks like attention but could not be read, and the reason."""

    name: str  #: name of the module or weight
    reason: str  #: why it could not be read


Found = SitePlan | Unknown


def recognise(tensors: Tensors, geometry: Callable[[str], Geometry]) -> list[Found]:
    """Returns every attention layer of a checkpoint in the order of its tensors, and the candidates that cannot be
    read."""
    sites: dict[str, Found] = {}
    children: dict[str, list[str]] = {}
    for name in tensors:
        path = name.removesuffix(".weight")
        module, _, leaf = path.rpartition(".")
        children.setdefault(module, []).append(leaf)
        is_weight = path != name or leaf == "in_proj_weight"
        if is_weight or module:
            site = _site(tensors, module, leaf, is_weight, geometry)
            if site is not None:
                sites.setdefault(site.name, site)
    plans = []
    for site in sites.values():
        plan = _joined(sites, site)
        if isinstance(plan, SitePlan):
            plan = _bounded(plan, children.get(plan.name, ()))
        if plan is not None:
            plans.append(plan)
    return plans + _left_over(tensors, sites)


def _site(
    tensors: Tensors,
    module: str,
    leaf: str,
    is_weight: bool,
    geometry: Callable[[str], Geometry],
) -> Found | None:
    at = f"{module}." if module else ""
    name = f"{at}{leaf}" if leaf == "in_proj_weight" else f"{at}{leaf}.weight"
    keys = [
        key
        for query, key in SEPARATE
        if query == leaf and f"{at}{key}.weight" in tensors
    ]
    site: Found | None = None
    if leaf in ("q_b_proj", "q_proj") and f"{at}kv_a_proj_with_mqa.weight" in tensors:
        site = _latent(tensors, at, leaf, geometry(name))
    elif leaf == "q_up" and f"{at}k_up.weight" in tensors:
        site = _own_latent(tensors, at, geometry(name))
    elif keys and is_weight:
        site = _separate(tensors, at, leaf, keys[0], geometry(name))
    elif leaf in FUSED and is_weight:
        site = _fused(tensors, at, leaf, geometry(name))
    if site is None:
        return None
    if isinstance(site, SitePlan):
        site = _with_stream(
            tensors, at, leaf, _with_norms(tensors, site, geometry(name))
        )
    if isinstance(site, Unknown):
        return Unknown(module or leaf, site.reason)
    return _readable(tensors, site)


def _with_stream(tensors: Tensors, at: str, leaf: str, plan: SitePlan) -> Found:
    """Returns the plan with the queries and keys of a second stream of tokens, where the module has such."""
    queries, keys = list(plan.queries), list(plan.keys)
    query, key = plan.queries[0], plan.keys[0]
    if leaf in FUSED and f"{at}{JOINT.get(leaf, '')}.weight" in tensors:
        name = f"{at}{JOINT[leaf]}"
        shape, rows = (
            tensors[f"{name}.weight"].shape,
            query.weight.rows * (plan.n_heads + 2 * plan.n_kv_heads),
        )
        if len(shape) != 2 or shape[query.weight.axis] != rows:
            return Unknown(
                "",
                f"{JOINT[leaf]} has shape {list(shape)}, expected {rows} rows as {leaf}",
            )
        bias = f"{name}.bias" if f"{name}.bias" in tensors else None
        for sides, side in ((queries, query), (keys, key)):
            weight_slice = dataclasses.replace(
                side.weight, tensor=f"{name}.weight", bias=bias
            )
            sides.append(
                StreamWeights(
                    weight=weight_slice, gain=_other_gain(tensors, at, side.gain)
                )
            )
    for sides, side, count, letter in (
        (queries, query, plan.n_heads, "q"),
        (keys, key, plan.n_kv_heads, "k"),
    ):
        other_stream = JOINT.get(f"to_{letter}", "")
        if leaf == "to_q" and f"{at}{other_stream}.weight" in tensors:
            shape, size = tensors[f"{at}{other_stream}.weight"].shape, plan.head_dim
            if len(shape) != 2 or shape[0] != count * size:
                return Unknown(
                    "",
                    f"{other_stream} has shape {list(shape)}, expected {count * size} rows as to_{letter}",
                )
            weight_slice = _even(tensors, f"{at}{other_stream}", count, size, size)
            sides.append(
                StreamWeights(
                    weight=weight_slice, gain=_other_gain(tensors, at, side.gain)
                )
            )
    if len(queries) + len(keys) == 2:
        return plan
    layout = f"{plan.layout}, two streams"
    return dataclasses.replace(
        plan, layout=layout, queries=tuple(queries), keys=tuple(keys)
    )


def _other_gain(tensors: Tensors, at: str, gain: str | None) -> str | None:
    """Returns the gain of the second stream beside that of the first."""
    if gain is None:
        return None
    name = gain.removeprefix(at).removesuffix(".weight")
    return (
        _present(tensors, f"{at}{JOINT_GAINS[name]}") if name in JOINT_GAINS else None
    )


def _joined(sites: Mapping[str, Found], site: Found) -> Found | None:
    """Returns a site with the other stream of tokens that has a module of its own, or None for that module."""
    for first, second in JOINT_MODULES:
        if second in site.name and site.name.replace(second, first) in sites:
            return None
        other_stream = (
            sites.get(site.name.replace(first, second)) if first in site.name else None
        )
        if isinstance(site, SitePlan) and other_stream is not None:
            if not isinstance(other_stream, SitePlan) or (
                other_stream.n_heads,
                other_stream.head_dim,
            ) != (
                site.n_heads,
                site.head_dim,
            ):
                return Unknown(
                    site.name,
                    f"the tokens of {other_stream.name}, which attend with its own, are not read",
                )
            return dataclasses.replace(
                site,
                layout=f"{site.layout}, two streams",
                queries=site.queries + other_stream.queries,
                keys=site.keys + other_stream.keys,
                notes=tuple(dict.fromkeys((*site.notes, *other_stream.notes))),
            )
    return site


def _bounded(plan: SitePlan, leaves: Sequence[str]) -> SitePlan:
    """Returns the plan without norms, and so without a bound, if other weights beside its projections are named like
    queries or keys: a second stream of tokens, a bias of its own, relative positions that are projected."""
    if plan.layout == "MLA":
        return plan
    read = {
        weight_slice.tensor.removesuffix(".weight").rpartition(".")[2]
        for weight_slice in plan.slices()
    }
    for side in (*plan.queries, *plan.keys):
        gain = (side.gain or "").removesuffix(".weight").rpartition(".")[2]
        read |= {gain, f"{gain}_bias"}
    extra_weights = sorted(
        leaf
        for leaf in set(leaves) - read
        if _OTHER_QK.search(leaf) and not leaf.startswith("in_proj")
    )
    if not extra_weights:
        return plan
    reason = f"{', '.join(extra_weights[:3])} may take part in the logits in a way that is not known: no logit bound"
    queries, keys = (
        tuple(dataclasses.replace(side, gain=None, input=None) for side in sides)
        for sides in (plan.queries, plan.keys)
    )
    return dataclasses.replace(
        plan, queries=queries, keys=keys, notes=(*plan.notes, reason)
    )


def _readable(tensors: Tensors, plan: SitePlan) -> Found:
    for weight_slice in plan.slices():
        module = weight_slice.tensor.removesuffix("weight")
        if any(f"{module}{name}" in tensors for name in _ADAPTERS):
            return Unknown(
                plan.name,
                f"{weight_slice.tensor} has a low-rank adapter beside it; merge it into the weight first",
            )
        tensor = tensors[weight_slice.tensor]
        scales = [weight_slice.tensor + end for end in _SCALES]
        if tensor.dtype.startswith("F8"):
            scales += [
                f"{weight_slice.tensor.removesuffix('weight')}{name}"
                for name in _SCALES_OF_8_BITS
            ]
        present = [name for name in scales if name in tensors]
        if not tensor.floating or present:
            reason = (
                f"scales in {present[0]}" if present else f"stored as {tensor.dtype}"
            )
            return Unknown(
                plan.name,
                f"{weight_slice.tensor} is quantised ({reason}); scan the checkpoint before quantisation",
            )
    return plan


def _separate(tensors: Tensors, at: str, q: str, k: str, geometry: Geometry) -> Found:
    query, key = tensors[f"{at}{q}.weight"], tensors[f"{at}{k}.weight"]
    for name, tensor in ((q, query), (k, key)):
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            return Unknown(
                "", f"{name} has shape {list(tensor.shape)}, expected a matrix"
            )
    heads = geometry.n_heads
    if heads is None and geometry.head_dim is not None:
        heads = query.shape[0] // geometry.head_dim
    if not heads:
        return Unknown(
            "",
            f"the number of heads is not known; give --n-heads ({q} has {query.shape[0]} rows)",
        )
    per_head, remainder = divmod(query.shape[0], heads)
    is_gated = geometry.model_type in GATED
    if remainder or (is_gated and per_head % 2):
        reason = f"{q} has {query.shape[0]} rows, which do not split evenly into {heads} heads; give --n-heads"
        return Unknown("", reason)
    size = per_head // 2 if is_gated else per_head
    groups, remainder = divmod(key.shape[0], size)
    wrong = (
        f"{k} has {key.shape[0]} rows"
        if remainder
        else _contradiction(geometry, size, groups, heads)
    )
    if wrong:
        return Unknown(
            "",
            f"{heads} heads of {size} do not fit: {wrong}; give --n-heads and --n-kv-heads",
        )
    return SitePlan(
        name=at[:-1],
        layout="gated q, k apart" if is_gated else "q, k apart",
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=size,
        queries=(
            StreamWeights(weight=_even(tensors, f"{at}{q}", heads, per_head, size)),
        ),
        keys=(StreamWeights(weight=_even(tensors, f"{at}{k}", groups, size, size)),),
    )


def _contradiction(geometry: Geometry, size: int, groups: int, heads: int) -> str:
    if geometry.n_kv_heads not in (None, groups):
        return f"there are {groups} key heads of that width, but config or flags say {geometry.n_kv_heads}"
    if heads % max(groups, 1):
        return f"{groups} key heads do not divide {heads} heads"
    if geometry.head_dim not in (None, size):
        return f"config or flags say head_dim {geometry.head_dim}"
    return ""


def _even(
    tensors: Tensors, module: str, heads: int, step: int, rows: int, first: int = 0
) -> Slice:
    bias = f"{module}.bias"
    starts = tuple(first + step * h for h in range(heads))
    return Slice(
        tensor=f"{module}.weight",
        starts=starts,
        rows=rows,
        bias=bias if bias in tensors else None,
    )


def _fused(tensors: Tensors, at: str, leaf: str, geometry: Geometry) -> Found | None:
    is_bare = leaf == "in_proj_weight"
    name = f"{at}{leaf}" if is_bare else f"{at}{leaf}.weight"
    bias = f"{at}in_proj_bias" if is_bare else f"{at}{leaf}.bias"
    shape, heads, kind = tensors[name].shape, geometry.n_heads, geometry.model_type
    layout = geometry.layout or ("groups" if kind in GROUPED else FUSED[leaf])
    is_single = leaf == "linear1"
    if (
        is_single
        and f"{at}norm.query_norm.scale" not in tensors
        and f"{at}norm.query_norm.weight" not in tensors
    ):
        return None  # any network has a linear1; that of Flux's single blocks makes [q | k | v | mlp] and has a q/k norm
    if kind in OTHER and not geometry.layout:
        return Unknown("", f"{OTHER[kind]}: not read")
    if len(shape) != 2 or (shape[0] == shape[1]) or 0 in shape:
        return Unknown(
            "", f"{leaf} has shape {list(shape)}, expected a matrix that is not square"
        )
    if heads is None:
        return Unknown(
            "",
            f"the number of heads is not known; give --n-heads ({leaf} is {shape[0]} x {shape[1]})",
        )
    if layout is None:
        reason = "it could be [q | k | v] or q, k, v per head; give --layout blocks or --layout groups"
        return Unknown("", f"{leaf} is ambiguous: {reason}")
    groups = geometry.n_kv_heads or heads
    width = (
        shape[1] // heads
        if is_single
        else _width(shape, heads, groups, geometry.head_dim)
    )
    size = f"{shape[0]} x {shape[1]}"
    if not width or heads % groups or (is_single and shape[0] < 3 * width * heads):
        return Unknown(
            "",
            f"{leaf} is {size}, whose shape gives no width for {heads} heads and {groups} key heads",
        )
    q, k = _starts(layout, heads, groups, width)
    axis = 0 if is_single or shape[0] == width * (heads + 2 * groups) else 1
    stored = bias if bias in tensors else None
    is_stated = geometry.layout is not None or kind is not None
    return SitePlan(
        name=at[:-1] or leaf,
        layout="[q | k | v]" if layout == "blocks" else "q, k, v per key head",
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=width,
        queries=(
            StreamWeights(
                weight=Slice(tensor=name, axis=axis, starts=q, rows=width, bias=stored)
            ),
        ),
        keys=(
            StreamWeights(
                weight=Slice(tensor=name, axis=axis, starts=k, rows=width, bias=stored)
            ),
        ),
        assumed=()
        if is_stated
        else (f"order of q, k, v taken from the convention for {leaf}",),
    )


def _width(
    shape: tuple[int, ...], heads: int, groups: int, head_dim: int | None
) -> int:
    """Returns the head_dim of a fused weight, or 0. nn.Linear has outputs in rows, GPT-2's Conv1D in columns."""
    parts = heads + 2 * groups
    fits = [n // parts for n in shape if n % parts == 0]
    if head_dim is not None:
        return head_dim if head_dim in fits else 0
    # Without head_dim, the input is usually as wide as all heads together.
    usual = []
    for outputs, inputs in (shape, shape[::-1]):
        if outputs % parts == 0 and outputs // parts * heads == inputs:
            usual.append(outputs // parts)
    if usual:
        return min(usual)
    return fits[0] if len(fits) == 1 else 0


def _starts(
    layout: str, heads: int, groups: int, width: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the first row of each query head and of each key head."""
    if layout == "blocks":
        return tuple(h * width for h in range(heads)), tuple(
            (heads + g) * width for g in range(groups)
        )
    share = heads // groups
    step = (share + 2) * width
    query = tuple((h // share) * step + (h % share) * width for h in range(heads))
    return query, tuple(g * step + share * width for g in range(groups))


def _latent(tensors: Tensors, at: str, leaf: str, geometry: Geometry) -> Found:
    """Plans DeepSeek's MLA: q_b has [nope | rope] per head, kv_b [nope | value] per head, kv_a [latent | rope]."""
    heads, nope, rope, value = (
        geometry.n_heads,
        geometry.nope_dim,
        geometry.rope_dim,
        geometry.value_dim,
    )
    if heads is None or nope is None or rope is None or value is None:
        reason = "MLA needs num_attention_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim in config.json"
        return Unknown("", reason)
    for name, rows in (
        (leaf, heads * (nope + rope)),
        ("kv_b_proj", heads * (nope + value)),
    ):
        stored = tensors.get(f"{at}{name}.weight")
        if stored is None or len(stored.shape) != 2 or stored.shape[0] != rows:
            shape = "missing" if stored is None else f"of shape {list(stored.shape)}"
            return Unknown(
                "", f"{name} is {shape}, but config.json requires {rows} rows"
            )
    latent = tensors[f"{at}kv_b_proj.weight"].shape[1]
    if tensors[f"{at}kv_a_proj_with_mqa.weight"].shape[0] != latent + rope:
        return Unknown("", f"kv_a_proj_with_mqa does not have {latent} + {rope} rows")
    query = StreamWeights(
        weight=_even(tensors, f"{at}{leaf}", heads, nope + rope, nope),
        rope=_even(tensors, f"{at}{leaf}", heads, nope + rope, rope, nope),
        input=_present(tensors, f"{at}q_a_layernorm") if leaf == "q_b_proj" else None,
    )
    key = StreamWeights(
        weight=_even(tensors, f"{at}kv_b_proj", heads, nope + value, nope),
        rope=_even(tensors, f"{at}kv_a_proj_with_mqa", 1, rope, rope, latent),
        input=_present(tensors, f"{at}kv_a_layernorm"),
    )
    return _mla(at, heads, nope + rope, query, key)


def _own_latent(tensors: Tensors, at: str, geometry: Geometry) -> Found:
    """Plans qkeel.nn.MLA, which has a separate weight for every part."""
    heads = geometry.n_heads
    names = ("q_up", "k_up", "q_rope", "k_rope")
    if heads is None:
        return Unknown("", "the number of heads is not known; give --n-heads")
    rows = {}
    for name in names:
        stored = tensors.get(f"{at}{name}.weight")
        if (
            stored is None
            or len(stored.shape) != 2
            or (name != "k_rope" and stored.shape[0] % heads)
        ):
            return Unknown(
                "",
                f"expected matrices {', '.join(names)} whose rows split evenly into {heads} heads",
            )
        rows[name] = stored.shape[0] if name == "k_rope" else stored.shape[0] // heads
    query = StreamWeights(
        weight=_even(tensors, f"{at}q_up", heads, rows["q_up"], rows["q_up"]),
        rope=_even(tensors, f"{at}q_rope", heads, rows["q_rope"], rows["q_rope"]),
        input=_present(tensors, f"{at}q_latent_norm"),
    )
    key = StreamWeights(
        weight=_even(tensors, f"{at}k_up", heads, rows["k_up"], rows["k_up"]),
        rope=_even(tensors, f"{at}k_rope", 1, rows["k_rope"], rows["k_rope"]),
        input=_present(tensors, f"{at}kv_latent_norm"),
    )
    return _mla(at, heads, rows["q_up"] + rows["k_rope"], query, key)


def _mla(
    at: str, heads: int, size: int, query: StreamWeights, key: StreamWeights
) -> SitePlan:
    return SitePlan(
        name=at[:-1],
        layout="MLA",
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=size,
        queries=(query,),
        keys=(key,),
    )


def _present(tensors: Tensors, module: str) -> str | None:
    """Returns the name of a norm's gain: `module.weight`, `module.scale` or a bare parameter; None if there is none."""
    for name in (f"{module}.weight", f"{module}.scale", module):
        if name in tensors and 0 not in tensors[name].shape:
            return name
    return None


def _with_norms(tensors: Tensors, plan: SitePlan, geometry: Geometry) -> SitePlan:
    """Returns the plan with the norms next to and before the projections."""
    at = f"{plan.name}." if plan.name else ""
    query, key = plan.queries[0], plan.keys[0]
    query_gain = key_gain = None
    for q, k in GAINS:
        if not (query_gain or key_gain):
            query_gain, key_gain = _present(tensors, at + q), _present(tensors, at + k)
    is_mla = query.rope is not None
    before, reason = _norm_before(tensors, plan.name, geometry)
    if geometry.normed and not (query_gain or key_gain or is_mla):
        before, reason = (
            None,
            "config.json says that q and k are normed, and their gains were not found: no bound",
        )
    # Queries without their own latent (DeepSeek-V2-Lite) are projected from the module's input.
    is_direct = (
        f"{at}q_up.weight" == query.weight.tensor
        and f"{at}q_down.weight" not in tensors
    )
    reads_latent = (
        is_mla and not is_direct and not query.weight.tensor.endswith("q_proj.weight")
    )

    def input_of(weight_slice: Slice | None) -> str | None:
        """The norm before attention, unless its width is not that of what the weight reads."""
        if before is None or weight_slice is None:
            return None
        width = tensors[weight_slice.tensor].shape[1 - weight_slice.axis]
        return before if math.prod(tensors[before].shape) == width else None

    query = dataclasses.replace(
        query,
        gain=query_gain,
        input=query.input if reads_latent else input_of(query.weight),
    )
    key = dataclasses.replace(
        key,
        gain=key_gain,
        input=key.input if is_mla else input_of(key.weight),
        rope_input=input_of(key.rope) if is_mla else None,
    )
    notes = (*plan.notes, reason) if reason else plan.notes
    return dataclasses.replace(plan, queries=(query,), keys=(key,), notes=notes)


def _norm_before(
    tensors: Tensors, module: str, geometry: Geometry
) -> tuple[str | None, str]:
    """Returns the gain of the norm that feeds a module, next to it or one or two levels up, and why there is none.

    The reason is empty if there is a norm, or none with a known name.
    """
    beside = f"{module.removesuffix('multihead_attn')}self_attn."  # torch's decoder layer has both names
    has_beside = (
        f"{beside}in_proj_weight" in tensors or f"{beside}q_proj.weight" in tensors
    )
    if _CROSS.search(module) or (module.endswith("multihead_attn") and has_beside):
        return (
            None,
            "its name says that its keys come from another sequence: no logit bound",
        )
    kind, reason = geometry.model_type, ""
    parents = [module.rpartition(".")[0], module.rpartition(".")[0].rpartition(".")[0]]
    for at in parents:
        for name in (*INPUT_NORMS, *EITHER_NORM):
            gain = _present(tensors, f"{at}.{name}" if at else name)
            if gain is None:
                continue
            if kind in NOT_BEFORE or geometry.norm_after:
                return (
                    None,
                    f"{name} follows attention here: weights alone give no logit bound",
                )
            if (
                name in INPUT_NORMS
                or kind in EITHER_NORM[name]
                or (kind is None and name == "ln_1")
            ):  # as in GPT-2
                return gain, ""
            reason = f"{name} precedes attention in some models and follows it in others: no logit bound"
    return None, reason


def missing_layers(checkpoint: Checkpoint, sites: Sequence[Found]) -> list[Unknown]:
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
        total = first_number(section(checkpoint.config, stack), keys) or 0
        for layer in sorted(set(range(total)) - numbers[stack]):
            reason = f"config.json says {total} layers, and no tensor of this one is in the checkpoint; download it again"
            unknown.append(Unknown(f"{stack}.{layer}".lstrip("."), reason))
    return unknown


def _left_over(tensors: Tensors, sites: Iterable[str]) -> list[Unknown]:
    """Returns modules with names like attention that contain matrices but do not belong to any site."""
    names = set(sites)
    around = {path for name in names for path in _paths(name)}
    lost: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        match = _ATTENTION.match(name)
        if (
            match
            and len(tensor.shape) >= 2
            and match[1] not in around
            and names.isdisjoint(_paths(match[1]))
        ):
            lost.setdefault(match[1], []).append(
                name[match.end() :].removesuffix(".weight")
            )
    unknown = []
    for module, leaves in lost.items():
        quantised = [leaf for leaf in leaves if leaf.endswith(_QUANTISED)]
        adapters = [leaf for leaf in leaves if ".lora_" in leaf]
        if quantised:
            reason = f"it is quantised ({quantised[0]}); scan the checkpoint before quantisation"
        elif adapters:
            reason = (
                f"it holds a low-rank adapter ({adapters[0]}) without its base; merge the two and scan the result: "
                "model.merge_and_unload().save_pretrained(folder)"
            )
        elif any(
            tensors[f"{module}.{leaf}.weight"].floating
            for leaf in leaves
            if f"{module}.{leaf}.weight" in tensors
        ):
            reason = f"no known names for query and key among {', '.join(sorted(leaves)[:6])}"
        else:
            continue
        unknown.append(Unknown(module, reason))
    return unknown


def _paths(name: str) -> list[str]:
    """Returns the name and those of all modules around it."""
    words_of = name.split(".")
    return [".".join(words_of[:end]) for end in range(1, len(words_of) + 1)]
