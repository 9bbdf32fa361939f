"""The JSON files of a run with the type of every field, and the binary file of per-head values.

Shapes: n records (logged steps), layers, heads.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qkeel.errors import DamagedFileError, QkeelError, ShapeError, reported
from qkeel.records import disk
from qkeel.records.disk import FIELD, MOST_BYTES, check_seal, is_sealed, read_regular, refuse_irregular, seal
from qkeel.records.names_and_units import BLOCK_FIELDS, EXTRAPOLATION_COLUMNS, LAYER_FIELDS, SINK_HEAD, head_field
from qkeel.records.parse import complete_json, json_value

# JSON documents and JSON lines, each with a checksum. Readers drop an incomplete last line and report any other damage.

JSONObject = dict[str, Any]  # parsed JSON; FIELDS has the types of its values


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically; see `disk.replace_file`.

    >>> write_text(Path("a.txt"), "whole")
    """
    disk.replace_file(path, text.encode("utf-8"))


def write_json(path: Path, value: Mapping[str, object], sealed: bool = True) -> None:
    """Writes a JSON object atomically, with its checksum as the last field if `sealed`.

    NaN and infinity are written as strings, so that every JSON reader can read the file.

    >>> write_json(Path("b.json"), {"loss": math.nan})
    """
    plain = _plain(value)
    disk.replace_file(path, seal(plain, 2) if sealed else json.dumps(plain, indent=2, allow_nan=False).encode() + b"\n")


def append_line(path: Path, value: Mapping[str, object]) -> None:
    """Appends one JSON line with its checksum and passes it to the operating system at once.

    >>> append_line(Path("a.jsonl"), {"step": 1})
    """
    disk.append(path, seal(_plain(value)))


def read_json(path: Path, sealed: bool = False) -> Any:
    """Reads a JSON file and removes its checksum; the strings 'nan', 'inf' and '-inf' become floats again.

    >>> write_json(Path("a.json"), {"loss": math.inf})
    >>> read_json(Path("a.json"))
    {'loss': inf}

    Raises:
        DamagedFileError: the file is missing, is not JSON, does not match its checksum, or has no checksum although it
            should be `sealed`.
    """
    if refuse_irregular(path) is None:
        raise DamagedFileError(f"{path} is missing; expected a readable file. Restore it.")
    with complete_json(path, DamagedFileError):
        return _value(read_regular(path), sealed)


def read_lines(path: Path, sealed: bool = False, sure: int = 0) -> Iterator[JSONObject]:
    r"""Yields the lines of a .jsonl file without their checksums. An incomplete last line is dropped; any other
    incomplete line is an error.

    >>> write_text(Path("b.jsonl"), '{"step": 1}\n{"st')
    >>> list(read_lines(Path("b.jsonl")))
    [{'step': 1}]

    Args:
        path: the file; a missing file is treated as empty.
        sealed: whether every line must have a checksum; if False, only lines after the first with a checksum need one.
        sure: the number of bytes known to have been written; a bad line that begins within these bytes is damage, not
            an incomplete write.

    Raises:
        DamagedFileError: a line is damaged; the message gives its number.
    """
    if refuse_irregular(path) is None:
        return
    begin, damage = 0, None
    for number, (end, value) in enumerate(_scan(path, sealed), start=1):
        if damage is not None:
            raise damage
        if isinstance(value, ValueError):
            damage = DamagedFileError(f"{path}, line {number} is not complete JSON, so the file was damaged ({value})")
            if begin < sure:
                raise damage
        else:
            yield value
        begin = end


def whole_bytes(path: Path, keep: Callable[[JSONObject], bool], sealed: bool = False) -> int:
    """Returns the number of bytes of a .jsonl file before the first line that is damaged or fails `keep`."""
    begin = 0
    for end, value in _scan(path, sealed):
        if isinstance(value, ValueError) or not keep(value):
            break
        begin = end
    return begin


def _scan(path: Path, sealed: bool) -> Iterator[tuple[int, Any]]:
    """Yields, for each line, the byte offset of its end and its value, or the ValueError from parsing it."""
    end = 0
    with reported(f"cannot read {path}"), open(path, "rb") as file:
        while line := file.readline(MOST_BYTES):
            end += len(line)
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it has no line end")
                value = _value(line, sealed)
                sealed = sealed or is_sealed(line)
            except ValueError as failure:
                value = failure
            yield end, value


def _value(text: bytes, sealed: bool) -> Any:
    """Parses a JSON text, and verifies and removes its checksum; raises ValueError if that fails."""
    checked = check_seal(text, sealed)
    value = json_value(text)
    if checked:
        del value[FIELD]
    return _numbers(value)


_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _plain(value: object) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "replace").decode("utf-8")  # file names may contain lone surrogates
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _numbers(value: object) -> Any:
    if isinstance(value, str):
        return _WORDS.get(value, value)
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    return value


# The fields in the files of runs and studies, with their types. Every reader checks files against this table.


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


# The fields that are read from the config.json of a model from another library, or from one of its parts.
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
# File -> type -> names of fields. With "!type", the field must exist and not be null. The name "*" means all others.
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
#: The type of each field, by file and name.
FIELDS: dict[str, dict[str, str]] = {
    file: {name: kind for kind, names in lines.items() for name in names.split()} for file, lines in _FILES.items()
}


def check_fields(value: object, file: str, where: str, error: type[QkeelError] = DamagedFileError) -> JSONObject:
    """Returns the value if it is an object whose fields have the types of FIELDS[file].

    >>> check_fields({"step": 3, "loss": None}, "metrics.jsonl", "metrics.jsonl, line 1")
    {'step': 3, 'loss': None}
    >>> check_fields({"loss": 1.0}, "metrics.jsonl", "metrics.jsonl, line 1")
    Traceback (most recent call last):
    qkeel.errors.DamagedFileError: metrics.jsonl, line 1 has no step; expected a whole number. It is damaged ...

    Args:
        value: the output of a parser.
        file: a key of FIELDS.
        where: the location of the value, for the error message.
        error: the class of the error to raise.

    Raises:
        QkeelError: the value is not an object, lacks a field, or has a field of the wrong type. The class is `error`.
    """

    def damaged(fault: str) -> QkeelError:
        return error(f"{where} {fault}. It is damaged or has a different format; restore it or create it again.")

    if not isinstance(value, dict):
        named = {list: "a list", str: "text", type(None): "null"}.get(type(value), type(value).__name__)
        raise damaged(f"contains {named} where an object was expected")
    kinds = FIELDS[file]
    for name, kind in kinds.items():
        if kind.startswith("!") and value.get(name) is None:
            raise damaged(f"has no {name}; expected {kind.removeprefix('!')}")
    for name, own in value.items():
        kind = kinds.get(name, kinds.get("*", "")).removeprefix("!")
        if own is not None and kind and not KINDS[kind](own):
            raise damaged(f"has {str(own)[:60]!r} as {name[:60]}; expected {kind}")
    return value


def check_parts(value: object, file: str, where: str, error: type[QkeelError] = DamagedFileError) -> JSONObject:
    """Checks a file whose fields may themselves be objects with typed fields; see `check_fields`.

    >>> check_parts({"optim": {"lr": 0.1}}, "config.json", "config.json")
    {'optim': {'lr': 0.1}}
    """
    about = check_fields(value, file, where, error)
    for name in about:
        part = about[name]
        if f"{file}, {name}" in FIELDS and isinstance(part, (dict, list)):
            for entry in part if isinstance(part, list) else [part]:
                check_fields(entry, f"{file}, {name}", f"{where}, {name}", error)
    return about


def read_checked(path: Path, sealed: bool = False) -> JSONObject:
    """Reads a JSON file whose name is a key of FIELDS; see `read_json` and `check_parts`.

    >>> _ = Path("chaos.json").write_text('{"base": {}, "pairs": []}')
    >>> read_checked(Path("chaos.json"))
    {'base': {}, 'pairs': []}
    """
    return check_parts(read_json(path, sealed), path.name, str(path))


# heads.f32 and eval_heads.f32 are append-only float32 files with one fixed-size record per logged step. heads.crc32
# contains the CRC-32 of each record as a little-endian uint32.

_MOST_NUMBERS = 1 << 24  # values per step
_MOST_BYTES = 1 << 35
_SUMS = "checksums"  # the field of heads.json that names the checksum file
_MEND = "Restore the files, or delete the directory and run again."


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Per-head values of a run: `values[name]` is [n layers heads]; `layers` are the names of the layers, if known."""

    steps: np.ndarray  #: [n], the numbers of completed optimizer steps
    values: dict[str, np.ndarray]
    layers: tuple[str, ...] = ()


class HeadRecorder:
    """Appends float32 records to `directory`/`name`.f32, each with the step and the `fields` [n_layers n_heads].

    `layers` are the names of the layers, or () if unknown.
    """

    def __init__(
        self,
        directory: Path,
        fields: tuple[str, ...],
        n_layers: int,
        n_heads: int,
        *,
        layers: tuple[str, ...] = (),
        name: str = "heads",
    ) -> None:
        self.path = directory / f"{name}.f32"
        self.shape = (len(fields), n_layers, n_heads)
        place = directory / f"{name}.json"
        about = {"fields": list(fields), "n_layers": n_layers, "n_heads": n_heads, "dtype": "<f4", "leading": "step"}
        about |= {"layers": list(layers)} if layers else {}
        there = refuse_irregular(place) is not None
        old = _description(directory, name) if there else {**about, _SUMS: f"{name}.crc32"}
        if {key: value for key, value in old.items() if key != _SUMS} != about:
            raise DamagedFileError(f"{place} describes other records. {_MEND}")
        if not there:
            write_json(place, old)
        self._sums = directory / f"{name}.crc32" if _SUMS in old else None  # earlier versions wrote no checksums

    def append(self, step: int, values: np.ndarray) -> None:
        """Appends one record, with values [n_fields n_layers n_heads]."""
        if values.shape != self.shape:
            raise ShapeError(f"expected values of shape {self.shape}, got {values.shape}")
        record = np.concatenate([[step], values.reshape(-1)]).astype("<f4").tobytes()
        disk.append(self.path, record)
        if self._sums is not None:
            disk.append(self._sums, zlib.crc32(record).to_bytes(4, "little"))


def read_heads(directory: Path, name: str = "heads", sealed: bool = False, sure: int = 0) -> Heads:
    """Reads heads.json, heads.f32 and heads.crc32. A last record that is incomplete or has no checksum is dropped.

    >>> HeadRecorder(Path("."), ("entropy",), 1, 2).append(5, np.ones((1, 1, 2)))
    >>> read_heads(Path(".")).steps
    array([5])

    Args:
        directory: the folder of the files.
        name: "heads" or "eval_heads".
        sealed: whether heads.json must have a checksum.
        sure: the number of bytes of heads.f32 that are known to have been written.

    Raises:
        DamagedFileError: a record does not match its checksum, or heads.json describes another file.
    """
    about, path = _description(directory, name, sealed), directory / f"{name}.f32"
    rows = _records(about, path, sure)
    steps = rows[:, 0]
    if not (np.isfinite(steps) & (steps >= 0)).all():
        raise DamagedFileError(
            f"{path} has a step that is not a whole number, so {name}.json does not describe it or it was damaged. "
            "" + _MEND
        )
    fields = about["fields"]
    body = rows[:, 1:].reshape(len(rows), len(fields), about["n_layers"], about["n_heads"])
    values = {f: body[:, i] for i, f in enumerate(fields)}
    return Heads(steps=steps.astype(np.int64), values=values, layers=tuple(about.get("layers") or ()))


def _records(about: JSONObject, path: Path, sure: int) -> np.ndarray:
    """Returns the undamaged records [n, 1 + values]."""
    width = _width(about)
    flat = np.frombuffer(_stored(path, 4 * width), dtype="<f4")
    rows = flat[: flat.size // width * width].reshape(-1, width)
    if _SUMS not in about:
        return rows
    place = path.with_suffix(".crc32")
    sums = np.frombuffer(_stored(place, 4), dtype="<u4")
    written = sure // (4 * width)
    if len(sums) < max(written, 1 if len(rows) > 1 else 0):
        raise DamagedFileError(f"{place} has {len(sums)} checksums for {len(rows)} records, so it was damaged. {_MEND}")
    wrong = [i for i, row in enumerate(rows[: len(sums)]) if zlib.crc32(row.tobytes()) != sums[i]]
    if wrong and wrong[0] < max(written, min(len(rows), len(sums)) - 1):
        raise DamagedFileError(
            f"{path}, record {wrong[0] + 1} does not match its checksum in {place.name}, so it was damaged. {_MEND}"
        )
    return rows[: wrong[0] if wrong else len(sums)]


def _width(about: JSONObject) -> int:
    """Returns the number of float32 values in a record."""
    return 1 + len(about["fields"]) * about["n_layers"] * about["n_heads"]


def _stored(path: Path, least: int) -> bytes:
    """Reads the complete 4-byte values of the file; returns b"" if it is missing or shorter than one record."""
    size = refuse_irregular(path) or 0
    raw = read_regular(path, most=_MOST_BYTES) if size >= least else b""
    return raw[: len(raw) // 4 * 4]


def _description(directory: Path, name: str, sealed: bool = False) -> JSONObject:
    """Reads and checks the .json file that describes the fields, layers and heads."""
    place = directory / f"{name}.json"
    about = check_fields(read_json(place, sealed), "heads.json", str(place))
    names, layers = about["fields"], about.get("layers") or ()
    if len(names) * about["n_layers"] * about["n_heads"] > _MOST_NUMBERS or len(set(names)) < len(names):
        fault = f"it names a field twice, or it has more than {_MOST_NUMBERS:,} values per step"
        raise DamagedFileError(f"{place} does not describe {name}.f32: {fault}. {_MEND}")
    if layers and len(layers) != about["n_layers"]:
        fault = f"{len(layers)} layer names; expected {about['n_layers']}, its n_layers"
        raise DamagedFileError(f"{place} has {fault}. {_MEND}")
    return about


def cut_heads(directory: Path, last_step: int) -> None:
    """Drops the records after `last_step` and any incomplete record, so that a resumed run appends correctly."""
    path = directory / "heads.f32"
    if refuse_irregular(path) is None or refuse_irregular(directory / "heads.json") is None:
        return
    about = _description(directory, "heads")
    keep = int(np.searchsorted(read_heads(directory).steps, last_step, side="right"))
    disk.cut(path, keep * _width(about) * 4)
    if _SUMS in about:
        disk.cut(path.with_suffix(".crc32"), keep * 4)


def _mean(values: np.ndarray, over: np.ndarray | None = None) -> np.ndarray:
    """Returns the mean of [... heads] over the measured heads or, if given, over the heads in the mask `over`."""
    counted = ~np.isnan(values) if over is None else over
    counts = counted.sum(-1)
    return np.where(counts, np.where(counted, values, 0).sum(-1) / np.maximum(counts, 1), np.nan)


def _median(values: np.ndarray) -> np.ndarray:
    """Returns the median over the measured heads; NaN if no head was measured or if the median is zero."""
    found = np.full(values.shape[:-1], np.nan)
    some = ~np.isnan(values).all(-1)
    found[some] = np.nanmedian(values[some], axis=-1)
    return np.where(found == 0, np.nan, found)


_FOLDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "max": lambda values: np.fmax.reduce(values, axis=-1, initial=np.nan),
    "min": lambda values: np.fmin.reduce(values, axis=-1, initial=np.nan),
    "mean": _mean,
    "std": lambda values: np.sqrt(_mean(np.square(values - _mean(values)[..., None]))),
    # Σ [x > 0.3] / n over the n measured heads.
    "share_of_sinks": lambda values: _mean(np.where(np.isnan(values), np.nan, values > SINK_HEAD)),
    # The mean over heads with x > 0.3 minus the mean over all other heads; NaN if either group is empty.
    "gap_of_sinks": lambda values: _mean(values, values > SINK_HEAD) - _mean(values, values <= SINK_HEAD),
    "max_ratio": lambda values: np.fmax.reduce(values, axis=-1, initial=np.nan) / _median(values),
    "min_ratio": lambda values: np.fmin.reduce(values, axis=-1, initial=np.nan) / _median(values),
    "max_over_mean": lambda values: np.fmax.reduce(values, axis=-1, initial=np.nan) / _mean(values),
}


def fold_heads(name: str, values: np.ndarray) -> np.ndarray:
    """Summarises the last dimension, heads or blocks, as specified in the tables of fields; NaN means not measured.

    >>> float(fold_heads("max_logit", np.array([1.0, np.nan, 3.0])))
    3.0
    >>> float(fold_heads("sink_head_ratio", np.array([0.1, np.nan, 0.9, 0.2, 0.8])))
    0.5
    """
    field = LAYER_FIELDS.get(name) or BLOCK_FIELDS.get(name) or head_field(name)
    return _FOLDS["mean" if field is None else field.fold](values)
