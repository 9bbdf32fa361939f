"""Architectures of transformers with q/k norms: tensors renamed or added, and their config."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from qkeel.errors import RefusedError, check_known
from qkeel.functional.norms import widest

Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
Change = Callable[[Tensor], Tensor]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_IGNORED = re.compile(r".*rotary_emb\.inv_freq|.*\.masked_bias")  # buffers that old checkpoints hold and models make


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """An architecture: where its norms stand, and which models become it once q and k are normed.

    `sources` are model types; `norms` maps the names of a block's norms there to those here. `flat`: the norm is over
    all heads of a token at once. `one_plus`: gains are stored as w and used as 1 + w.
    """

    model_type: str
    architecture: str
    sources: tuple[str, ...]
    norms: Mapping[str, str]
    flat: bool = False
    one_plus: bool = False
    why: str = ""


_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
SHAPES: dict[str, Shape] = {
    "qwen3": Shape(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        sources=("llama", "mistral", "qwen2"),
        norms={n: n for n in _NORMS[:2]},
        why="pre-norm blocks, an RMS norm of q and k per head before RoPE, one gain [head_dim] for all heads",
    ),
    "olmo2": Shape(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        sources=("llama",),
        norms={"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
        flat=True,
        why="norms behind attention and MLP and none before them (swin_norm), an RMS norm of q and k over all heads of "
        "a token (qk_norm:over=layer,gain=head_dim)",
    ),
    "gemma3": Shape(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        sources=("gemma2",),
        norms={n: n for n in _NORMS},
        one_plus=True,
        why="norms before and behind both branches with gains 1 + w, GELU, embeddings times √hidden_size, an RMS norm "
        "of q and k per head, and no cap on attention logits",
    ),
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A tensor's new name, and what is done to it."""

    name: str
    change: Change | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Old name -> Move; `zeros`: new name -> (the tensor stored next to it, its shape); the new config."""

    moves: Mapping[str, Move]
    zeros: Mapping[str, tuple[str, tuple[int, ...]]]
    config: Config


def plan(to: str, config: Config, shapes: Shapes, *, norm_eps: float | None = None) -> Plan:
    """The changes that turn tensors of these shapes and this config.json into those of `to`.

    Args:
        to: a name in SHAPES. config: that of the model before. shapes: its tensors, q_norm and k_norm among them.
        norm_eps: that of the q/k norm where it is not the config's rms_norm_eps.

    Raises:
        UnknownNameError: no such shape. RefusedError: the model computes something the shape does not.
    """
    check_known("architecture to export to", to, SHAPES)
    shape, sizes = SHAPES[to], _sizes(config, shapes)
    _check_source(to, shape, config)
    moves: dict[str, Move] = {}
    for name, size in shapes.items():
        if not _IGNORED.fullmatch(name):
            moves[name] = _move(to, shape, sizes, name, size)
    eps = float(config.get("rms_norm_eps", 1e-6))
    if norm_eps is not None and norm_eps != eps:
        if not norm_eps > 0 or not eps > 0:
            raise RefusedError(f"expected positive eps of the norms, got {norm_eps} for q and k and {eps} for blocks")
        _other_eps(moves, math.sqrt(eps / norm_eps))
    zeros = _zeros(config, sizes, shapes) if to == "qwen3" else {}
    _check_complete(to, shape, sizes, {m.name for m in moves.values()} | set(zeros))
    return Plan(moves=moves, zeros=zeros, config=_config(shape, config, sizes, bias=bool(zeros)))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool


def _sizes(config: Config, shapes: Shapes) -> _Sizes:
    try:
        heads, width, layers = (int(config[n]) for n in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedError(f"config.json does not give {error}; expected that of a transformers model") from error
    key = shapes.get("model.layers.0.self_attn.k_proj.weight")
    if key is None or len(key) != 2:
        raise RefusedError(
            "found no model.layers.0.self_attn.k_proj.weight; expected the tensors of a causal language model as "
            "save_pretrained writes them, with separate projections of q, k and v and adapters merged"
        )
    head_dim = config.get("head_dim") or (width // heads if heads else 0)
    if not isinstance(head_dim, int) or min(heads, width, layers, head_dim) < 1:
        raise RefusedError(
            f"config.json gives {heads} heads of {head_dim} numbers, hidden_size {width} and {layers} layers; expected "
            "whole numbers of at least 1"
        )
    tied = bool(config.get("tie_word_embeddings", "lm_head.weight" not in shapes))
    return _Sizes(layers=layers, heads=heads, kv_heads=key[0] // head_dim, head_dim=head_dim, tied=tied)


def _check_source(to: str, shape: Shape, config: Config) -> None:
    source = config.get("model_type")
    if source not in shape.sources:
        raise RefusedError(
            f"a model of type {source!r} does not become {to}, which has {shape.why}; "
            f"{to} can be made from {' or '.join(shape.sources)}"
        )
    for key, right in (("mlp_bias", (False, None)), ("attn_logit_softcapping", (None,))):
        if key in config and config[key] not in right:
            raise RefusedError(
                f"config.json says {key} = {config[key]!r}, which {to} does not have; train it away first"
            )
    if to == "gemma3" and "attn_logit_softcapping" not in config:
        raise RefusedError("config.json of a Gemma 2 without attn_logit_softcapping means 50; gemma3 has no such cap")
    if to == "olmo2" and config.get("sliding_window"):
        raise RefusedError("config.json asks for a sliding window, which olmo2 does not have")


def _move(to: str, shape: Shape, sizes: _Sizes, name: str, size: tuple[int, ...]) -> Move:
    found = _LAYER.fullmatch(name)
    if found is None:
        return Move(name=name)
    head, inner = f"model.layers.{found[1]}.", found[2]
    norm = inner.removesuffix(".weight")
    if norm in shape.norms:
        return Move(name=f"{head}{shape.norms[norm]}.weight")
    if norm.endswith("norm") and "self_attn." not in norm:
        raise RefusedError(f"{name}: {to} has no such norm; it has {shape.why}")
    for side, heads in (("q", sizes.heads), ("k", sizes.kv_heads)):
        if inner in (f"self_attn.{side}_norm.weight", f"self_attn.{side}_norm"):
            change = _flat(name, size, heads, sizes) if shape.flat else _per_head(to, name, size, heads, sizes)
            stored = _minus_one(name, change) if shape.one_plus else change
            return Move(name=f"{head}self_attn.{side}_norm.weight", change=stored)
    return Move(name=name)


def _flat(name: str, size: tuple[int, ...], heads: int, sizes: _Sizes) -> Change:
    if math.prod(size) != heads * sizes.head_dim:
        raise RefusedError(
            f"{name} has shape {size}; olmo2 norms all heads of a token at once with a gain of "
            f"{heads * sizes.head_dim} numbers: qk_norm:over=layer,gain=head_dim"
        )
    return lambda gain: gain.reshape(-1)


def _per_head(to: str, name: str, size: tuple[int, ...], heads: int, sizes: _Sizes) -> Change:
    d = sizes.head_dim
    if size not in ((d,), (), (1,), (heads, 1), (heads, d)):
        raise RefusedError(f"{name} has shape {size}; {to} has one gain of {d} numbers for all heads: qk_norm:gain=dim")

    def change(gain: Tensor) -> Tensor:
        if gain.ndim == 2:
            if not torch.equal(gain, gain[:1].expand_as(gain)):
                raise RefusedError(
                    f"{name} differs from head to head, and {to} has one gain for all heads; retrofit with gain=dim"
                )
            gain = gain[0]
        return gain.expand(d).contiguous()

    return change


def _minus_one(name: str, change: Change) -> Change:
    def stored(gain: Tensor) -> Tensor:
        wanted = change(gain)
        kept = (wanted.double() - 1).to(gain.dtype)
        if not torch.allclose(kept.double() + 1, wanted.double(), rtol=1e-6, atol=1e-7):
            raise RefusedError(
                f"{name} would be rounded: gemma3 stores gains as w - 1, and {gain.dtype} has no digits left for that; "
                "save the model in float32 first"
            )
        return kept

    return stored


def _other_eps(moves: dict[str, Move], factor: float) -> None:
    """Scales weights before a norm for another eps: norm(x; eps) = norm(factor · x; eps · factor²)."""
    power_of_two = math.frexp(factor)[0] == 0.5

    def change(weight: Tensor) -> Tensor:
        if weight.dtype.itemsize < 4 and not power_of_two:
            raise RefusedError(
                f"the eps of the q/k norm is not rms_norm_eps, and weights in {weight.dtype} would be rounded if they "
                "took the difference; retrofit with the model's own eps, or save the model in float32"
            )
        return (weight.to(widest(weight.device)) * factor).to(weight.dtype)

    for name, move in moves.items():
        if re.fullmatch(r".*self_attn\.[qk]_proj\.(weight|bias)", name):
            moves[name] = Move(name=move.name, change=change)


def _zeros(config: Config, sizes: _Sizes, shapes: Shapes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Biases that Qwen2 has on q, k and v, and Qwen3 on the output projection too."""
    found = {}
    for i in range(sizes.layers):
        head = f"model.layers.{i}.self_attn."
        if f"{head}q_proj.bias" in shapes and f"{head}o_proj.bias" not in shapes:
            found[f"{head}o_proj.bias"] = (f"{head}o_proj.weight", (int(config["hidden_size"]),))
    return found


def _check_complete(to: str, shape: Shape, sizes: _Sizes, names: set[str]) -> None:
    """Exactly the tensors of the architecture are there."""
    wanted = {"model.embed_tokens.weight", "model.norm.weight"}
    bias = any(name.endswith("q_proj.bias") for name in names)
    for i in range(sizes.layers):
        parts = [f"self_attn.{p}_{kind}" for p in "qk" for kind in ("proj", "norm")]
        parts += ["self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        wanted |= {f"model.layers.{i}.{part}.weight" for part in (*parts, *shape.norms.values())}
        if bias:
            wanted |= {f"model.layers.{i}.self_attn.{p}_proj.bias" for p in "qkvo"}
    gone, strange = sorted(wanted - names), sorted(names - wanted - {"lm_head.weight"})
    if any("_norm.weight" in name and "self_attn" in name for name in gone):
        raise RefusedError(
            f"{gone[0]} is missing: q and k are not normed yet. Put the norms in and fit their gains first: "
            "qkeel.retrofit(model, 'qk_norm', batches), then qkeel.export(model, ...) or save_pretrained"
        )
    if gone or strange or (not sizes.tied and "lm_head.weight" not in names):
        what = f"lacks {gone[0]}" if gone else f"has {strange[0]} besides" if strange else "lacks lm_head.weight"
        raise RefusedError(f"the model {what}; {to} has {shape.why}")


_DROPPED = ("pretraining_tp", "mlp_bias", "rope_theta", "rope_scaling", "partial_rotary_factor", "auto_map")


def _config(shape: Shape, config: Config, sizes: _Sizes, *, bias: bool) -> dict[str, Any]:
    new = {k: v for k, v in config.items() if k not in _DROPPED}
    rope = dict(config.get("rope_parameters") or {})
    if not rope:
        scaling = dict(config.get("rope_scaling") or {})
        kind = scaling.pop("type", "default")
        rope = {"rope_type": kind, "rope_theta": float(config.get("rope_theta", 10000.0)), **scaling}
    new |= {
        "model_type": shape.model_type,
        "architectures": [shape.architecture],
        "head_dim": sizes.head_dim,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "tie_word_embeddings": sizes.tied,
        "rope_parameters": rope,
    }
    if shape.model_type == "qwen3":
        new["attention_bias"] = bias or bool(config.get("attention_bias", False))
        new |= _windows(config, sizes)
    if shape.model_type == "olmo2":
        new.pop("head_dim")  # it has none of its own
        if sizes.head_dim * sizes.heads != int(config["hidden_size"]):
            raise RefusedError(f"olmo2 has heads of hidden_size / n_heads numbers, and these have {sizes.head_dim}")
    if shape.model_type == "gemma3_text":
        kinds = config.get("layer_types") or [("sliding", "full")[i % 2] + "_attention" for i in range(sizes.layers)]
        new |= {"layer_types": kinds, "rope_parameters": {"full_attention": rope, "sliding_attention": dict(rope)}}
    return new


def _windows(config: Config, sizes: _Sizes) -> dict[str, Any]:
    """Mistral has a window in every layer where it has one; Qwen2 says which layers."""
    if config["model_type"] == "mistral":
        default = 4096 if "sliding_window" not in config else None
        window = config.get("sliding_window", default)
        if window is not None:
            kinds = ["sliding_attention"] * sizes.layers
            return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0, "layer_types": kinds}
    if config["model_type"] == "qwen2" and config.get("use_sliding_window"):
        return {}  # the same keys mean the same
    return {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * sizes.layers}
