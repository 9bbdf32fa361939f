"""The one parser of safetensors headers: each field of its type, tensors without overlap or holes up to the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import final

from qkeel.errors import DataError, QkeelError, reported
from qkeel.records.regular_files import refuse_irregular
from qkeel.records.strict_json import json_value

MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_MOST_DIMENSIONS = 64
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}

# The format's names of types by the bits of an element (safetensors 0.8).
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
    """A tensor's line of the header; `begin` and `end` (exclusive) are bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The tensors of a file by name, in the order they lie in, and the text that was stored with them."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_header(path: Path, error: type[QkeelError] = DataError) -> Header:
    """The header of a safetensors file, every value checked.

    >>> _ = Path("a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    >>> read_header(Path("a.safetensors"))
    Header(tensors={}, metadata={})

    Raises: `error` for a file that is missing, not regular, truncated or longer than its tensors; for a header that is
        no strict JSON, a field of another type, an unknown dtype, a size that is not that of the shape, tensors that
        overlap or leave a hole.
    """
    size = refuse_irregular(path, error)
    if size is None:
        raise error(f"{path} is missing; name a .safetensors file that exists")
    with reported(f"cannot read {path}", error=error), open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        whole = size >= 8 and length <= MOST_HEADER_BYTES
        if not whole or length > size - 8:
            raise error(_torn(path, size, 8 + length if whole else None))
        text = file.read(length)
    return parse_header(text, path, size, error)


def parse_header(text: bytes, path: Path, size: int, error: type[QkeelError] = DataError) -> Header:
    """The header whose JSON is `text`, of a file of `size` bytes; see `read_header`.

    >>> parse_header(b'{"__metadata__": {"format": "pt"}}', Path("a.safetensors"), 42).metadata
    {'format': 'pt'}
    """
    try:
        table = json_value(text)
        entries = _entries(table, 8 + len(text))
    except ValueError as failure:
        raise error(
            f"{path} has no readable safetensors header: {failure}. It is damaged or of another format; download or "
            "save it again"
        ) from failure
    end = max([8 + len(text), *(entry.end for entry in entries.values())])
    if end > size:
        raise error(_torn(path, size, end))
    if end < size:
        raise error(f"{path} holds {size - end:,} bytes after its last tensor; its header and data do not fit together")
    return Header(tensors=entries, metadata=table.get(_METADATA, {}))


def _torn(path: Path, size: int, wanted: int | None) -> str:
    if wanted is None:
        return f"{path} ({size:,} bytes) is not a safetensors file, or its beginning is damaged; download it again"
    return f"{path} is truncated: its header asks for {wanted:,} bytes, it has {size:,}; download or save it again"


def _entries(table: object, data: int) -> dict[str, TensorEntry]:
    if not isinstance(table, dict):
        raise ValueError(f"expected an object of tensors, got {type(table).__name__}")
    metadata = table.get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"expected text by name as {_METADATA}, got {str(metadata)[:80]}")
    found = {name: _entry(name, entry, data) for name, entry in table.items() if name != _METADATA}
    ordered = dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)))
    place, before = data, "the header"
    for name, entry in ordered.items():
        if entry.begin != place:
            kind = "overlaps" if entry.begin < place else "leaves a hole after"
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
        raise ValueError(f"expected at most {_MOST_DIMENSIONS} sizes as shape of {what}, got {str(shape)[:80]}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"expected first and last byte as data_offsets of {what}, got {str(offsets)[:80]}")
    begin, end = offsets
    if math.prod(shape) * BITS[dtype] != 8 * (end - begin):
        raise ValueError(f"{what} has {end - begin:,} bytes, which is not what {dtype} of shape {shape} takes")
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=data + begin, end=data + end)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
