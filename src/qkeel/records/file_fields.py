"""The fields of the files of runs and studies, and the type of each: the one table that every reader checks against."""

from __future__ import annotations

import math
from collections.abc import Callable

from qkeel.errors import DamagedFileError, QkeelError
from qkeel.records.files import JSONObject
from qkeel.records.names_and_units import EXTRAPOLATION_COLUMNS


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return _is_number(value) and value == value // 1 and 0 <= value < 1 << 53  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _are(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


KINDS: dict[str, Callable[[object], bool]] = {
    "a number": _is_number,
    "a finite number": lambda value: _is_number(value) and math.isfinite(value),  # type: ignore[arg-type]
    "a whole number": _is_whole,
    "a number from 1 to 65,536": lambda value: type(value) is int and 1 <= value <= 1 << 16,
    "text": _is_text,
    "true or false": lambda value: isinstance(value, bool),
    "an object": _is_object,
    "a list of text": _are(_is_text),
    "sizes": lambda value: (type(value) is int and value >= 0) or isinstance(value, list),
    "a list of numbers": _are(_is_number),
    "a list of whole numbers": _are(_is_whole),
    "a list of objects": _are(_is_object),
    "an object of objects": lambda value: isinstance(value, dict) and all(map(_is_object, value.values())),
}
# What is read of the config.json of another library's model, whole or of one of its parts.
_MODEL = {
    "model_type": "text",
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), "sizes"),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), "sizes"),
    **dict.fromkeys(("n_kv_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", "kv_n_heads"), "sizes"),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "d_kv", "hidden_size"), "sizes"),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_hidden_layers"), "sizes"),
    **dict.fromkeys(("query_pre_attn_scalar", "attention_multiplier", "rms_norm_eps", "rope_theta"), "a number"),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), "a number"),
    **dict.fromkeys(("factor", "attention_factor", "mscale", "mscale_all_dim"), "a number"),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "attn_config"), "an object"),
    "layer_types": "a list of text",
}
_PARTS = ("text_config", "llm_config", "thinker_config", "vision_config", "audio_config", "encoder", "decoder", "model")
_PARTS += ("rope_scaling", "rope_parameters", "attn_config")
# The type of a field by file and name. "!" in front: the field must be there and not null; "*": every other field.
FIELDS: dict[str, dict[str, str]] = {
    "study.json": {
        "runs": "!a list of objects",
        "study": "text",
        "command": "text",
        "remedies": "a list of text",
        "lrs": "a list of numbers",
        "seeds": "a list of whole numbers",
        "blocks": "a list of text",
        "optimizers": "a list of text",
        "mixes": "a list of text",
        "tuning_seeds": "a list of whole numbers",
        "tuned": "a list of objects",
        **dict.fromkeys(("parametrisation", "schedule", "decay"), "a list of text"),
        **dict.fromkeys(("d_model", "n_layers", "n_heads", "head_dim"), "a list of whole numbers"),
        **dict.fromkeys(("context", "batch", "steps"), "a list of whole numbers"),
        "weight_decay": "a list of numbers",
        "contexts": "an object",
        "base": "an object of objects",
    },
    "chaos.json": {"base": "!an object", "pairs": "!a list of objects"},
    "chaos.json, pairs": {
        "remedy": "!text",
        "lr": "!a number",
        "seed": "!a whole number",
        "loss_difference": "!a number",
        "logit_distance": "!a number",
        "exponent": "a number",
        "part": "text",
    },
    "study.json, runs": {
        "run_id": "!text",
        "remedy": "!text",
        "lr": "!a number",
        "seed": "!a whole number",
        "role": "text",
        "part": "text",
    },
    "study.json, tuned": {
        **dict.fromkeys(("role", "remedy", "border"), "text"),
        **dict.fromkeys(("lr", "val_loss"), "a number"),
        "lrs": "a list of numbers",
        "seeds": "a list of whole numbers",
    },
    "study.json, contexts": {
        "posthoc": "a list of text",
        "test_lengths": "a list of whole numbers",
        "sequences": "a whole number",
        "continue_steps": "a whole number",
    },
    "config.json": {
        "kind": "text",
        "remedy": "text",
        "seed": "a whole number",
        "steps": "a whole number",
        "nudge": "a whole number",
        "optim": "an object",
        "model": "an object",
        "data": "an object",
        "images": "an object",
    },
    "config.json, optim": {"name": "text", "lr": "a number"},
    "config.json, model": {"attention": "text", "norm_order": "text", "block": "text"},
    "config.json, data": {"source": "text", "context": "a whole number", "batch": "a whole number"},
    "config.json, images": {"images": "text", "image_share": "a number", "image_variance": "a number"},
    "config.json of a watched model": {
        "kind": "text",
        "model": "text",
        "parameters": "a whole number",
        "dtype": "text",
        "sites": "a list of objects",
        "fields": "a list of text",
        "optimizer": "text",
        "cadence": "text",
        "processes": "a whole number",
    },
    "env.json": {
        "qkeel": "text",
        "python": "text",
        "torch": "text",
        "device": "text",
        "cpu": "text",
        "compiled_kernels": "true or false",
        "dtype": "text",
        "corpus": "an object",
        "n_parameters": "a whole number",
        "formula": "text",
        "remedy_line": "text",
        "remedy_source": "text",
        "command": "text",
        "system": "text",
        "commit": "text",
        "versions": "an object",
    },
    "env.json, corpus": {
        "name": "text",
        "sha256": "text",
        "train_tokens": "a whole number",
        "heldout_tokens": "a whole number",
        "vocab_size": "a whole number",
        "loss_unit": "text",
        "tokenizer_sha256": "text",
    },
    "metrics.jsonl": {"step": "!a whole number", "*": "a number"},
    "eval.jsonl": {"step": "!a whole number", "*": "a number"},
    "events.jsonl": {
        "step": "!a whole number",
        "event": "text",
        "rule": "text",
        "severity": "text",
        "meaning": "text",
        "trend": "text",
        "remedy": "text",
        "source": "text",
        "layer": "text",
        "head": "a whole number",
        "value": "a number",
        "action": "text",
        "site": "text",
        "heads": "a list of whole numbers",
        "text": "text",
    },
    "extrapolation.jsonl": {
        **{name: "a number" for name, field in EXTRAPOLATION_COLUMNS.items() if field.unit != "name"},
        "posthoc": "!text",
        "test_length": "!a whole number",
        "refused": "text",
        "segments": "a list of numbers",
    },
    "DONE": {"*": "a whole number"},
    "summary.json": {
        "remedy": "text",
        "run_id": "text",
        "status": "text",
        "block": "text",
        "optimizer": "text",
        "kind": "text",
        "collapsed": "true or false",
        "*": "a number",
    },
    "state.safetensors": {
        "step": "!a whole number",
        "cpu_seconds": "!a finite number",
        "optimizer": "!an object",
        "sizes": "an object",
    },
    "state.safetensors, sizes": {"*": "a whole number"},
    "config.json of a checkpoint": _MODEL,
    **{f"config.json of a checkpoint, {part}": _MODEL for part in _PARTS},
    "heads.json": {
        "fields": "!a list of text",
        "n_layers": "!a number from 1 to 65,536",
        "n_heads": "!a number from 1 to 65,536",
        "layers": "a list of text",
        "checksums": "text",
    },
}


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


def _name(value: object) -> str:
    return {list: "a list", str: "text", type(None): "null"}.get(type(value), type(value).__name__)


def _damage(error: type[QkeelError], where: str, what: str) -> QkeelError:
    return error(f"{where} {what}. It was damaged or is of another kind: restore it, or make it again.")
