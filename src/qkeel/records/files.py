"""Files of JSON: a document or lines, each with its checksum; a torn tail is dropped on read, damage is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qkeel.errors import DamagedFileError, reported
from qkeel.records import disk
from qkeel.records.checksums import FIELD, check_seal, is_sealed, seal
from qkeel.records.regular_files import MOST_BYTES, read_regular, refuse_irregular
from qkeel.records.strict_json import json_value

JSONObject = dict[str, Any]  # as a file gives it: what its values are, its reader knows


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, see `write_bytes`.

    >>> write_text(Path("a.txt"), "whole")
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes | bytearray) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it; see `disk.replace_file`.

    >>> write_bytes(Path("a.bin"), b"whole")
    """
    disk.replace_file(path, data)


def write_json(path: Path, value: Mapping[str, object], sealed: bool = True) -> None:
    """Write a JSON object atomically, with its checksum as last field (`sealed`). NaN and infinity become strings, so
    that any JSON reader can read the file.

    >>> write_json(Path("b.json"), {"loss": math.nan})
    """
    plain = _plain(value)
    write_bytes(path, seal(plain, 2) if sealed else json.dumps(plain, indent=2, allow_nan=False).encode() + b"\n")


def append_line(path: Path, value: Mapping[str, object]) -> None:
    """Append one JSON line with its checksum and hand it to the operating system at once.

    >>> append_line(Path("a.jsonl"), {"step": 1})
    """
    disk.append(path, seal(_plain(value)))


def read_json(path: Path, sealed: bool = False) -> Any:
    """Reads a JSON file; numbers written as 'nan' or 'inf' stay floats, the checksum is left out.

    >>> write_json(Path("a.json"), {"loss": math.inf})
    >>> read_json(Path("a.json"))
    {'loss': inf}

    Raises: DamagedFileError for what is no JSON, does not fit its checksum, or, if `sealed`, has none.
    """
    if refuse_irregular(path) is None:
        raise DamagedFileError(f"{path} is missing; expected a file that can be read. Restore it.")
    try:
        return _value(read_regular(path), sealed)
    except ValueError as failure:
        raise DamagedFileError(
            f"{path} is not whole JSON ({failure}). It was damaged or is of another kind: restore it or make it again."
        ) from failure


def read_lines(path: Path, sealed: bool = False, sure: int = 0) -> Iterator[JSONObject]:
    """Yield the lines of a .jsonl file without their checksums; a torn last line is dropped, any other is an error.

    >>> write_text(Path("b.jsonl"), '{"step": 1}\\n{"st')
    >>> list(read_lines(Path("b.jsonl")))
    [{'step': 1}]

    Args:
        path: the file; one that is missing has no lines.
        sealed: whether every line must have a checksum; else those before the first that has one need not.
        sure: bytes that are known to have been written; what begins among them is not torn but damaged.

    Raises: DamagedFileError, with the number of the line.
    """
    if refuse_irregular(path) is None:
        return
    begin, damage = 0, None
    for number, (end, value) in enumerate(_scan(path, sealed), start=1):
        if damage is not None:
            raise damage
        if isinstance(value, ValueError):
            damage = _damage(path, number, value)
            if begin < sure:
                raise damage
        else:
            yield value
        begin = end


def whole_bytes(path: Path, keep: Callable[[JSONObject], bool], sealed: bool = False) -> int:
    """The bytes of a .jsonl file before the first line that is not sound or not to be kept."""
    begin = 0
    for end, value in _scan(path, sealed):
        if isinstance(value, ValueError) or not keep(value):
            break
        begin = end
    return begin


def _scan(path: Path, sealed: bool) -> Iterator[tuple[int, Any]]:
    """For each line the byte after it, and its value or the ValueError that it gave."""
    end = 0
    with reported(f"cannot read {path}"), open(path, "rb") as file:
        while line := file.readline(MOST_BYTES):
            end += len(line)
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("it does not end")
                value = _value(line, sealed)
                sealed = sealed or is_sealed(line)
            except ValueError as failure:
                value = failure
            yield end, value


def _damage(path: Path, number: int, why: ValueError) -> DamagedFileError:
    return DamagedFileError(f"{path}, line {number} is not whole JSON: the file was damaged ({why})")


def _value(text: bytes, sealed: bool) -> Any:
    """The value of a JSON text without its checksum, or ValueError."""
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
        return value.encode("utf-8", "replace").decode("utf-8")  # names of files may hold what is no Unicode
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
