"""Strict readers for JSON, TOML and safetensors headers, each with one error class and the location in its message."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from qkeel.errors import DataError, InvalidValueError, QkeelError, RunDirectoryError, reported
from qkeel.records.disk import read_regular, refuse_irregular

# Limits on values, so that a hostile or damaged file cannot exhaust memory or the stack.

MOST_DEPTH = 64  # nesting of tables and lists
LEAST_INTEGER, MOST_INTEGER = -(1 << 63), (1 << 64) - 1
_MOST_DIGITS = 20  # digits of MOST_INTEGER; int() of longer text takes quadratic time


def read_integer(digits: str) -> int:
    """Parses an integer between -2⁶³ and 2⁶⁴ - 1, the range that JSON readers support.

    >>> read_integer("12")
    12
    """
    if len(digits) > _MOST_DIGITS or not LEAST_INTEGER <= (number := int(digits)) <= MOST_INTEGER:
        raise ValueError(f"expected a whole number of at most 64 bits, got a number with {len(digits)} digits")
    return number


def read_float(digits: str) -> float:
    """Parses a number that float64 can represent; a finite number that overflows to infinity is an error.

    >>> read_float("1.5")
    1.5
    """
    number = float(digits)
    if math.isinf(number) and "inf" not in digits.lower():
        raise ValueError(f"expected a number with a magnitude below 1.8e308, got {digits[:40]}")
    return number


def refuse_strange(value: object, depth: int = 0) -> None:
    """Raises ValueError for values that are nested too deeply, integers beyond 64 bits and text that is not Unicode."""
    if depth >= MOST_DEPTH and isinstance(value, (dict, list)):
        raise ValueError(f"expected tables and lists nested at most {MOST_DEPTH} deep")
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise ValueError(f"expected Unicode text, got half of a surrogate pair in {value[:40]!r}")
    elif isinstance(value, int):
        if not LEAST_INTEGER <= value <= MOST_INTEGER:
            raise ValueError("expected a whole number of at most 64 bits, got a larger number")
    elif isinstance(value, dict):
        for key, inner in value.items():
            refuse_strange(key, depth + 1)
            refuse_strange(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            refuse_strange(inner, depth + 1)


# JSON: UTF-8, no duplicate names, bounded numbers and nesting.


def parse_json(text: bytes | str, where: str, error: type[QkeelError] = RunDirectoryError) -> Any:
    """Parses a JSON text; `where` is its location in error messages. NaN and Infinity are read as Python writes them.

    >>> parse_json(b'{"loss": 1.5}', "a.json")
    {'loss': 1.5}
    >>> parse_json("[1, 2", "a.json")
    Traceback (most recent call last):
    qkeel.errors.RunDirectoryError: a.json is not complete JSON (line 1, column 6: Expecting ',' delimiter). It is ...

    Raises:
        QkeelError: the text is incomplete, repeats a name within an object, is nested more than 64 levels deep, or
            contains a number beyond 64 bits or text that is not Unicode. The class is `error`.
    """
    with complete_json(where, error):
        return json_value(text)


@contextlib.contextmanager
def complete_json(where: object, error: type[QkeelError]) -> Iterator[None]:
    """Turns a ValueError from parsing JSON into an error of class `error` that names the location of the text.

    >>> with complete_json("a.json", RunDirectoryError):
    ...     json_value("[1, 2")
    Traceback (most recent call last):
    qkeel.errors.RunDirectoryError: a.json is not complete JSON (line 1, column 6: Expecting ',' delimiter). It is ...
    """
    try:
        yield
    except ValueError as failure:
        raise error(
            f"{where} is not complete JSON ({failure}). It is damaged or has a different format; "
            "restore it or create it again."
        ) from failure


def json_value(text: bytes | str) -> Any:
    """Parses a JSON text like `parse_json`, but raises ValueError with only the reason as its message.

    >>> json_value("[1, 1e999]")
    Traceback (most recent call last):
    ValueError: expected a number with a magnitude below 1.8e308, got 1e999

    Raises:
        ValueError: the text is not valid.
    """
    try:
        value = json.loads(
            text if isinstance(text, str) else text.decode("utf-8"),
            object_pairs_hook=_table,
            parse_int=read_integer,
            parse_float=read_float,
        )
    except json.JSONDecodeError as failure:
        raise ValueError(f"line {failure.lineno}, column {failure.colno}: {failure.msg}") from failure
    except RecursionError as failure:
        raise ValueError("its tables and lists are nested too deeply") from failure
    refuse_strange(value)
    return value


def read_json_file(path: Path, error: type[QkeelError] = RunDirectoryError) -> Any:
    """Parses a JSON file; see `parse_json`.

    >>> _ = Path("a.json").write_text('{"step": 1}')
    >>> read_json_file(Path("a.json"))
    {'step': 1}
    """
    return parse_json(read_regular(path, error), str(path), error)


def _table(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the name {twice[:40]!r} appears twice in one object")
    return table


# TOML: the reader, and a writer for single values that the reader reproduces exactly.


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file.

    >>> _ = Path("a.toml").write_text("steps = 3")
    >>> read_toml(Path("a.toml"))
    {'steps': 3}

    Raises:
        DataError: the file cannot be read.
        InvalidValueError: the file is not TOML, is nested more than 64 levels deep, or contains a number beyond 64
            bits.
    """
    text = read_regular(path, DataError)
    try:
        value = tomllib.loads(text.decode("utf-8"), parse_float=read_float)
        refuse_strange(value)
        return value
    except RecursionError:
        reason = "its tables and lists are nested too deeply"
    except ValueError as failure:  # includes TOMLDecodeError and UnicodeDecodeError
        reason = str(failure)
    raise InvalidValueError(f"{path} is not valid TOML: {reason}; correct or restore the file")


def toml_line(name: str, value: bool | int | float | str) -> str:
    r"""Formats one line of a table, with an unquoted name and its value.

    >>> toml_line("source", 'a"b\n')
    'source = "a\\"b\\n"'

    Raises:
        InvalidValueError: the text is not Unicode, which TOML cannot represent.
    """
    if isinstance(value, bool):
        return f"{name} = {str(value).lower()}"
    if not isinstance(value, str):
        return f"{name} = {value!r}"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as failure:
        raise InvalidValueError(
            f"expected {name} as Unicode text, got {value!r}; TOML cannot represent it"
        ) from failure
    # JSON escapes strings as TOML does, except for DEL, which JSON leaves unescaped.
    return f"{name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007F")


# safetensors headers: every field is type-checked, and tensors must fill the file without overlaps or gaps.

MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_MOST_DIMENSIONS = 64
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}

# The dtype names of the format, by bits per element (safetensors 0.8).
_TYPES: dict[int, tuple[str, ...]] = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    16: ("I16", "U16", "F16", "BF16"),
    32: ("I32", "U32", "F32"),
    64: ("C64", "F64", "I64", "U64"),
}
BITS: dict[str, int] = {name: bits for bits, names in _TYPES.items() for name in names}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of the header; `begin` and `end` (exclusive) are byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The tensors of a file by name, in file order, and the metadata stored with them."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_header(path: Path, error: type[QkeelError] = DataError) -> Header:
    """Reads and checks the header of a safetensors file.

    >>> _ = Path("a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    >>> read_header(Path("a.safetensors"))
    Header(tensors={}, metadata={})

    Raises:
        QkeelError: the file is missing, not regular, truncated or longer than its tensors, the header is not strict
            JSON, a field has the wrong type, a dtype is unknown, a size does not match its shape, or tensors overlap or
            leave a gap. The class is `error`.
    """
    size = refuse_irregular(path, error)
    if size is None:
        raise error(f"{path} is missing; give the path of an existing .safetensors file")
    with reported(f"cannot read {path}", error=error), open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        whole = size >= 8 and length <= MOST_HEADER_BYTES
        if not whole or length > size - 8:
            raise error(_torn(path, size, 8 + length if whole else None))
        text = file.read(length)
    return parse_header(text, path, size, error)


def parse_header(text: bytes, path: Path, size: int, error: type[QkeelError] = DataError) -> Header:
    """Parses a header with the JSON `text`, from a file of `size` bytes; see `read_header`.

    >>> parse_header(b'{"__metadata__": {"format": "pt"}}', Path("a.safetensors"), 42).metadata
    {'format': 'pt'}
    """
    try:
        table = json_value(text)
        entries = _entries(table, 8 + len(text))
    except ValueError as failure:
        raise error(
            f"{path} has no readable safetensors header: {failure}. It is damaged or in a different format; download "
            "or save it again"
        ) from failure
    end = max([8 + len(text), *(entry.end for entry in entries.values())])
    if end > size:
        raise error(_torn(path, size, end))
    if end < size:
        raise error(f"{path} has {size - end:,} bytes after its last tensor, so its header and data do not match")
    return Header(tensors=entries, metadata=table.get(_METADATA, {}))


def _torn(path: Path, size: int, wanted: int | None) -> str:
    if wanted is None:
        return f"{path} ({size:,} bytes) is not a safetensors file, or its beginning is damaged; download it again"
    return f"{path} is truncated: its header requires {wanted:,} bytes, but it has {size:,}; download or save it again"


def _entries(table: object, data: int) -> dict[str, TensorEntry]:
    if not isinstance(table, dict):
        raise ValueError(f"expected an object of tensors, got {type(table).__name__}")
    metadata = table.get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"expected {_METADATA} to map names to text, got {str(metadata)[:80]}")
    found = {name: _entry(name, entry, data) for name, entry in table.items() if name != _METADATA}
    ordered = dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)))
    place, before = data, "the header"
    for name, entry in ordered.items():
        if entry.begin != place:
            kind = "overlaps" if entry.begin < place else "leaves a gap after"
            raise ValueError(
                f"{name[:80]!r} begins at byte {entry.begin:,} and {kind} {before}, which ends at {place:,}"
            )
        place, before = entry.end, repr(name[:80])
    return ordered


def _entry(name: str, entry: object, data: int) -> TensorEntry:
    what = repr(name[:80])
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise ValueError(f"expected dtype, shape and data_offsets of {what}, got {str(entry)[:80]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"expected a dtype of {', '.join(BITS)} for {what}, got {str(dtype)[:80]}")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(
            f"expected at most {_MOST_DIMENSIONS} whole numbers of at least 0 as the shape of {what}, got "
            f"{str(shape)[:80]}"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"expected data_offsets of {what} to be a begin and an end, got {str(offsets)[:80]}")
    begin, end = offsets
    if math.prod(shape) * BITS[dtype] != 8 * (end - begin):
        raise ValueError(f"{what} has {end - begin:,} bytes, which does not match {dtype} with shape {shape}")
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=data + begin, end=data + end)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
