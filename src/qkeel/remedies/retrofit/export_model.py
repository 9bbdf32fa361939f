"""Exports a model with q/k norms as a transformers architecture that has such norms."""

from __future__ import annotations

import dataclasses
import glob
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from qkeel.deprecation import accepts_earlier_calls
from qkeel.errors import (
    DataError,
    InvalidTypeError,
    RefusedError,
    RunDirectoryError,
    check_known,
    reported,
)
from qkeel.functional.norms import widest
from qkeel.patching.forward import unwrapped
from qkeel.records.file_formats import write_json
from qkeel.remedies.apply import active_remedies
from qkeel.remedies.change_norm import HeadNorm
from qkeel.safetensors_io import (
    DTYPES,
    INDEX,
    PICKLES,
    Checkpoint,
    TensorReader,
    open_checkpoint,
)

# Target architectures in transformers: the tensors to rename or add, and the config.

ModelConfigFields = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
TensorChange = Callable[[Tensor], Tensor]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_IGNORED = re.compile(
    r".*rotary_emb\.inv_freq|.*\.masked_bias"
)  # buffers that models recreate


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TargetArchitecture:
    """A transformers architecture with norms of q and k, and the models that can become it once q and k are normed.

    `sources` are the types of these models. `norms` maps the names of norms in a source block to those in the target.
    `flat` is True if one norm covers all heads of a token. `one_plus` is True if gains are stored as w and used as
    1 + w. `why` describes what the architecture computes, for error messages.
    """

    model_type: str
    architecture: str
    sources: tuple[str, ...]
    norms: Mapping[str, str]
    flat: bool = False
    one_plus: bool = False
    why: str = ""


_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
SHAPES: dict[str, TargetArchitecture] = {
    "qwen3": TargetArchitecture(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        sources=("llama", "mistral", "qwen2"),
        norms={n: n for n in _NORMS[:2]},
        why="pre-norm blocks, an RMS norm of q and k per head before RoPE, one gain [head_dim] for all heads",
    ),
    "olmo2": TargetArchitecture(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        sources=("llama",),
        norms={
            "attention_post_norm": "post_attention_layernorm",
            "mlp_post_norm": "post_feedforward_layernorm",
        },
        flat=True,
        why="norms after attention and MLP and none before them (swin_norm), an RMS norm of q and k over all heads of "
        "a token (qk_norm:over=layer,gain=head_dim)",
    ),
    "gemma3": TargetArchitecture(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        sources=("gemma2",),
        norms={n: n for n in _NORMS},
        one_plus=True,
        why="norms before and after both branches with gains 1 + w, GELU, embeddings times √hidden_size, an RMS norm "
        "of q and k per head, and no cap on attention logits",
    ),
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A tensor's new name, and the function that changes the tensor, if there is one."""

    name: str
    change: TensorChange | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """The moves, keyed by old name, the zeros to add, and the new config.

    `zeros` maps a new name to a tensor in the same file and a shape."""

    moves: Mapping[str, Move]
    zeros: Mapping[str, tuple[str, tuple[int, ...]]]
    config: ModelConfigFields


def plan(
    to: str, config: ModelConfigFields, shapes: Shapes, *, norm_eps: float | None = None
) -> MovePlan:
    """Plans the changes that turn tensors of these shapes and this config.json into those of the architecture `to`.

    Args:
        to: a name in SHAPES.
        config: the model's config.json.
        shapes: the shapes of the model's tensors, including q_norm and k_norm.
        norm_eps: the eps of the q/k norm, if it differs from the config's rms_norm_eps.

    Raises:
        UnknownNameError: the architecture is unknown.
        RefusedError: the model computes something that the architecture does not.
    """
    check_known("architecture to export to", to, SHAPES)
    shape = SHAPES[to]
    _check_source(to, shape, config)
    sizes = _sizes(config, shapes)
    moves: dict[str, Move] = {}
    for name, size in shapes.items():
        if not _IGNORED.fullmatch(name):
            moves[name] = _move(to, shape, sizes, name, size)
    eps = _eps(config)
    if norm_eps is not None and norm_eps != eps:
        if not norm_eps > 0 or not eps > 0:
            raise RefusedError(
                f"expected positive eps of the norms, got {norm_eps} for q and k and {eps} for blocks"
            )
        _other_eps(moves, math.sqrt(eps / norm_eps))
    zeros = _zeros(config, sizes, shapes) if to == "qwen3" else {}
    _check_complete(to, shape, sizes, {m.name for m in moves.values()} | set(zeros))
    return MovePlan(
        moves=moves, zeros=zeros, config=_config(shape, config, sizes, bias=bool(zeros))
    )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _ModelSizes:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool


def _sizes(config: ModelConfigFields, shapes: Shapes) -> _ModelSizes:
    try:
        heads, width, layers = (
            int(config[n])
            for n in ("num_attention_heads", "hidden_size", "num_hidden_layers")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RefusedError(
            f"config.json does not contain {error}; expected the config.json of a transformers model"
        ) from error
    key = shapes.get("model.layers.0.self_attn.k_proj.weight")
    if key is None or len(key) != 2:
        raise RefusedError(
            "found no model.layers.0.self_attn.k_proj.weight; expected the tensors of a causal language model as "
            "save_pretrained writes them, with separate projections of q, k and v and adapters merged"
        )
    head_dim = config.get("head_dim") or (width // heads if heads else 0)
    if not isinstance(head_dim, int) or min(heads, width, layers, head_dim) < 1:
        raise RefusedError(
            f"config.json specifies {heads} heads of dimension {head_dim}, hidden_size {width} and {layers} layers; "
            "expected integers of at least 1"
        )
    tied = bool(config.get("tie_word_embeddings", "lm_head.weight" not in shapes))
    return _ModelSizes(
        layers=layers,
        heads=heads,
        kv_heads=key[0] // head_dim,
        head_dim=head_dim,
        tied=tied,
    )


def _check_source(
    to: str, shape: TargetArchitecture, config: ModelConfigFields
) -> None:
    source = config.get("model_type")
    if source not in shape.sources:
        raise RefusedError(
            f"a model of type {source!r} cannot become {to}, which has {shape.why}; "
            f"{to} can be made from {' or '.join(shape.sources)}"
        )
    for key, right in (
        ("mlp_bias", (False, None)),
        ("attn_logit_softcapping", (None,)),
    ):
        if key in config and config[key] not in right:
            raise RefusedError(
                f"config.json has {key} = {config[key]!r}, which {to} does not support; train the model without "
                "it first"
            )
    if to == "gemma3" and "attn_logit_softcapping" not in config:
        raise RefusedError(
            "a config.json of Gemma 2 without attn_logit_softcapping means a cap of 50, but gemma3 has no such cap"
        )
    if to == "olmo2" and config.get("sliding_window"):
        raise RefusedError(
            "config.json specifies a sliding window, which olmo2 does not have"
        )


def _move(
    to: str,
    shape: TargetArchitecture,
    sizes: _ModelSizes,
    name: str,
    size: tuple[int, ...],
) -> Move:
    matched = _LAYER.fullmatch(name)
    if matched is None:
        return Move(name=name)
    head, inner = f"model.layers.{matched[1]}.", matched[2]
    norm = inner.removesuffix(".weight")
    if norm in shape.norms:
        return Move(name=f"{head}{shape.norms[norm]}.weight")
    if norm.endswith("norm") and "self_attn." not in norm:
        raise RefusedError(f"{name}: {to} has no such norm; it has {shape.why}")
    for side, heads in (("q", sizes.heads), ("k", sizes.kv_heads)):
        if inner in (f"self_attn.{side}_norm.weight", f"self_attn.{side}_norm"):
            change = (
                _flat(name, size, heads, sizes)
                if shape.flat
                else _per_head(to, name, size, heads, sizes)
            )
            stored = _minus_one(name, change) if shape.one_plus else change
            return Move(name=f"{head}self_attn.{side}_norm.weight", change=stored)
    return Move(name=name)


def _flat(
    name: str, size: tuple[int, ...], heads: int, sizes: _ModelSizes
) -> TensorChange:
    if math.prod(size) != heads * sizes.head_dim:
        raise RefusedError(
            f"{name} has shape {size}, but olmo2 normalises all heads of a token at once with a gain of "
            f"{heads * sizes.head_dim} numbers; use qk_norm:over=layer,gain=head_dim"
        )
    return lambda gain: gain.reshape(-1)


def _per_head(
    to: str, name: str, size: tuple[int, ...], heads: int, sizes: _ModelSizes
) -> TensorChange:
    d = sizes.head_dim
    if size not in ((d,), (), (1,), (heads, 1), (heads, d)):
        raise RefusedError(
            f"{name} has shape {size}, but {to} has one gain of {d} numbers for all heads; use qk_norm:gain=dim"
        )

    def change(gain: Tensor) -> Tensor:
        if gain.ndim == 2:
            if not torch.equal(gain, gain[:1].expand_as(gain)):
                raise RefusedError(
                    f"{name} differs from head to head, but {to} has one gain for all heads; retrofit with gain=dim"
                )
            gain = gain[0]
        return gain.expand(d).contiguous()

    return change


def _minus_one(name: str, change: TensorChange) -> TensorChange:
    def stored(gain: Tensor) -> Tensor:
        factor = change(gain)
        kept = (factor.double() - 1).to(gain.dtype)
        if not torch.allclose(kept.double() + 1, factor.double(), rtol=1e-6, atol=1e-7):
            raise RefusedError(
                f"{name} would be rounded: gemma3 stores gains as w - 1, and {gain.dtype} is too imprecise for that; "
                "save the model in float32 first"
            )
        return kept

    return stored


def _other_eps(moves: dict[str, Move], factor: float) -> None:
    """Scales the weights before a norm to match a different eps: norm(x; eps) = norm(factor · x; eps · factor²)."""
    power_of_two = math.frexp(factor)[0] == 0.5

    def change(weight: Tensor) -> Tensor:
        if weight.dtype.itemsize < 4 and not power_of_two:
            raise RefusedError(
                f"the eps of the q/k norm differs from rms_norm_eps, and scaling weights in {weight.dtype} to "
                "compensate would round them; retrofit with the model's own eps, or save the model in float32"
            )
        return (weight.to(widest(weight.device)) * factor).to(weight.dtype)

    for name, move in moves.items():
        if re.fullmatch(r".*self_attn\.[qk]_proj\.(weight|bias)", name):
            moves[name] = Move(name=move.name, change=change)


def _zeros(
    config: ModelConfigFields, sizes: _ModelSizes, shapes: Shapes
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns zero biases for the output projection.

    They are needed because Qwen2 has biases on q, k and v only, whereas Qwen3 has them on all four projections or on
    none."""
    zeros = {}
    for i in range(sizes.layers):
        head = f"model.layers.{i}.self_attn."
        if f"{head}q_proj.bias" in shapes and f"{head}o_proj.bias" not in shapes:
            zeros[f"{head}o_proj.bias"] = (
                f"{head}o_proj.weight",
                (int(config["hidden_size"]),),
            )
    return zeros


def _check_complete(
    to: str, shape: TargetArchitecture, sizes: _ModelSizes, names: set[str]
) -> None:
    """Raises RefusedError unless the tensors are exactly those of the architecture."""
    expected = {"model.embed_tokens.weight", "model.norm.weight"}
    bias = any(name.endswith("q_proj.bias") for name in names)
    for i in range(sizes.layers):
        parts = [f"self_attn.{p}_{kind}" for p in "qk" for kind in ("proj", "norm")]
        parts += [
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ]
        expected |= {
            f"model.layers.{i}.{child}.weight"
            for child in (*parts, *shape.norms.values())
        }
        if bias:
            expected |= {f"model.layers.{i}.self_attn.{p}_proj.bias" for p in "qkvo"}
    gone, strange = (
        sorted(expected - names),
        sorted(names - expected - {"lm_head.weight"}),
    )
    if any("_norm.weight" in name and "self_attn" in name for name in gone):
        raise RefusedError(
            f"{gone[0]} is missing: q and k are not normed yet. Add the norms and fit their gains first: "
            "qkeel.retrofit(model, 'qk_norm', batch), then qkeel.export(model, ...) or save_pretrained"
        )
    if gone or strange or (not sizes.tied and "lm_head.weight" not in names):
        difference = (
            f"lacks {gone[0]}"
            if gone
            else f"also has {strange[0]}"
            if strange
            else "lacks lm_head.weight"
        )
        raise RefusedError(f"the model {difference}, but {to} has {shape.why}")


_DROPPED = (
    "pretraining_tp",
    "mlp_bias",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "auto_map",
)


def _eps(config: ModelConfigFields) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
    ):
        raise RefusedError(
            f"expected a number for rms_norm_eps in the config, got {value!r}: correct or restore it"
        )
    return float(value)


def _config(
    shape: TargetArchitecture,
    config: ModelConfigFields,
    sizes: _ModelSizes,
    *,
    bias: bool,
) -> dict[str, Any]:
    new = {k: v for k, v in config.items() if k not in _DROPPED}
    rope = dict(config.get("rope_parameters") or {})
    if not rope:
        scaling = dict(config.get("rope_scaling") or {})
        kind = scaling.pop("type", "default")
        rope = {
            "rope_type": kind,
            "rope_theta": float(config.get("rope_theta", 10000.0)),
            **scaling,
        }
    new |= {
        "model_type": shape.model_type,
        "architectures": [shape.architecture],
        "head_dim": sizes.head_dim,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": _eps(config),
        "tie_word_embeddings": sizes.tied,
        "rope_parameters": rope,
    }
    if shape.model_type == "qwen3":
        new["attention_bias"] = bias or bool(config.get("attention_bias", False))
        new |= _windows(config, sizes)
    if shape.model_type == "olmo2":
        new.pop("head_dim")  # OLMo 2 has no such field
        if sizes.head_dim * sizes.heads != int(config["hidden_size"]):
            raise RefusedError(
                f"olmo2 has heads of size hidden_size / n_heads, but these have size {sizes.head_dim}"
            )
    if shape.model_type == "gemma3_text":
        kinds = config.get("layer_types") or [
            ("sliding", "full")[i % 2] + "_attention" for i in range(sizes.layers)
        ]
        new |= {
            "layer_types": kinds,
            "rope_parameters": {
                "full_attention": rope,
                "sliding_attention": dict(rope),
            },
        }
    return new


def _windows(config: ModelConfigFields, sizes: _ModelSizes) -> dict[str, Any]:
    """Returns Qwen3's window settings. A Mistral window applies to every layer, whereas Qwen2 lists its layers."""
    if config["model_type"] == "mistral":
        default = 4096 if "sliding_window" not in config else None
        window = config.get("sliding_window", default)
        if window is not None:
            kinds = ["sliding_attention"] * sizes.layers
            return {
                "use_sliding_window": True,
                "sliding_window": window,
                "max_window_layers": 0,
                "layer_types": kinds,
            }
    if config["model_type"] == "qwen2" and config.get("use_sliding_window"):
        return {}  # Qwen3 reads the same keys
    return {
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * sizes.layers,
    }


# Writing models and checkpoints with q/k norms in an architecture that transformers loads.

SHARD = 5_000_000_000  # largest file size in bytes
_WEIGHTS = (".safetensors", ".index.json", ".py", ".gguf", ".h5", ".msgpack", *PICKLES)


@accepts_earlier_calls()
def convert(
    checkpoint: str | Path,
    architecture: str,
    path: str | Path,
    *,
    norm_eps: float | None = None,
) -> Path:
    """Converts a Hugging Face checkpoint with q/k norms to another architecture.

    Weights are memory-mapped and written file by file, and nothing is unpickled or run. `path` is written atomically,
    by a single rename, so that it is either complete or absent. Other small files (tokenizer, generation config) are
    copied.

    Args:
        checkpoint: a folder with config.json and safetensors files.
        architecture: "qwen3", "olmo2" or "gemma3".
        path: the folder to write.
        norm_eps: the eps of the q/k norms, if it differs from the config's rms_norm_eps.

    Returns:
        The path of the written folder.

    Raises:
        RefusedError: the model computes something that the architecture does not. The message says what it is.
        DataError: the checkpoint is missing, incomplete or damaged.
        RunDirectoryError: `path` is not empty or not writable.

    Example:
        >>> convert("missing", "qwen3", "out")
        Traceback (most recent call last):
        qkeel.errors.DataError: ...
    """
    source = Path(checkpoint)
    if source.exists() and not source.is_dir():
        raise DataError(
            f"{source} is a file; expected a folder with config.json and safetensors, as save_pretrained writes it"
        )
    opened = open_checkpoint(source)
    if not opened.config:
        raise DataError(
            f"{source} has no config.json, which describes what the tensors mean; restore the file"
        )
    planned = plan(
        architecture,
        opened.config,
        {n: t.shape for n, t in opened.tensors.items()},
        norm_eps=norm_eps,
    )
    with _whole(Path(path), source) as folder:
        _copy_rest(source, folder)
        files = dict.fromkeys(t.file for t in opened.tensors.values())
        _write(folder, planned, ((file.name, _stored(opened, file)) for file in files))
    return Path(path)


@accepts_earlier_calls()
def export(
    model: nn.Module,
    architecture: str,
    path: str | Path,
    *,
    norm_eps: float | None = None,
) -> Path:
    """Writes a transformers model to which `qk_norm` was applied as a checkpoint of another architecture.

    Args:
        model: a transformers model with its `config`.
        architecture: as for `convert`.
        path: as for `convert`.
        norm_eps: the eps of the q/k norms. By default it is read from the norms that `qk_norm` added.

    The model's generation config is written too. The tokenizer is not part of the model: save it in the same directory
    with `tokenizer.save_pretrained(out)`.

    Raises:
        RefusedError, RunDirectoryError: as for `convert`.

    Example:
        >>> export(nn.Linear(2, 2), "qwen3", "out")
        Traceback (most recent call last):
        qkeel.errors.RefusedError: expected a transformers model, with a config, to export as qwen3; this Linear has
        none
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"expected a torch.nn.Module to export, got {type(model).__name__}"
        )
    inner_model = unwrapped(model)
    to_dict = getattr(getattr(inner_model, "config", None), "to_dict", None)
    if to_dict is None:
        raise RefusedError(
            f"expected a transformers model, with a config, to export as {architecture}; this "
            f"{type(inner_model).__name__} has none"
        )
    config: dict[str, Any] = to_dict()
    strange = active_remedies(inner_model) - _HARMLESS
    if strange:
        raise RefusedError(
            f"{', '.join(sorted(strange))} is active on this model, and the files of {architecture} would not record "
            "it; remove() its handle, or fold() what can be folded, first"
        )
    tied = bool(
        config.get("tie_word_embeddings")
    )  # loading then rebuilds the head from the embedding
    weights = {
        n: x
        for n, x in inner_model.state_dict().items()
        if not (tied and n == "lm_head.weight")
    }
    gains = _gains(inner_model, architecture)
    weights = {
        n: x
        for n, x in weights.items()
        if not n.endswith("self_attn.q_norm.logit_scale")
    }
    weights |= {name: gain for name, (gain, _) in gains.items()}
    if norm_eps is None and gains:
        norm_eps = next(iter(gains.values()))[1]
    dtypes = {x.dtype for x in weights.values() if x.is_floating_point()}
    if len(dtypes) == 1:
        config["dtype"] = str(dtypes.pop()).removeprefix("torch.")
    planned = plan(
        architecture,
        config,
        {n: tuple(x.shape) for n, x in weights.items()},
        norm_eps=norm_eps,
    )
    with _whole(Path(path), None) as folder:
        shards = list(_shards(weights))
        files = [
            f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
            for i in range(len(shards))
        ]
        _write(
            folder,
            planned,
            (
                (f, {n: weights[n].detach().cpu() for n in names})
                for f, names in zip(files, shards)
            ),
        )
        generation = getattr(inner_model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)
    return Path(path)


# Remedies that do not change the forward pass, or that can be recognised by the names and shapes of the weights.
_HARMLESS = frozenset(
    (
        "none",
        "qk_norm",
        "swin_norm",
        "lalr",
        "qk_lr",
        "qk_weight_decay",
        "qk_clip",
        "spectral_cap",
        "z_loss",
    )
)


def _gains(model: nn.Module, to: str) -> dict[str, tuple[Tensor, float]]:
    """Returns the gains of the norms that qk_norm added, each as a factor together with the norm's eps."""
    flat = to in SHAPES and SHAPES[to].flat
    gains: dict[str, tuple[Tensor, float]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, HeadNorm):
            continue
        norm = module.norm
        if norm.kind != "rms" or (norm.over == "layer") != flat:
            raise RefusedError(
                f"{name} is {norm}, but {to} has an RMS norm over {'all heads' if flat else 'each head'}"
            )
        parameter = next(p for p in model.parameters())
        gain = (
            torch.ones((), dtype=parameter.dtype)
            if module.weight is None
            else module.weight.detach()
        )
        if norm.gain == "one_plus_dim":
            gain = 1 + gain
        if module.logit_scale is not None:
            gain = gain * module.logit_scale.detach()
        gains[f"{name}.weight"] = (gain * module.factor, norm.eps)
    if len({eps for _, eps in gains.values()}) > 1:
        raise RefusedError(
            f"the q/k norms of this model have different eps, but {to} has one eps for all"
        )
    return gains


def _shards(weights: Mapping[str, Tensor]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, x in weights.items():
        if names and size + x.nbytes > SHARD:
            yield names
            names, size = [], 0
        names.append(name)
        size += x.nbytes
    yield names


def _stored(checkpoint: Checkpoint, file: Path) -> dict[str, Tensor]:
    reader = TensorReader()
    inside = [t for t in checkpoint.tensors.values() if t.file == file]
    for tensor in inside:
        if tensor.dtype not in DTYPES:
            raise RefusedError(
                f"{tensor.name} is stored as {tensor.dtype}, which torch does not support; dequantise it first"
            )
    return {t.name: reader.read(t) for t in inside}


def _changed(planned: MovePlan, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    changed_tensors: dict[str, Tensor] = {}
    for name, x in tensors.items():
        move = planned.moves.get(name)
        if move is not None:
            changed_tensors[move.name] = (
                x if move.change is None else move.change(x)
            ).contiguous()
    # Tensors in a safetensors file can't share memory, so one that appears twice (a tied embedding) is copied.
    places: set[int] = set()
    for name, x in changed_tensors.items():
        if x.data_ptr() in places:
            changed_tensors[name] = x.clone()
        places.add(x.data_ptr())
    for name, (near, shape) in planned.zeros.items():
        if near in tensors:
            changed_tensors[name] = torch.zeros(shape, dtype=tensors[near].dtype)
    return changed_tensors


def _copy_rest(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        skipped = (
            file.name == "config.json"
            or file.name.endswith(_WEIGHTS)
            or file.name.startswith(".")
        )
        if file.is_file() and not skipped:
            shutil.copyfile(file, folder / file.name)


def _write(
    folder: Path, planned: MovePlan, files: Iterable[tuple[str, Mapping[str, Tensor]]]
) -> None:
    """Writes the changed tensors of each file (a single file as "model.safetensors"), the index and the config."""
    sizes: dict[str, tuple[str, int]] = {}
    for name, stored in files:
        tensors = _changed(planned, stored)
        try:
            save_file(tensors, folder / name, metadata={"format": "pt"})
        except (
            SafetensorError
        ) as error:  # a full disk, which safetensors does not report as an OSError
            raise OSError(str(error)) from error
        with open(folder / name, "rb") as written:
            os.fsync(written.fileno())
        sizes |= {tensor: (name, x.nbytes) for tensor, x in tensors.items()}
    if len({file for file, _ in sizes.values()}) > 1:
        total = sum(size for _, size in sizes.values())
        names = {name: file for name, (file, _) in sizes.items()}
        write_json(
            folder / INDEX, {"metadata": {"total_size": total}, "weight_map": names}
        )
    elif sizes:
        only = next(iter(sizes.values()))[0]
        if only != "model.safetensors":
            os.replace(folder / only, folder / "model.safetensors")
    write_json(folder / "config.json", dict(planned.config))


@contextmanager
def _whole(out: Path, source: Path | None) -> Iterator[Path]:
    """A temporary folder that becomes `out` on success and is deleted on failure."""
    if source is not None and source.exists() and out.exists() and out.samefile(source):
        raise RunDirectoryError(
            f"{out} is the checkpoint itself; choose a different folder to write to"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunDirectoryError(
            f"{out} already exists and will not be overwritten; choose a different folder"
        )
    folder: Path | None = None
    advice = (
        ". Expected a writable folder with free space; existing files were not changed"
    )
    try:
        with reported(f"cannot write {out}", advice):
            out.parent.mkdir(parents=True, exist_ok=True)
            for leftover in out.parent.glob(
                f".{glob.escape(out.name)}.*.part"
            ):  # of a call that was killed
                shutil.rmtree(leftover)
            folder = Path(
                tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.", suffix=".part")
            )
            yield folder
            os.chmod(folder, 0o755)
            os.replace(folder, out)
    finally:
        if folder is not None and folder.exists():
            shutil.rmtree(folder)
