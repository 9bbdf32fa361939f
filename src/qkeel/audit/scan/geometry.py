"""The number, width and scale of the heads, read from config.json or from flags, never from weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, final

from qkeel.errors import DataError

Config = Mapping[str, Any]  # config.json, or a part of it: whatever JSON holds

# Keys of config.json by meaning, the first that is present counts.
N_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")
N_KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "d_kv")
# Parts of a composite config, and words in the names of their tensors; the first that fits counts.
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
# Model types whose norms multiply by 1 + w (transformers 5.23, modeling files).
ONE_PLUS = ("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma", "t5gemma", "t5gemma2")
ONE_PLUS += ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen4_exp", "minimax_m3_vl", "muse_glimmer")
ONE_PLUS += ("muse_spark", "nemotron", "step3p7")
# Model types that do not divide logits by √head_dim (transformers 5.23, modeling files).
UNSCALED = frozenset(["t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "udop", "gpt_neo"])


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of attention; None where neither config nor flags say. `scale` None stands for 1/√head_dim."""

    n_heads: int | None = None  #: query heads
    n_kv_heads: int | None = None  #: key heads
    head_dim: int | None = None  #: d, numbers of one head's query
    nope_dim: int | None = None  #: of latent attention: those of a head that are not rotated
    rope_dim: int | None = None  #: of latent attention: those that are rotated
    value_dim: int | None = None  #: numbers of one head's value
    scale: float | None = None
    rope_factor: float = 1.0  #: on cos and sin, if more than 1 (YaRN, LongRoPE)
    model_type: str | None = None  #: as in config.json; it says whether norms multiply by w or 1 + w
    layout: str | None = None  #: of a fused weight: "blocks", [q | k | v], or "groups", q, k, v per key head

    @property
    def one_plus(self) -> bool:
        """Returns whether norms multiply by 1 + w."""
        return self.model_type in ONE_PLUS

    def scale_of(self, head_dim: int) -> float:
        """Returns what logits are multiplied with."""
        return head_dim**-0.5 if self.scale is None else self.scale


def read_geometry(config: Config, tensor: str, flags: Geometry) -> Geometry:
    """Returns the sizes for the tensor of that name; flags go over config.json."""
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
        scale=_scale(part),
        model_type=part.get("model_type", config.get("model_type")),
    )
    said = {name: value for name, value in dataclasses.asdict(flags).items() if value is not None}
    return dataclasses.replace(found, **{**said, "rope_factor": _rope_factor(part)})


def section(config: Config, tensor: str) -> Config:
    """Returns the part of a composite config that is about a tensor or module of that name."""
    for key, words in SECTIONS:
        part = config.get(key)
        if isinstance(part, Mapping) and any(word in tensor for word in words):
            return part
    return config


def _first(config: Config, keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, (str, bool, float)):
            raise DataError(f"config.json has {value!r:.60} as {key}; expected a whole number: correct or restore it")
        if isinstance(value, int) and value > 0:
            return value
    return None


def _kv_heads(config: Config) -> int | None:
    nested = config.get("attn_config")
    if isinstance(nested, Mapping) and "kv_n_heads" in nested:
        return _first(nested, ("kv_n_heads",))
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        return 1  # Falcon, GPT-BigCode
    found = _first(config, N_KV_HEADS)
    if found is not None or "decoder_attention_heads" in config:
        return found
    return _first(config, N_HEADS)  # a config without the key is of a model without groups


def _scale(config: Config) -> float | None:
    """None for 1/√head_dim. DeepSeek's YaRN multiplies it with (0.1·m·ln s + 1)²; others name it."""
    if config.get("model_type") in UNSCALED or config.get("scale_attn_weights") is False:
        return 1.0
    if scalar := _positive(config, "query_pre_attn_scalar"):
        return scalar**-0.5
    if multiplier := _positive(config, "attention_multiplier"):
        return multiplier
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    width = (_first(config, ("qk_nope_head_dim",)) or 0) + (_first(config, ("qk_rope_head_dim",)) or 0)
    if isinstance(rope, Mapping) and width:
        over, factor = _positive(rope, "mscale_all_dim"), _positive(rope, "factor") or 1.0
        if over and factor > 1:
            return width**-0.5 * (0.1 * over * math.log(factor) + 1) ** 2
    return None


def _positive(config: Config, key: str) -> float | None:
    """The number above 0 of that name; None where it is not given, null or 0.

    Raises: DataError for anything else.
    """
    value = config.get(key)
    if value is None or (value == 0 and not isinstance(value, str)):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise DataError(
            f"config.json has {str(value)[:60]!r} as {key}; expected a number above 0: correct or restore it"
        )
    return float(value)


def _rope_factor(config: Config) -> float:
    """YaRN: 0.1 m ln s + 1 (Peng et al. 2023, arXiv 2309.00071, equation 22; m, m_all as in DeepSeek's config).

    LongRoPE: √(1 + ln s / ln L) (Ding et al. 2024, arXiv 2402.13753, as in transformers 5.23). Never below 1 here.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return 1.0
    kind = rope.get("rope_type", rope.get("type"))
    factor = _positive(rope, "factor") or 1.0
    if attention_factor := _positive(rope, "attention_factor"):
        return max(1.0, attention_factor)
    if kind == "yarn" and factor > 1:
        m, over = _positive(rope, "mscale"), _positive(rope, "mscale_all_dim")
        top = 0.1 * (m if m and over else 1.0) * math.log(factor) + 1
        return max(1.0, top / (0.1 * over * math.log(factor) + 1) if m and over else top)
    before = _positive(rope, name := "original_max_position_embeddings") or _positive(config, name)
    after = _positive(config, "max_position_embeddings")
    if kind == "longrope" and before and before > 1 and after:
        return max(1.0, math.sqrt(1 + math.log(max(after / before, 1.0)) / math.log(before)))
    return 1.0
