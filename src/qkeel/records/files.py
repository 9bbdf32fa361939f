"""Files that are whole or absent: atomic writes, append-only lines, torn tails dropped on read."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qkeel.errors import RunDirectoryError
from qkeel.records.regular_files import MOST_BYTES, refuse_irregular
from qkeel.records.strict_json import json_value, read_json_file

_PART = ".part"
JSONObject = dict[str, Any]  # as a file gives it: what its values are, its reader knows


def remove_leftovers(directory: Path) -> None:
    """Removes the unfinished files of a killed process; only for the process that holds the directory."""
    for path in directory.glob(f".*{_PART}"):
        path.unlink(missing_ok=True)


def make_directory(path: Path, parents: bool = True) -> None:
    """Makes a directory unless it is there; without `parents` only inside one that is there."""
    try:
        path.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot make {path}: {_reason(path, error)}. Expected a writable place; choose another directory."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, see `write_bytes`.

    >>> write_text(Path("a.txt"), "whole")
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it.

    Its directory must be there: one that was moved away while a run went on is not made a second time.

    >>> write_bytes(Path("a.bin"), b"whole")
    """
    try:
        refuse_irregular(path)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_PART)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(
            f"cannot write {path}: {_reason(path, error)}. Expected a writable place with free space; "
            "nothing that was there is changed. Free some space or choose another directory."
        ) from error


def _reason(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"the directory {path.parent} is not there (any more)"
    return error.strerror or str(error)


def write_json(path: Path, value: object) -> None:
    """Write JSON atomically. NaN and infinity become strings, so that any JSON reader can read the file.

    >>> write_json(Path("b.json"), {"loss": math.nan})
    """
    write_text(path, json.dumps(_plain(value), indent=2, allow_nan=False) + "\n")


def append_line(path: Path, value: Mapping[str, object]) -> None:
    """Append one JSON line and hand it to the operating system at once.

    >>> append_line(Path("a.jsonl"), {"step": 1})
    """
    refuse_irregular(path)
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json_line(value))
    except OSError as error:
        raise RunDirectoryError(
            f"cannot append to {path}: {_reason(path, error)}. What was written before is kept; "
            "free some space or choose another directory, then run the same command again to go on."
        ) from error


def json_line(value: Mapping[str, object]) -> str:
    """One line of a .jsonl file, newline included."""
    return json.dumps(_plain(value), allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """Reads a JSON file; numbers written as 'nan' or 'inf' stay floats.

    >>> write_json(Path("a.json"), {"loss": math.inf})
    >>> read_json(Path("a.json"))
    {'loss': inf}
    """
    return _numbers(read_json_file(path))


def read_lines(path: Path) -> Iterator[JSONObject]:
    """Yield the whole lines of a .jsonl file; a torn last line is dropped, a torn line before it is an error.

    >>> write_text(Path("b.jsonl"), '{"step": 1}\\n{"st')
    >>> list(read_lines(Path("b.jsonl")))
    [{'step': 1}]
    """
    if refuse_irregular(path) is None:
        return
    try:
        with open(path, "rb") as file:
            number, line = 1, file.readline(MOST_BYTES)
            while line.endswith(b"\n"):  # what follows the last newline is torn or empty
                after = file.readline(MOST_BYTES)
                try:
                    yield _numbers(json_value(line))
                except ValueError as error:
                    if not after:
                        return
                    raise RunDirectoryError(
                        f"{path}, line {number} is not whole JSON: the file was damaged ({error})"
                    ) from error
                number, line = number + 1, after
            if len(line) == MOST_BYTES:
                raise RunDirectoryError(f"{path}, line {number} has more than {MOST_BYTES:,} bytes: it is damaged")
    except OSError as error:
        if isinstance(error, RunDirectoryError):
            raise
        raise RunDirectoryError(f"cannot read {path}: {error.strerror or error}") from error


_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _plain(value: object) -> object:
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
