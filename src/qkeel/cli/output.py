"""What standard output can take: any encoding, a closed stream, and no sequences that a terminal obeys."""

from __future__ import annotations

import io
import os
import sys
import unicodedata


def open_output() -> None:
    """Makes output that cannot hold a character show its code instead, and output that is closed take anything.

    Encodings other than UTF-8 are common on Windows, and in pipes of a Latin-1 locale.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def printable(text: str) -> str:
    r"""Returns text in which control characters and marks of direction are escaped, as names in a stranger's checkpoint
    may hold sequences that a terminal obeys.

    >>> print(printable("a" + chr(27) + "[2J"))
    a\x1b[2J
    """
    characters = []
    for character in text:
        is_harmless = (
            unicodedata.category(character) not in ("Cc", "Cf", "Cs")
            or character in "\n\t"
        )
        characters.append(
            character
            if is_harmless
            else character.encode("unicode_escape", "surrogatepass").decode()
        )
    return "".join(characters)
