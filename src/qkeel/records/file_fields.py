"""The fields of the files of runs and studies, and the type of each: the one table that every reader checks against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from qkeel.errors import DamagedFileError, QkeelError
from qkeel.records.files import JSONObject, read_json
from qkeel.records.names_and_units import EXTRAPOLATION_COLUMNS


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return _is_number(value) and value == value // 1 and 0 <= value < 1 << 53  # type: ignore[operator]


def _is(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


def _are(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


KINDS: dict[str, Callable[[object], bool]] = {
    "a number": _is_number,
    "a finite number": lambda value: _is_number(value) and math.isfinite(value),  # type: ignore[arg-type]
    "a whole number": _is_whole,
    "a number from 1 to 65,536": lambda value: type(value) is int and 1 <= value <= 1 << 16,
    "text": _is(str),
    "true or false": _is(bool),
    "an object": _is(dict),
    "a list of text": _are(_is(str)),
    "sizes": lambda value: (type(value) is int and value >= 0) or isinstance(value, list),
    "a list of numbers": _are(_is_number),
    "a list of whole numbers": _are(_is_whole),
    "a list of objects": _are(_is(dict)),
    "an object of objects": lambda value: isinstance(value, dict) and all(map(_is(dict), value.values())),
}


def _of_kinds(lines: Mapping[str, str]) -> dict[str, str]:
    """The kind of each name, from lines of names under their kinds."""
    return {name: kind for kind, names in lines.items() for name in names.split()}


# What is read of the config.json of another library's model, whole or of one of its parts.
_MODEL = {
    "text": "model_type",
    "sizes": "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
    "decoder_attention_heads num_key_value_heads n_kv_heads num_kv_heads multi_query_group_num n_head_kv kv_n_heads "
    "head_dim attention_head_dim kv_channels d_kv hidden_size qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "num_hidden_layers",
    "a number": "query_pre_attn_scalar attention_multiplier rms_norm_eps rope_theta max_position_embeddings "
    "original_max_position_embeddings factor attention_factor mscale mscale_all_dim",
    "an object": "rope_scaling rope_parameters attn_config",
    "a list of text": "layer_types",
}
_PARTS = "text_config llm_config thinker_config vision_config audio_config encoder decoder model rope_scaling"
_PARTS += " rope_parameters attn_config"
# By file the names of fields under their kinds. "!" in front: the field must be there and not null; "*": every other.
_FILES: dict[str, Mapping[str, str]] = {
    "study.json": {
        "!a list of objects": "runs",
        "text": "study command",
        "a list of text": "remedies blocks optimizers mixes parametrisation schedule decay",
        "a list of numbers": "lrs weight_decay",
        "a list of whole numbers": "seeds tuning_seeds d_model n_layers n_heads head_dim context batch steps",
        "a list of objects": "tuned",
        "an object": "contexts primary",
        "an object of objects": "base",
    },
    "study.json, runs": {
        "!text": "run_id remedy",
        "!a number": "lr",
        "!a whole number": "seed",
        "text": "role part",
        "true or false": "primary",
    },
    "study.json, primary": {
        "!text": "remedy baseline",
        "!a number": "lr",
        "a number": "expected spread",
        "text": "source",
    },
    "study.json, tuned": {
        "text": "role remedy border",
        "a number": "lr val_loss",
        "a list of numbers": "lrs",
        "a list of whole numbers": "seeds",
    },
    "study.json, contexts": {
        "a list of text": "posthoc",
        "a list of whole numbers": "test_lengths",
        "a whole number": "sequences continue_steps",
    },
    "chaos.json": {"!an object": "base", "!a list of objects": "pairs"},
    "chaos.json, pairs": {
        "!text": "remedy",
        "!a number": "lr loss_difference logit_distance",
        "!a whole number": "seed",
        "a number": "exponent",
        "text": "part",
    },
    "config.json": {
        "text": "kind remedy",
        "a whole number": "seed steps nudge",
        "an object": "optim model data images",
    },
    "config.json, optim": {"text": "name", "a number": "lr"},
    "config.json, model": {"text": "attention norm_order block"},
    "config.json, data": {"text": "source", "a whole number": "context batch"},
    "config.json, images": {"text": "images", "a number": "image_share image_variance"},
    "config.json of a watched model": {
        "text": "kind model dtype optimizer cadence",
        "a whole number": "parameters processes",
        "a list of objects": "sites",
        "a list of text": "fields",
    },
    "env.json": {
        "text": "qkeel python torch device cpu dtype formula remedy_line remedy_source command watcher system commit",
        "true or false": "compiled_kernels",
        "an object": "corpus versions",
        "a whole number": "n_parameters",
        "a number": "counted_bigrams",
    },
    "env.json, corpus": {
        "text": "name sha256 loss_unit tokenizer_sha256",
        "a whole number": "train_tokens heldout_tokens vocab_size",
    },
    "metrics.jsonl": {"!a whole number": "step", "a number": "*"},
    "eval.jsonl": {"!a whole number": "step", "a number": "*"},
    "events.jsonl": {
        "!a whole number": "step",
        "text": "event rule severity meaning trend remedy cause source layer action site text",
        "a whole number": "head",
        "a number": "value",
        "a list of whole numbers": "heads",
    },
    "extrapolation.jsonl": {
        "a number": " ".join(name for name, field in EXTRAPOLATION_COLUMNS.items() if field.unit != "name"),
        "!text": "posthoc",
        "!a whole number": "test_length",
        "text": "refused",
        "a list of numbers": "segments",
    },
    "DONE": {"a whole number": "*"},
    "summary.json": {
        "text": "remedy run_id status block optimizer kind",
        "true or false": "collapsed",
        "a number": "*",
    },
    "state.safetensors": {
        "!a whole number": "step",
        "!a finite number": "cpu_seconds",
        "!an object": "optimizer",
        "an object": "sizes",
    },
    "state.safetensors, sizes": {"a whole number": "*"},
    "config.json of a checkpoint": _MODEL,
    **{f"config.json of a checkpoint, {part}": _MODEL for part in _PARTS.split()},
    "heads.json": {
        "!a list of text": "fields",
        "!a number from 1 to 65,536": "n_layers n_heads",
        "a list of text": "layers",
        "text": "checksums",
    },
}
FIELDS: dict[str, dict[str, str]] = {file: _of_kinds(lines) for file, lines in _FILES.items()}
"""The type of a field by file and name."""


def check_fields(value: object, file: str, where: str, error: type[QkeelError] = DamagedFileError) -> JSONObject:
    """The value as an object whose fields have the types of FIELDS[file]; `where` names its place in the error.

    >>> check_fields({"step": 3, "loss": None}, "metrics.jsonl", "metrics.jsonl, line 1")
    {'step': 3, 'loss': None}
    >>> check_fields({"loss": 1.0}, "metrics.jsonl", "metrics.jsonl, line 1")
    Traceback (most recent call last):
    qkeel.errors.DamagedFileError: metrics.jsonl, line 1 has no step; expected a whole number. It was damaged ...

    Args:
        value: what a parser gave. file: a row of FIELDS. where: the place of the value. error: the class to raise.

    Raises: `error` for what is no object, lacks a field, or has one of another type.
    """
    if not isinstance(value, dict):
        raise _damage(error, where, f"holds {_name(value)} where an object was expected")
    kinds = FIELDS[file]
    for name, kind in kinds.items():
        if kind.startswith("!") and value.get(name) is None:
            raise _damage(error, where, f"has no {name}; expected {kind.removeprefix('!')}")
    for name, own in value.items():
        kind = kinds.get(name, kinds.get("*"))
        if own is not None and kind is not None and not KINDS[kind.removeprefix("!")](own):
            raise _damage(error, where, f"has {str(own)[:60]!r} as {name[:60]}; expected {kind.removeprefix('!')}")
    return value


def check_parts(value: object, file: str, where: str, error: type[QkeelError] = DamagedFileError) -> JSONObject:
    """The value of a file whose fields may be objects with fields of their own; see `check_fields`.

    >>> check_parts({"optim": {"lr": 0.1}}, "config.json", "config.json")
    {'optim': {'lr': 0.1}}

    Args:
        value, file, where, error: see `check_fields`.
    """
    about = check_fields(value, file, where, error)
    for name in about:
        part = about[name]
        if f"{file}, {name}" in FIELDS and isinstance(part, (dict, list)):
            for entry in part if isinstance(part, list) else [part]:
                check_fields(entry, f"{file}, {name}", f"{where}, {name}", error)
    return about


def read_checked(path: Path, sealed: bool = False) -> JSONObject:
    """The value of a JSON file whose name has a row in FIELDS; see `read_json` and `check_parts`.

    >>> _ = Path("chaos.json").write_text('{"base": {}, "pairs": []}')
    >>> read_checked(Path("chaos.json"))
    {'base': {}, 'pairs': []}
    """
    return check_parts(read_json(path, sealed), path.name, str(path))


def _name(value: object) -> str:
    return {list: "a list", str: "text", type(None): "null"}.get(type(value), type(value).__name__)


def _damage(error: type[QkeelError], where: str, what: str) -> QkeelError:
    return error(f"{where} {what}. It was damaged or is of another kind: restore it, or make it again.")
