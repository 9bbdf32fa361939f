"""The JSON files of a run, and the binary file of per-head values.

Shapes: n records (logged steps), layers, heads.

`disk` writes the bytes; `run_directory` says which files a run has.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qkeel.errors import (
    DamagedFileError,
    DataError,
    InvalidValueError,
    ShapeError,
    reported,
)
from qkeel.records import disk
from qkeel.records.disk import read_file
from qkeel.records.recorded_fields import (
    head_field,
    of_layers,
)

# JSON documents and JSON lines. Readers drop an incomplete last line and report any other damage. Before 0.2.0, the
# last field of every object was a checksum, which is ignored.

# Parsed JSON.
JSONObject = dict[str, Any]
_CHECKSUM = "crc32"
_RESTORE = "It is damaged or has a different format; restore it or create it again."


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically; see `disk.replace_file`.

    >>> write_text(Path("a.txt"), "whole")
    """
    disk.replace_file(path, text.encode("utf-8"))


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Writes a JSON object atomically. NaN and infinity are written as strings, so that every JSON reader can read the
    file.

    >>> write_json(Path("b.json"), {"loss": math.nan})
    """
    disk.replace_file(
        path, json.dumps(_writable(value), indent=2, allow_nan=False).encode() + b"\n"
    )


def append_line(path: Path, value: Mapping[str, object]) -> None:
    """Appends one JSON line and passes it to the operating system at once.

    >>> append_line(Path("a.jsonl"), {"step": 1})
    """
    disk.append(path, json.dumps(_writable(value), allow_nan=False).encode() + b"\n")


def read_json(path: Path) -> Any:
    """Reads a JSON file; the strings 'nan', 'inf' and '-inf' become floats again.

    >>> write_json(Path("a.json"), {"loss": math.inf})
    >>> read_json(Path("a.json"))
    {'loss': inf}

    Raises:
        DamagedFileError: the file is missing or is not JSON.
    """
    text = read_file(path, DamagedFileError)
    try:
        return parse_json(text)
    except ValueError as failure:
        raise DamagedFileError(
            f"{path} is not complete JSON ({failure}). {_RESTORE}"
        ) from failure


def read_object(path: Path, *required: str) -> JSONObject:
    """Reads a JSON object that has at least the `required` fields.

    >>> write_json(Path("a.json"), {"runs": []})
    >>> read_object(Path("a.json"), "runs")
    {'runs': []}

    Raises:
        DamagedFileError: the file is missing, is not a JSON object, or lacks a field.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise DamagedFileError(
            f"{path} contains {type(value).__name__} where an object was expected. {_RESTORE}"
        )
    missing = [name for name in required if value.get(name) is None]
    if missing:
        raise DamagedFileError(f"{path} has no {', '.join(missing)}. {_RESTORE}")
    return value


def read_lines(path: Path) -> Iterator[JSONObject]:
    r"""Yields the objects of a .jsonl file. An incomplete last line is dropped; any other incomplete line is an error.

    >>> write_text(Path("b.jsonl"), '{"step": 1}\n{"st')
    >>> list(read_lines(Path("b.jsonl")))
    [{'step': 1}]

    Args:
        path: the file; a missing file is treated as empty.

    Raises:
        DamagedFileError: a line is damaged; the message gives its number.
    """
    # Path.exists raises for a name that is too long.
    if not os.path.exists(path):
        return
    damage = None
    with reported(f"cannot read {path}"), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            # a torn line is the last one.
            if damage is not None:
                raise DamagedFileError(
                    f"{path}, line {number - 1} is not complete JSON, so the file was damaged ({damage})"
                )
            try:
                value = parse_json(line)
                if not line.endswith(b"\n") or not isinstance(value, dict):
                    raise ValueError("expected an object and a line end")
            except ValueError as failure:
                damage = failure
                continue
            yield value


def whole_bytes(path: Path) -> int:
    """Returns the number of bytes of a .jsonl file without an incomplete last line."""
    return read_file(path).rfind(b"\n") + 1


def parse_json(text: bytes) -> Any:
    """Parses a JSON text; the strings 'nan', 'inf' and '-inf' become floats.

    >>> parse_json(b'{"loss": "nan"}')
    {'loss': nan}

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        value = json.loads(text)
    except RecursionError as failure:
        raise ValueError("its objects and lists are nested too deeply") from failure
    if isinstance(value, dict):
        value.pop(_CHECKSUM, None)
    return _numbers(value)


_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _writable(value: object) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str) and not value.isascii():
        # File names may contain lone surrogates.
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {k: _writable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(v) for v in value]
    return value


def _numbers(value: object) -> Any:
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value


# TOML.


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file.

    >>> _ = Path("a.toml").write_text("steps = 3")
    >>> read_toml(Path("a.toml"))
    {'steps': 3}

    Raises:
        DataError: the file cannot be read.
        InvalidValueError: the file is not TOML.
    """
    try:
        return tomllib.loads(read_file(path, DataError).decode("utf-8"))
    # TOMLDecodeError and UnicodeDecodeError are ValueErrors too.
    except (ValueError, RecursionError) as failure:
        raise InvalidValueError(
            f"{path} is not valid TOML: {failure}; correct or restore the file"
        ) from failure


# heads.f32 and eval_heads.f32 are append-only float32 files with one fixed-size record per logged step.


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Per-head values of a run: `values[name]` is [n layers heads]; `layers` are the names of the layers, if known.

    >>> heads = Heads(np.array([0, 5]), {"max_logit": np.ones((2, 1, 4))}, ("attn",))
    >>> heads.values["max_logit"].shape  # records, layers, heads
    (2, 1, 4)
    """

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
        self._shape = n_layers, n_heads
        about: JSONObject = {"fields": list(fields), "n_layers": n_layers}
        about |= {"n_heads": n_heads, "dtype": "<f4", "leading": "step"}
        about["layers"] = list(layers)
        description = directory / f"{name}.json"
        if description.exists():
            # A run goes on with the fields with which it began, also if it was begun by an older version.
            fields = tuple(read_object(description, "fields")["fields"])
        else:
            write_json(description, about)
        self._fields = fields

    def append(self, step: int, heads: Mapping[str, np.ndarray]) -> None:
        """Appends one record: field -> [n_layers heads] with at most n_heads; what is missing is NaN. Other fields are
        left out."""
        n_layers, n_heads = self._shape
        record = np.full((len(self._fields), *self._shape), np.nan, "<f4")
        for block, name in zip(record, self._fields):
            values = heads.get(name)
            if values is None:
                continue
            if len(values) != n_layers or values.shape[1] > n_heads:
                raise ShapeError(
                    f"expected {name} of shape {self._shape}, got {values.shape}"
                )
            block[:, : values.shape[1]] = values
        # In one write, so that a kill loses no more than this record.
        disk.append(
            self.path, np.float32(step).astype("<f4").tobytes() + record.tobytes()
        )


def read_heads(directory: Path, name: str = "heads") -> Heads:
    """Reads heads.json and heads.f32. An incomplete last record is dropped; without heads.json, there are no records.

    >>> HeadRecorder(Path("."), ("entropy",), 1, 2).append(5, {"entropy": np.ones((1, 2))})
    >>> read_heads(Path(".")).steps
    array([5])

    Args:
        directory: the folder of the files.
        name: "heads" or "eval_heads".

    Raises:
        DamagedFileError: heads.json is not complete.
    """
    description, path = directory / f"{name}.json", directory / f"{name}.f32"
    if not description.exists():
        return Heads(np.zeros(0, np.int64), {})
    about = read_object(description, "fields", "n_layers", "n_heads")
    content = read_file(path) if path.exists() else b""
    shape = len(about["fields"]), about["n_layers"], about["n_heads"]
    width = 1 + math.prod(shape)
    # a torn record at the end is left out.
    n = len(content) // (4 * width)
    rows = np.frombuffer(content, dtype="<f4", count=n * width).reshape(n, width)
    body = rows[:, 1:].reshape(n, *shape)
    values = {field: body[:, i] for i, field in enumerate(about["fields"])}
    layers = tuple(about.get("layers") or ())
    return Heads(rows[:, 0].astype(np.int64), values, layers)


def common_steps(
    lines: Sequence[Mapping[str, Any]], heads: Heads
) -> tuple[list[Mapping[str, Any]], Heads]:
    """Restricts lines of metrics and values of heads to the steps that both have, the values in float64.

    A kill between the two writes leaves a line without its heads. Without any heads, all lines are returned.

    >>> heads = Heads(np.array([0, 5]), {"max_logit": np.ones((2, 1, 4))})
    >>> common_steps([{"step": 5}, {"step": 10}], heads)[0]
    [{'step': 5}]
    """
    if not heads.values:
        return [*lines], heads
    row_of = {int(step): row for row, step in enumerate(heads.steps)}
    lines = [line for line in lines if int(line["step"]) in row_of]
    rows = [row_of[int(line["step"])] for line in lines]
    values = {name: x[rows].astype(np.float64) for name, x in heads.values.items()}
    return lines, Heads(heads.steps[rows], values, heads.layers)


def _mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean of [... heads] over the measured heads."""
    counted = ~np.isnan(values)
    n = counted.sum(-1)
    return np.where(n, np.where(counted, values, 0).sum(-1) / np.maximum(n, 1), np.nan)


def _largest(values: np.ndarray) -> np.ndarray:
    # `fmax` ignores NaN, so this is NaN only where no head was measured, and numpy does not warn of it as `nanmax`
    # does.
    return np.fmax.reduce(values, axis=-1, initial=np.nan)


def _smallest(values: np.ndarray) -> np.ndarray:
    return np.fmin.reduce(values, axis=-1, initial=np.nan)


_FOLDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "max": _largest,
    "min": _smallest,
    "mean": _mean,
}


def fold_heads(name: str, values: np.ndarray) -> np.ndarray:
    """Summarises the last dimension, heads or blocks, as specified in the tables of fields; NaN means not measured.

    >>> float(fold_heads("max_logit", np.array([1.0, np.nan, 3.0])))
    3.0
    """
    field = head_field(name)
    return _FOLDS["mean" if field is None else field.fold](values)


def layer_values(
    name: str,
    layers: Sequence[str],
    values: Mapping[str, Any],
    heads: Mapping[str, np.ndarray],
) -> np.ndarray | None:
    """Returns [... layers]: a head field summarised over heads, or a value that each layer has under its own name.

    None if it was not recorded.

    >>> layer_values("block_output_rms", ["a", "b"], {"block_output_rms/b": 2.0}, {})
    array([nan,  2.])
    """
    if not of_layers(name):
        of_heads = heads.get(name)
        return None if of_heads is None else fold_heads(name, of_heads)
    columns = [values.get(f"{name}/{layer}") for layer in layers]
    recorded = [np.shape(column) for column in columns if column is not None]
    if not recorded:
        return None
    missing = np.full(recorded[0], np.nan)
    return np.stack([missing if x is None else x for x in columns], axis=-1)
