"""The one parser of TOML, and its one writer of values: what is written is read back as it was."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from qkeel.errors import DataError, InvalidValueError
from qkeel.records.regular_files import read_regular
from qkeel.records.strict_values import read_float, refuse_strange


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    >>> _ = Path("a.toml").write_text("steps = 3")
    >>> read_toml(Path("a.toml"))
    {'steps': 3}

    Raises: DataError if it cannot be read; InvalidValueError if it is no TOML, is nested deeper than 64, or holds a
        number beyond 64 bits.
    """
    text = read_regular(path, DataError)
    try:
        value = tomllib.loads(text.decode("utf-8"), parse_float=read_float)
        refuse_strange(value)
        return value
    except RecursionError:
        reason = "its tables and lists are nested too deep"
    except ValueError as failure:  # TOMLDecodeError and UnicodeDecodeError too
        reason = str(failure)
    raise InvalidValueError(f"{path} is not TOML that can be read: {reason}; correct that place or restore the file")


def toml_line(name: str, value: bool | int | float | str) -> str:
    r"""One line of a table: a bare name and its value.

    >>> toml_line("source", 'a"b\n')
    'source = "a\\"b\\n"'

    Raises: InvalidValueError for text that is no Unicode, which TOML cannot hold.
    """
    if isinstance(value, bool):
        return f"{name} = {str(value).lower()}"
    if not isinstance(value, str):
        return f"{name} = {value!r}"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as failure:
        raise InvalidValueError(f"expected {name} as Unicode text, got {value!r}; TOML cannot hold it") from failure
    # JSON's escapes are those of TOML's basic strings, but for the one control character that JSON leaves as it is.
    return f"{name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007F")
