"""The configuration that advice is asked for, from a file: of transformers, a recipe, a trained or watched run."""

from __future__ import annotations

from pathlib import Path

from qkeel.errors import DataError, InvalidValueError
from qkeel.lab.config import DataConfig, ModelConfig, RunConfig
from qkeel.options import Json
from qkeel.records import read_json
from qkeel.records.strict_toml import read_toml
from qkeel.spec import PRESETS

_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_DEPTH = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_PLAIN = ("llama", "mistral")  # model types whose attention is the baseline: RoPE and nothing else
Known = tuple[RunConfig, tuple[str, ...]]


def read_configuration(path: Path) -> Known:
    """Returns the configuration that a path names, and a sentence for each setting that it leaves unknown.

    Raises: DataError where nothing of the kind is there, or a size is missing or no whole number; InvalidValueError
        for a recipe or a run that holds no configuration.
    """
    if path.suffix == ".toml":
        values = read_toml(path)
        values.pop("study", None)
        return RunConfig.from_dict(values), ()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"{path} is no recipe (.toml), no config.json and no directory with one. Give one, or sizes as flags"
        )
    values = read_json(file)
    if not isinstance(values, dict):
        raise DataError(f"{file} holds {type(values).__name__}; expected the settings of a model or of a run, by name")
    if values.get("kind") == "watch":
        return _watched(values, file)
    if "optim" in values:
        return RunConfig.from_dict(values), ()
    return _transformers(values, file)


def _transformers(values: Json, file: Path) -> Known:
    """The sizes and attention of a model of transformers; what trains it is that of the studies."""
    text = values.get("text_config")  # a model of several modalities
    values = text if isinstance(text, dict) else values
    kind = str(values.get("model_type", "unknown"))
    attention = "baseline" if kind in _PLAIN else kind if kind in PRESETS else ""
    extra = () if attention else (f"attention is that of model type {kind}; measured: baseline",)
    kv, head = values.get("num_key_value_heads"), values.get("head_dim")
    model = ModelConfig(
        d_model=_whole(values, _WIDTH, file),
        n_layers=_whole(values, _DEPTH, file),
        n_heads=_whole(values, _HEADS, file),
        n_kv_heads=kv if isinstance(kv, int) else None,
        head_dim=head if isinstance(head, int) else None,
        attention=attention or "baseline",
        mlp="swiglu" if values.get("hidden_act") == "silu" else "gelu",
        tied=bool(values.get("tie_word_embeddings", False)),
    )
    vocabulary = _whole(values, ("vocab_size",), file)
    return RunConfig(model=model, data=DataConfig(vocab_size=vocabulary)), extra


def _watched(values: Json, file: Path) -> Known:
    """The attention sizes of a watched model. Its records have neither its text nor its steps."""
    sites = [site for site in values.get("sites") or () if isinstance(site, dict)]
    if not sites:
        raise DataError(f"{file} is of a watched model without attention; expected at least one site")
    heads, size = (_whole(sites[0], (key,), file) for key in ("n_heads", "head_dim"))
    model = ModelConfig(d_model=heads * size, n_layers=len(sites), n_heads=heads, head_dim=size)
    unknown = ("text and steps of a watched model are not recorded; measured: the text and steps of the studies",)
    return RunConfig(model=model), unknown


def _whole(values: Json, keys: tuple[str, ...], file: Path) -> int:
    for key in keys:
        value = values.get(key)
        if value is not None:
            if type(value) is not int or value < 1:
                raise InvalidValueError(f"{file} has {value!r:.60} as {key}; expected a whole number of at least 1")
            return value
    raise DataError(f"{file} has no {keys[0]}; expected the config.json of a model of transformers, or of a run")
