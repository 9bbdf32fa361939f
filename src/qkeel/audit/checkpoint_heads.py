"""Which rows of which tensors of a checkpoint form the queries and keys of which head.

A checkpoint contains no code, so only here are names interpreted. Nothing is guessed silently: config.json or a flag
decides what a name leaves open, conventions are noted in the result, and the rest is listed as unknown.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
GROUPED = words(
    "gpt_neox gpt_neox_japanese bloom falcon persimmon internlm2 gpt_bigcode"
)
OTHER = {
    "codegen": "its qkv_proj is cut into 4 parts of [q | v | k] (a relic of its training on TPUs)"
}
# Model types whose q_proj holds, per head, the query and a gate of the same width.
GATED = words("qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text")
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
NOT_BEFORE = words("swinv2 swin2sr")
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
    "ln1": words(""),
    "ln_attn": words("falcon"),
}
# Modules of two streams of tokens (image and text) that see each other, named alike but for one word (Flux and SD3 by
# their authors). They are one layer, in which the queries of each meet the keys of the other.
JOINT_MODULES = (("img_attn", "txt_attn"), ("x_block", "context_block"))
# Names of modules whose queries and keys nothing here reads, beside projections that are read.
_OTHER_QK = re.compile(r"(^|_)(q|k|qk|query|key|qkv|kv|qk?norm|knorm)(_|$)")
_ATTENTION = re.compile(r"^(.*?\b\w*(?:attn|attention)\w*)\.", re.IGNORECASE)
_CROSS = re.compile(
    r"cross|xattn|encoder_attn|enc_attn|src_attn|encdec|attn2", re.IGNORECASE
)
_SCALES = ("_scale_inv", "_scale", ".SCB", ".absmax")
_SCALES_OF_8_BITS = ("scale_weight", "weight_scale", "scale")
_ALL_SCALES = (*_SCALES, *_SCALES_OF_8_BITS)
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
class SideWeights:
    """The weights that make the queries, or the keys, of a layer.

    `gain` is that of their norm, and `input` that of the norm whose output the weight reads: with `reads_latent` the
    latent's own. Only MLA, whose logit is a sum of two products, has a rotated part, which reads `rope_input`.
    """

    weight: Slice
    gain: str | None = None
    input: str | None = None
    reads_latent: bool = False
    rope: Slice | None = None
    rope_input: str | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SitePlan:
    """The weights of one attention layer in a checkpoint; `note` says why they give no bound."""

    name: str
    layout: str
    n_heads: int
    n_kv_heads: int
    head_dim: int
    query: SideWeights
    key: SideWeights
    note: str = ""
    assumed: tuple[str, ...] = ()

    def slices(self) -> list[Slice]:
        """Returns all parts of weights."""
        parts = self.query.weight, self.query.rope, self.key.weight, self.key.rope
        return [weight_slice for weight_slice in parts if weight_slice is not None]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """Something that looks like attention but could not be read, and the reason."""

    name: str  #: name of the module or weight
    reason: str  #: why it could not be read


class _UnreadError(Exception):
    """Why a layer is not read."""


def recognise(
    tensors: Tensors, geometry: Callable[[str], Geometry]
) -> list[SitePlan | Unknown]:
    """Returns every attention layer of a checkpoint in the order of its tensors, and the candidates that cannot be
    read."""
    children: dict[str, set[str]] = {}
    for name in tensors:
        module, _, leaf = name.removesuffix(".weight").rpartition(".")
        # Every tensor counts as a neighbour, also a bias: it may be one that takes part in the logits.
        children.setdefault(module, set()).add(leaf)
    sites: list[SitePlan | Unknown] = []
    modules, in_order = set(), sorted(tensors)
    for module, leaves in children.items():
        beside = _stream_beside(module, children)
        try:
            plan = _plan(tensors, f"{module}." if module else "", leaves, geometry)
            if plan is None:
                continue
            modules.add(module)
            # Two streams are one layer, by the name of the first.
            if beside is not None and beside < module:
                continue
            for weight_slice in plan.slices():
                _check_readable(tensors, in_order, weight_slice.tensor)
            sizes = geometry(plan.query.weight.tensor)
            sites.append(_with_norms(tensors, plan, (leaves, beside), sizes))
        except _UnreadError as error:
            modules.add(module)
            sites.append(Unknown(module or min(leaves), str(error)))
    return sites + _left_over(tensors, modules)


def _stream_beside(module: str, modules: Collection[str]) -> str | None:
    """Returns the module of the other stream of tokens of a layer, if it has two."""
    for first, second in JOINT_MODULES:
        for word, other in ((first, second), (second, first)):
            beside = module.replace(word, other)
            if beside != module and beside in modules:
                return beside
    return None


def _plan(
    tensors: Tensors,
    at: str,
    leaves: Collection[str],
    geometry: Callable[[str], Geometry],
) -> SitePlan | None:
    """Returns the queries and keys of a module, by the first convention that fits; None if none does."""
    for q in ("q_b_proj", "q_proj"):
        if q in leaves and "kv_a_proj_with_mqa" in leaves:
            return _latent(tensors, at, q, geometry(f"{at}{q}.weight"))
    if "q_up" in leaves and "k_up" in leaves:
        return _own_latent(tensors, at, geometry(f"{at}q_up.weight"))
    for q, k in SEPARATE:
        if q in leaves and k in leaves:
            return _separate(tensors, at, q, k, geometry(f"{at}{q}.weight"))
    for leaf in FUSED:
        # Any network has a linear1; that of Flux's single blocks makes [q | k | v | mlp] and has a q/k norm.
        is_other = leaf == "linear1" and not _present(tensors, f"{at}norm.query_norm")
        if leaf in leaves and not is_other:
            return _fused(tensors, at, leaf, geometry(f"{at}{leaf}.weight"))
    return None


def _check_readable(tensors: Tensors, names: Sequence[str], name: str) -> None:
    """Raises _UnreadError unless a weight is stored as it is used; `names` are those of all tensors in order."""
    module, tensor = name.removesuffix("weight"), tensors[name]
    first, last = (bisect.bisect(names, module + end) for end in ("", chr(0x10FFFF)))
    for other in names[first:last]:
        beside = tensors[other]
        is_matrix = beside.floating and len(beside.shape) > 1
        if is_matrix and other != name and not other.endswith(_ALL_SCALES):
            raise _UnreadError(
                f"{name} has a matrix of an adapter beside it ({other}); merge it into the weight first"
            )
    scales = [name + end for end in _SCALES]
    if tensor.dtype.startswith("F8"):
        scales += [module + end for end in _SCALES_OF_8_BITS]
    scales = [f"scales in {scale}" for scale in scales if scale in tensors]
    if not tensor.floating or scales:
        storage = (*scales, f"stored as {tensor.dtype}")[0]
        raise _UnreadError(
            f"{name} is quantised ({storage}); scan the checkpoint before quantisation"
        )


def _matrix(tensors: Tensors, name: str) -> tuple[int, int]:
    """Returns the shape of a weight."""
    shape = tensors[name].shape if name in tensors else ()
    if len(shape) != 2 or 0 in shape:
        raise _UnreadError(f"{name} has shape {list(shape)}, expected a matrix")
    return shape[0], shape[1]


def _slice(
    tensors: Tensors, weight: str, starts: Iterable[int], rows: int, axis: int = 0
) -> Slice:
    bias = f"{weight.removesuffix('weight')}bias"
    return Slice(
        tensor=weight,
        axis=axis,
        starts=tuple(starts),
        rows=rows,
        bias=bias if bias in tensors else None,
    )


def _separate(
    tensors: Tensors, at: str, q: str, k: str, geometry: Geometry
) -> SitePlan:
    query, key = f"{at}{q}.weight", f"{at}{k}.weight"
    (q_rows, _), (k_rows, _) = _matrix(tensors, query), _matrix(tensors, key)
    # Where the number of heads differs from layer to layer, as in UNets, their width is what is known.
    heads = geometry.n_heads or q_rows // (geometry.head_dim or q_rows + 1)
    if not heads:
        raise _UnreadError(
            f"the number of heads is not known; give --n-heads ({q} has {q_rows} rows)"
        )
    # A gated query has the query and its gate one after the other.
    parts = 2 if geometry.model_type in GATED else 1
    size, remainder = divmod(q_rows, heads * parts)
    groups = k_rows // max(size, 1)
    if (
        remainder
        or groups * size != k_rows
        or heads % max(groups, 1)
        or geometry.n_kv_heads not in (None, groups)
        or geometry.head_dim not in (None, size)
    ):
        stated = (
            f"{geometry.n_kv_heads or groups} key heads of {geometry.head_dim or size}"
        )
        raise _UnreadError(
            f"{heads} heads and {stated}, as config or flags say, do not fit: {q} has {q_rows} rows and {k} {k_rows}; "
            "give --n-heads and --n-kv-heads"
        )
    q_starts = range(0, q_rows, size * parts)
    return SitePlan(
        name=at[:-1],
        layout="gated q, k apart" if parts > 1 else "q, k apart",
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=size,
        query=SideWeights(weight=_slice(tensors, query, q_starts, size)),
        key=SideWeights(weight=_slice(tensors, key, range(0, k_rows, size), size)),
    )


def _fused(tensors: Tensors, at: str, leaf: str, geometry: Geometry) -> SitePlan:
    name = f"{at}{leaf}" if leaf == "in_proj_weight" else f"{at}{leaf}.weight"
    shape, heads, kind = _matrix(tensors, name), geometry.n_heads, geometry.model_type
    layout = geometry.layout or ("groups" if kind in GROUPED else FUSED[leaf])
    if kind in OTHER and not geometry.layout:
        raise _UnreadError(f"{OTHER[kind]}: not read")
    if shape[0] == shape[1]:
        raise _UnreadError(f"{leaf} is square, {shape[0]} x {shape[1]}: not q, k and v")
    if heads is None:
        raise _UnreadError(
            f"the number of heads is not known; give --n-heads ({leaf} is {shape[0]} x {shape[1]})"
        )
    if layout is None:
        raise _UnreadError(
            f"{leaf} is ambiguous: it could be [q | k | v] or q, k, v per head; give --layout blocks or --layout groups"
        )
    # Models without grouped keys omit the field.
    groups = geometry.n_kv_heads or heads
    parts = heads + 2 * groups
    # nn.Linear has outputs in rows, GPT-2's Conv1D in columns. Without head_dim, the input is usually as wide as all
    # heads together; else the width must be the only possible one.
    fits = [(n // parts, axis) for axis, n in enumerate(shape) if n % parts == 0]
    usual = [(width, axis) for width, axis in fits if width * heads == shape[1 - axis]]
    # The rows of the MLP follow those of q, k and v, so that their number says nothing of the heads.
    if leaf == "linear1":
        fits = [(shape[1] // heads, 0)] if 3 * shape[1] <= shape[0] else []
    elif geometry.head_dim is not None:
        fits = [fit for fit in fits if fit[0] == geometry.head_dim]
    elif usual:
        fits = [min(usual)]
    if heads % groups or len({width for width, _ in fits}) != 1:
        raise _UnreadError(
            f"{leaf} is {shape[0]} x {shape[1]}, whose shape gives no width for {heads} heads and {groups} key heads"
        )
    width, axis = fits[0]
    share = heads // groups
    if layout == "blocks":
        q_starts = [h * width for h in range(heads)]
        k_starts = [(heads + g) * width for g in range(groups)]
    else:  # for each key head, the queries that share it, the key, and the value
        q_starts = [(h + 2 * (h // share)) * width for h in range(heads)]
        k_starts = [((g + 1) * share + 2 * g) * width for g in range(groups)]
    query, key = (
        SideWeights(weight=_slice(tensors, name, starts, width, axis))
        for starts in (q_starts, k_starts)
    )
    is_stated = geometry.layout is not None or kind is not None
    assumed = f"order of q, k, v taken from the convention for {leaf}"
    return SitePlan(
        name=at[:-1] or leaf,
        layout="[q | k | v]" if layout == "blocks" else "q, k, v per key head",
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=width,
        query=query,
        key=key,
        assumed=() if is_stated else (assumed,),
    )


def _latent(tensors: Tensors, at: str, leaf: str, geometry: Geometry) -> SitePlan:
    """Plans DeepSeek's MLA: q_b has [nope | rope] per head, kv_b [nope | value] per head, kv_a [latent | rope]."""
    heads, nope, rope, value = (
        geometry.n_heads,
        geometry.nope_dim,
        geometry.rope_dim,
        geometry.value_dim,
    )
    if heads is None or nope is None or rope is None or value is None:
        raise _UnreadError(
            "MLA needs num_attention_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim in config.json"
        )
    query, key, down = (
        f"{at}{name}.weight" for name in (leaf, "kv_b_proj", "kv_a_proj_with_mqa")
    )
    latent = _matrix(tensors, key)[1]
    for name, rows in (
        (query, heads * (nope + rope)),
        (key, heads * (nope + value)),
        (down, latent + rope),
    ):
        if _matrix(tensors, name)[0] != rows:
            raise _UnreadError(
                f"{name} has shape {list(tensors[name].shape)}, but config.json requires {rows} rows"
            )
    q_starts = range(0, heads * (nope + rope), nope + rope)
    k_starts = range(0, heads * (nope + value), nope + value)
    rope_starts = [start + nope for start in q_starts]
    return _mla(
        tensors,
        at,
        (
            _slice(tensors, query, q_starts, nope),
            _slice(tensors, query, rope_starts, rope),
            # Queries without a latent of their own (DeepSeek-V2-Lite) are projected from the module's input.
            "q_a_layernorm" if leaf == "q_b_proj" else None,
        ),
        (
            _slice(tensors, key, k_starts, nope),
            _slice(tensors, down, (latent,), rope),
            "kv_a_layernorm",
        ),
    )


def _own_latent(tensors: Tensors, at: str, geometry: Geometry) -> SitePlan:
    """Plans qkeel.nn.MLA, which has a separate weight for every part."""
    heads = geometry.n_heads
    if heads is None:
        raise _UnreadError("the number of heads is not known; give --n-heads")

    def part(name: str, n: int) -> Slice:
        weight = f"{at}{name}.weight"
        rows, _ = _matrix(tensors, weight)
        if rows % n:
            raise _UnreadError(f"{name} has {rows} rows, expected a multiple of {n}")
        return _slice(tensors, weight, range(0, rows, rows // n), rows // n)

    has_latent = f"{at}q_down.weight" in tensors
    return _mla(
        tensors,
        at,
        (
            part("q_up", heads),
            part("q_rope", heads),
            "q_latent_norm" if has_latent else None,
        ),
        (part("k_up", heads), part("k_rope", 1), "kv_latent_norm"),
    )


# The unrotated and the rotated rows of one side, and the norm of its latent; None if it has no latent.
LatentSide = tuple[Slice, Slice, str | None]


def _mla(tensors: Tensors, at: str, query: LatentSide, key: LatentSide) -> SitePlan:
    sides = []
    for weight, rope, norm in (query, key):
        side = SideWeights(
            weight=weight,
            rope=rope,
            reads_latent=norm is not None,
            input=None if norm is None else _present(tensors, f"{at}{norm}"),
        )
        sides.append(side)
    heads = len(query[0].starts)
    return SitePlan(
        name=at[:-1],
        layout="MLA",
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=query[0].rows + query[1].rows,
        query=sides[0],
        key=sides[1],
    )


def _present(tensors: Tensors, module: str) -> str | None:
    """Returns the name of a norm's gain: `module.weight`, `module.scale` or a bare parameter; None if there is none."""
    for name in (f"{module}.weight", f"{module}.scale", module):
        if name in tensors and 0 not in tensors[name].shape:
            return name
    return None


def _with_norms(
    tensors: Tensors,
    plan: SitePlan,
    neighbours: tuple[Collection[str], str | None],
    geometry: Geometry,
) -> SitePlan:
    """Returns the plan with the norms next to and before its projections, as far as these give a bound.

    `neighbours` are the names of all tensors beside the projections, and the module of another stream of tokens.
    """
    leaves, stream = neighbours
    at = f"{plan.name}." if plan.name else ""
    is_mla = plan.layout == "MLA"
    gains: tuple[str | None, str | None] = (None, None)
    for q, k in GAINS:
        if not any(gains):
            gains = _present(tensors, at + q), _present(tensors, at + k)
    # Between the two, gains decide: with them the weights do not matter, without them the norm before does.
    before, note = _norm_before(tensors, plan.name, geometry)
    if geometry.normed and not any(gains) and not is_mla:
        before = None
        note = "config.json says that q and k are normed, and their gains were not found: no bound"
    # Other weights that are named like queries or keys: a second stream of tokens, a bias, projected relative positions.
    names = [weight_slice.tensor for weight_slice in plan.slices()]
    names += filter(None, gains)
    read = {name.removesuffix(".weight").rpartition(".")[2] for name in names}
    read |= {f"{name}_bias" for name in read} | {"in_proj_bias"}
    extra = sorted(leaf for leaf in set(leaves) - read if _OTHER_QK.search(leaf))
    extra += [] if stream is None else [stream]
    if extra and not is_mla:
        before, gains = None, (None, None)
        note = f"{', '.join(extra[:3])} may take part in the logits in a way that is not known: no logit bound"

    def input_of(weight_slice: Slice | None) -> str | None:
        """The norm before attention, unless its width is not that of what the weight reads."""
        if before is None or weight_slice is None:
            return None
        width = tensors[weight_slice.tensor].shape[1 - weight_slice.axis]
        return before if math.prod(tensors[before].shape) == width else None

    query, key = (
        dataclasses.replace(
            side,
            gain=gain,
            input=side.input if side.reads_latent else input_of(side.weight),
            rope_input=input_of(side.rope),
        )
        for side, gain in zip((plan.query, plan.key), gains)
    )
    return dataclasses.replace(plan, query=query, key=key, note=note)


def _norm_before(
    tensors: Tensors, module: str, geometry: Geometry
) -> tuple[str | None, str]:
    """Returns the gain of the norm that feeds a module, next to it or one or two levels up, and why there is none.

    The reason is empty if there is a norm, or none with a known name.
    """
    # torch's decoder layer has both names.
    beside = f"{module.removesuffix('multihead_attn')}self_attn."
    has_beside = any(
        f"{beside}{name}" in tensors for name in ("in_proj_weight", "q_proj.weight")
    )
    if _CROSS.search(module) or (module.endswith("multihead_attn") and has_beside):
        return (
            None,
            "its name says that its keys come from another sequence: no logit bound",
        )
    kind, reason, parent = geometry.model_type, "", module
    for _ in range(2):
        parent = parent.rpartition(".")[0]
        for name in (*INPUT_NORMS, *EITHER_NORM):
            gain = _present(tensors, f"{parent}.{name}" if parent else name)
            if gain is None:
                continue
            if kind in NOT_BEFORE or geometry.norm_after:
                return (
                    None,
                    f"{name} follows attention here: weights alone give no logit bound",
                )
            is_like_gpt2 = kind is None and name == "ln_1"
            if name in INPUT_NORMS or kind in EITHER_NORM[name] or is_like_gpt2:
                return gain, ""
            reason = f"{name} precedes attention in some models and follows it in others: no logit bound"
    return None, reason


def missing_layers(
    checkpoint: Checkpoint, sites: Sequence[SitePlan | Unknown]
) -> list[Unknown]:
    """Returns the layers that config.json announces and of which no tensor is there, as after a partial download.

    Layers are the numbered modules in which attention lies. Where only one of them holds attention, others may share
    its weights (ALBERT, Zamba), so nothing is missing.
    """
    # Any tensor shows that its layer was downloaded: in hybrid models, some layers have no attention.
    present = _numbered(checkpoint.tensors)
    unknown = []
    for stack, layers in sorted(_numbered(site.name for site in sites).items()):
        keys = N_LAYERS
        for word, special in N_LAYERS_OF.items():
            keys = special if word in stack else keys
        total = first_number(section(checkpoint.config, stack), keys) or 0
        for layer in sorted(set(range(total)) - present.get(stack, layers)):
            if len(layers) > 1:
                reason = f"config.json says {total} layers, and no tensor of this one is in the checkpoint; download it again"
                unknown.append(Unknown(f"{stack}.{layer}".lstrip("."), reason))
    return unknown


def _numbered(names: Iterable[str]) -> dict[str, set[int]]:
    """Returns the numbers of layers by the name of their stack."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        match = re.match(r"(.*?)\.?(\d+)(\.|$)", name)
        if match:
            numbers.setdefault(match[1], set()).add(int(match[2]))
    return numbers


def _left_over(tensors: Tensors, modules: set[str]) -> list[Unknown]:
    """Returns modules with names like attention that contain matrices but do not belong to any site."""
    around = {path for name in modules for path in _paths(name)}
    lost: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        match = _ATTENTION.match(name)
        if match is None or len(tensor.shape) < 2 or match[1] in around:
            continue
        if modules.isdisjoint(_paths(match[1])):
            lost.setdefault(match[1], []).append(name[match.end() :])
    unknown = []
    for module, names in lost.items():
        leaves = [name.removesuffix(".weight") for name in names]
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
            name.endswith(".weight") and tensors[f"{module}.{name}"].floating
            for name in names
        ):
            reason = f"no known names for query and key among {', '.join(sorted(leaves)[:6])}"
        else:
            continue
        unknown.append(Unknown(module, reason))
    return unknown


def _paths(name: str) -> list[str]:
    """Returns the name and those of all modules around it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
