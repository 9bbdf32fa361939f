"""The one parser of JSON: UTF-8, no name twice, numbers of bounded size, bounded nesting, one error for all else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qkeel.errors import QkeelError, RunDirectoryError
from qkeel.records.regular_files import read_regular
from qkeel.records.strict_values import read_float, read_integer, refuse_strange


def parse_json(text: bytes | str, where: str, error: type[QkeelError] = RunDirectoryError) -> Any:
    """The value of a JSON text; `where` names its place in the error. NaN and Infinity are read as Python writes them.

    >>> parse_json(b'{"loss": 1.5}', "a.json")
    {'loss': 1.5}
    >>> parse_json("[1, 2", "a.json")
    Traceback (most recent call last):
    qkeel.errors.RunDirectoryError: a.json is not whole JSON (line 1, column 6: Expecting ',' delimiter). It was ...

    Raises: `error` for a text that is torn, has a name twice, is nested deeper than 64, or holds a number beyond 64
        bits or text that is not Unicode.
    """
    try:
        return json_value(text)
    except ValueError as failure:
        raise error(
            f"{where} is not whole JSON ({failure}). It was damaged or is of another kind: restore it or make it again."
        ) from failure


def json_value(text: bytes | str) -> Any:
    """The value of a JSON text, as `parse_json` reads it.

    >>> json_value("[1, 1e999]")
    Traceback (most recent call last):
    ValueError: expected a number of magnitude below 1.8e308, got 1e999

    Raises: ValueError, whose text is the reason alone.
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
        raise ValueError("its tables and lists are nested too deep") from failure
    refuse_strange(value)
    return value


def read_json_file(path: Path, error: type[QkeelError] = RunDirectoryError) -> Any:
    """The value of a JSON file; see `parse_json`.

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
        raise ValueError(f"the name {twice[:40]!r} stands twice in one object")
    return table
