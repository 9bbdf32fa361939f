"""The checksum of a JSON text: its last field, crc32, over the text with the checksum's own eight digits set to 0."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping

FIELD = "crc32"
_BLANK = "00000000"
_END = re.compile(rb'"crc32": "([0-9a-f]{8})"(\n?\}\n)\Z')
_LONGEST = len('"crc32": "00000000"\n}\n')


def seal(value: Mapping[str, object], indent: int | None = None) -> bytes:
    r"""The JSON text of an object and a newline, with the checksum as the last field.

    >>> seal({"step": 3})
    b'{"step": 3, "crc32": "36644f0c"}\n'
    """
    fields = {name: own for name, own in value.items() if name != FIELD}
    text = json.dumps({**fields, FIELD: _BLANK}, indent=indent, allow_nan=False).encode() + b"\n"
    at = text.rindex(_BLANK.encode())
    return b"%b%08x%b" % (text[:at], zlib.crc32(text), text[at + len(_BLANK) :])


def is_sealed(text: bytes) -> bool:
    """Returns whether the text ends with a checksum, right or wrong.

    >>> is_sealed(seal({"step": 3})), is_sealed(b'{"step": 3}')
    (True, False)
    """
    return _END.search(text[-_LONGEST:]) is not None


def check_seal(text: bytes, needed: bool = False) -> bool:
    """Returns whether the text ends with its checksum; one without is taken as it is unless a checksum is `needed`.

    >>> check_seal(seal({"step": 3})), check_seal(b'{"step": 3}')
    (True, False)

    Raises: ValueError for a text that does not fit its checksum, or lacks a checksum that is needed.
    """
    found = _END.search(text[-_LONGEST:])
    if found is None:
        if needed:
            raise ValueError("it has no checksum, which all lines and files here have")
        return False
    end = len(text) - len(found[2]) - 1
    start = end - len(_BLANK)
    if b"%08x" % zlib.crc32(text[end:], zlib.crc32(_BLANK.encode(), zlib.crc32(text[:start]))) != found[1]:
        raise ValueError("it does not fit its checksum")
    return True
