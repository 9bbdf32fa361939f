"""A second language made from a text: the words of a clause backwards, their letters exchanged, of the same length.

It is a function of the text alone, so a pair needs no human translator and any corpus gives as many as are wanted. But
what a word becomes depends on the word, and where it stands on its clause: neither a table of letters nor a copy
translates.
"""

from __future__ import annotations

import re

CLAUSE = re.compile(rb"[A-Za-z \t]+")  # up to a sign, a digit or the end of a line
WORD = re.compile(rb"[A-Za-z]+")
_SETS = (b"aeiou", b"bcdfghjklmnpqrstvwxyz")


def _table(steps: int) -> bytes:
    """A table of bytes in which each vowel and each consonant is the one so many steps on."""
    lower = {a: letters[(i + steps) % len(letters)] for letters in _SETS for i, a in enumerate(letters)}
    upper = {a - 32: b - 32 for a, b in lower.items()}
    return bytes({**lower, **upper}.get(byte, byte) for byte in range(256))


_ODD, _EVEN = _table(1), _table(3)  # two declensions, by the number of letters of a word


def translated(text: bytes) -> bytes:
    """Returns the text in the second language: the words of each clause backwards, their letters exchanged.

    Vowels become vowels and consonants consonants, by one table in words of an odd number of letters and by another in
    the rest. Spaces, signs, digits and what is not ASCII stay where they are; the length is the same.

    >>> translated(b"The cat sat. Two dogs!")
    b'tev dev Vji. hekw Vxu!'
    """
    return CLAUSE.sub(lambda clause: _clause(clause.group()), text)


def _clause(clause: bytes) -> bytes:
    words = [word.translate(_ODD if len(word) % 2 else _EVEN) for word in WORD.findall(clause)]
    gaps = WORD.split(clause)
    pieces = [gaps[0]]
    for word, gap in zip(reversed(words), gaps[1:], strict=True):
        pieces += [word, gap]
    return b"".join(pieces)
