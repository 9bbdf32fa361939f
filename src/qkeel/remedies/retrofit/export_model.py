"""Exports a Llama, Mistral or Qwen2 with q/k norms as a Qwen3, the transformers architecture that has such norms."""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
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
    caution,
    check_known,
)
from qkeel.functional.norms import widest
from qkeel.patching.forward import unwrapped
from qkeel.records import disk
from qkeel.records.file_formats import write_json
from qkeel.remedies.apply import active_remedies
from qkeel.remedies.head_norms import HeadNorm
from qkeel.safetensors_io import DTYPES, INDEX, PICKLES, TensorReader, open_checkpoint

# The architectures of transformers with norms of q and k that can be written.
SHAPES = ("qwen3",)
# Types of models that are a Qwen3 once q and k are normed.
_SOURCES = ("llama", "mistral", "qwen2")
_COMPUTES = "pre-norm blocks, an RMS norm of q and k per head before RoPE, one gain [head_dim] for all heads"

ModelConfigFields = Mapping[str, Any]
# Tensors by name, each read when it is written, so that only one file of them is in memory.
Loaders = Mapping[str, Callable[[], Tensor]]

_QK_NORM = re.compile(r"(model\.layers\.\d+\.self_attn\.([qk])_norm)(\.weight|)")
# Buffers that models recreate.
_IGNORED = re.compile(r".*rotary_emb\.inv_freq|.*\.masked_bias")
# Fields that the new config has elsewhere (rope_parameters) or not at all, and the one that names code of the old
# model.
_DROPPED = (
    "pretraining_tp",
    "mlp_bias",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "auto_map",
)


@final
class Conversion:
    """Turns the tensors and the config.json of a model into those of a Qwen3.

    Args:
        config: the model's config.json.
        names: the names of the model's tensors, including q_norm and k_norm.
        norm_eps: the eps of the q/k norm, if it differs from the config's rms_norm_eps.

    Raises:
        RefusedError: the model computes something that Qwen3 does not.
    """

    def __init__(
        self, config: ModelConfigFields, names: set[str], norm_eps: float | None
    ) -> None:
        self.config = config
        if config.get("model_type") not in _SOURCES:
            raise RefusedError(
                f"a model of type {config.get('model_type')!r} cannot become a Qwen3, which has {_COMPUTES}; one can be "
                f"made from {' or '.join(_SOURCES)}"
            )
        if config.get("mlp_bias"):
            raise RefusedError(
                "config.json has mlp_bias, which Qwen3 does not; train the model without it first"
            )
        try:
            self.heads, self.width, self.layers = (
                int(config[n])
                for n in ("num_attention_heads", "hidden_size", "num_hidden_layers")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedError(
                f"config.json does not contain {error}; expected the config.json of a transformers model"
            ) from error
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.head_dim = config.get("head_dim") or self.width // self.heads
        self.tied = bool(
            config.get("tie_word_embeddings", "lm_head.weight" not in names)
        )
        self.eps = float(config.get("rms_norm_eps", 1e-6))
        # norm(x; ε) = norm(c · x; c² · ε): another eps of the norm goes into the weights before it.
        self._scale = 1.0 if norm_eps is None else math.sqrt(self.eps / norm_eps)
        # Qwen2 has biases on q, k and v only, whereas Qwen3 has them on all four projections or on none.
        self._adds_bias = config["model_type"] == "qwen2"
        self._check_complete({_new_name(n) for n in names if not _IGNORED.fullmatch(n)})

    def _check_complete(self, names: set[str]) -> None:
        """Raises RefusedError unless the tensors are exactly those of a Qwen3."""
        modules = [f"self_attn.{x}_norm" for x in "qk"]
        modules += [f"self_attn.{x}_proj" for x in "qkvo"]
        modules += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
        modules += ["input_layernorm", "post_attention_layernorm"]
        children = [f"{module}.weight" for module in modules]
        if any(name.endswith("q_proj.bias") for name in names):
            biased = "qkv" if self._adds_bias else "qkvo"
            children += [f"self_attn.{x}_proj.bias" for x in biased]
        expected = {"model.embed_tokens.weight", "model.norm.weight"}
        expected |= set() if self.tied else {"lm_head.weight"}
        for i in range(self.layers):
            expected |= {f"model.layers.{i}.{child}" for child in children}
        missing = sorted(expected - names)
        strange = sorted(names - expected - {"lm_head.weight"})
        if any(_QK_NORM.fullmatch(name) for name in missing):
            raise RefusedError(
                "q and k are not normed yet. Add the norms and fit their gains first: "
                "qkeel.retrofit(model, 'qk_norm', batch), then qkeel.export(model, ...) or save_pretrained"
            )
        if missing or strange:
            difference = f"lacks {missing[0]}" if missing else f"also has {strange[0]}"
            raise RefusedError(
                f"the model {difference}, but a Qwen3 has {_COMPUTES}; expected the tensors as save_pretrained "
                "writes them, with adapters merged"
            )

    def converted(self, name: str, x: Tensor) -> dict[str, Tensor]:
        """Returns what becomes of a tensor: under its new name, and with the bias that Qwen3 adds to it."""
        if _IGNORED.fullmatch(name):
            return {}
        if norm := _QK_NORM.fullmatch(name):
            x = self._gain(name, x, self.heads if norm[2] == "q" else self.kv_heads)
        elif self._scale != 1.0 and re.search(r"self_attn\.[qk]_proj\.", name):
            if x.dtype.itemsize < 4:
                raise RefusedError(
                    f"the eps of the q/k norm differs from rms_norm_eps, and scaling weights in {x.dtype} to "
                    "compensate would round them; retrofit with the model's own eps, or save the model in float32"
                )
            x = (x.to(widest(x.device)) * self._scale).to(x.dtype)
        tensors = {_new_name(name): x.contiguous()}
        if self._adds_bias and name.endswith("o_proj.weight"):
            tensors[name.replace(".weight", ".bias")] = x.new_zeros(self.width)
        return tensors

    def _gain(self, name: str, gain: Tensor, heads: int) -> Tensor:
        d = self.head_dim
        fits = tuple(gain.shape) in ((d,), (), (1,), (heads, 1), (heads, d))
        of_heads = gain.expand(heads, d) if fits else gain
        if not fits or not torch.equal(of_heads, of_heads[:1].expand_as(of_heads)):
            raise RefusedError(
                f"{name} of shape {tuple(gain.shape)} is not one gain of {d} numbers for all heads, as a Qwen3 has it; "
                "use qk_norm:gain=dim"
            )
        return of_heads[0]

    def new_config(self, has_bias: bool) -> dict[str, Any]:
        """Returns the config.json of the Qwen3."""
        config = self.config
        rope = dict(config.get("rope_parameters") or {})
        # As transformers wrote it before version 5.
        if not rope:
            scaling = dict(config.get("rope_scaling") or {})
            rope = {
                "rope_type": scaling.pop("type", "default"),
                "rope_theta": float(config.get("rope_theta", 10000.0)),
                **scaling,
            }
        return {
            **{k: v for k, v in config.items() if k not in _DROPPED},
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "head_dim": self.head_dim,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.eps,
            "tie_word_embeddings": self.tied,
            "rope_parameters": rope,
            "attention_bias": has_bias or bool(config.get("attention_bias")),
            **self._windows(),
        }

    def _windows(self) -> dict[str, Any]:
        """Returns Qwen3's window settings. A Mistral window applies to every layer, whereas Qwen2 lists its layers."""
        window = None
        if self.config["model_type"] == "mistral":
            window = self.config.get("sliding_window", 4096)
        elif self.config.get("use_sliding_window"):
            # Qwen3 reads the same keys as Qwen2.
            return {}
        kind = "full_attention" if window is None else "sliding_attention"
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": 0,
            "layer_types": [kind] * self.layers,
        }


def _new_name(name: str) -> str:
    """Returns the name that a tensor has in a Qwen3: a norm of numbers is stored under its module's name."""
    norm = _QK_NORM.fullmatch(name)
    return name if norm is None else f"{norm[1]}.weight"


# Writing models and checkpoints with q/k norms in an architecture that transformers loads.

# As transformers splits checkpoints by default.
SHARD_BYTES = 5_000_000_000
_ASSUMED = (
    "the checkpoint does not say which norms q and k have: they are taken as RMS norms with eps {:g}, rms_norm_eps of "
    "config.json, as qkeel.retrofit inserts them. qkeel.apply(model, 'qk_norm') inserts them with eps 1e-06: then give "
    "norm_eps (--norm-eps), or qkeel.export the model itself, whose norms are read"
)
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
        architecture: "qwen3".
        path: the folder to write.
        norm_eps: the eps of the q/k norms. By default the config's rms_norm_eps is taken, with a warning.

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
    check_known("architecture to export to", architecture, SHAPES)
    source = Path(checkpoint)
    if source.is_file():
        raise DataError(
            f"{source} is a file; expected a folder with config.json and safetensors, as save_pretrained writes it"
        )
    opened = open_checkpoint(source)
    if not opened.config:
        raise DataError(
            f"{source} has no config.json, which describes what the tensors mean; restore the file"
        )
    reader, loaders = TensorReader(), {}
    for tensor in opened.tensors.values():
        if tensor.dtype not in DTYPES:
            raise RefusedError(
                f"{tensor.name} is stored as {tensor.dtype}, which torch does not support; dequantise it first"
            )
        loaders[tensor.name] = functools.partial(reader.read, tensor)
    conversion = Conversion(opened.config, {*loaders}, norm_eps)
    if norm_eps is None:
        # A checkpoint does not store the eps of its norms.
        caution(_ASSUMED.format(conversion.eps))
    with _new_folder(Path(path)) as folder:
        for file in source.iterdir():
            is_weight = file.name.endswith(_WEIGHTS) or file.name.startswith(".")
            if file.is_file() and not is_weight and file.name != "config.json":
                shutil.copyfile(file, folder / file.name)
        _write(folder, conversion, loaders)
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
    check_known("architecture to export to", architecture, SHAPES)
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
    weights = inner_model.state_dict()
    # Loading rebuilds the head from the embedding.
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    gains, eps = _gains(inner_model)
    weights |= gains
    # transformers loads in the dtype of the config, float32 if there is none.
    dtypes = {x.dtype for x in weights.values() if x.is_floating_point()}
    if len(dtypes) == 1:
        config["dtype"] = str(dtypes.pop()).removeprefix("torch.")
    conversion = Conversion(config, {*weights}, norm_eps or eps)
    # A copy, since tensors of a safetensors file can't share memory, as tied embeddings do.
    loaders = {
        name: functools.partial(torch.clone, x.detach().cpu())
        for name, x in weights.items()
    }
    with _new_folder(Path(path)) as folder:
        _write(folder, conversion, loaders)
        generation = getattr(inner_model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)
    return Path(path)


# Remedies that do not change the forward pass, or that can be recognised by the names and shapes of the weights.
_HARMLESS = frozenset(
    (
        "none",
        "qk_norm",
        "lalr",
        "qk_lr",
        "qk_weight_decay",
        "qk_clip",
        "spectral_cap",
        "z_loss",
    )
)


def _gains(model: nn.Module) -> tuple[dict[str, Tensor], float | None]:
    """Returns the factors of the norms that qk_norm added, by name, and the eps of these norms."""
    gains: dict[str, Tensor] = {}
    eps: set[float] = set()
    for name, module in model.named_modules():
        if not isinstance(module, HeadNorm):
            continue
        norm, weight = module.norm, module.weight
        if norm.kind != "rms" or norm.over != "head":
            raise RefusedError(
                f"{name} is {norm}, but a Qwen3 has an RMS norm of each head"
            )
        if weight is None:
            weight = torch.ones((), dtype=next(model.parameters()).dtype)
        gains[f"{name}.weight"] = weight + (norm.gain == "one_plus_dim")
        eps.add(norm.eps)
    if len(eps) > 1:
        raise RefusedError(
            "the q/k norms of this model have different eps, but a Qwen3 has one eps for all"
        )
    return gains, eps.pop() if eps else None


def _write(folder: Path, conversion: Conversion, loaders: Loaders) -> None:
    """Writes the converted tensors in files of at most SHARD_BYTES bytes, their index and the config."""
    shards: list[dict[str, int]] = []
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        file = folder / f"model-{len(shards) + 1:05}.safetensors"
        try:
            save_file(shard, file, metadata={"format": "pt"})
        except SafetensorError as error:
            # A full disk, which safetensors does not report as an OSError.
            raise OSError(str(error)) from error
        shards.append({name: x.nbytes for name, x in shard.items()})
        shard.clear()

    # One file's tensors are in memory at a time.
    for name, load in loaders.items():
        for new, tensor in conversion.converted(name, load()).items():
            size = sum(x.nbytes for x in shard.values())
            if shard and size + tensor.nbytes > SHARD_BYTES:
                flush()
            shard[new] = tensor
    flush()
    names = {
        name: f"model-{i:05}.safetensors"
        for i, sizes in enumerate(shards, 1)
        for name in sizes
    }
    if len(shards) == 1:
        os.replace(folder / "model-00001.safetensors", folder / "model.safetensors")
    else:
        total = sum(sum(sizes.values()) for sizes in shards)
        write_json(
            folder / INDEX, {"metadata": {"total_size": total}, "weight_map": names}
        )
    has_bias = any(name.endswith("self_attn.o_proj.bias") for name in names)
    write_json(folder / "config.json", conversion.new_config(has_bias))


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` on success and is deleted on failure."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunDirectoryError(
            f"{out} already exists and will not be overwritten; choose a different folder"
        )
    disk.make_directory(out.parent)
    with disk.replacing(out, directory=True) as folder:
        yield folder
