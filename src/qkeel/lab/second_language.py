"""A synthetic second language: the words of each clause in reverse order, with their letters substituted.

The translation is a function of the text alone, so every corpus yields any number of pairs. The substitution depends on
the word and the word's position depends on the clause, so neither a letter table nor copying solves the task.
"""

from __future__ import annotations

import re

# Ends at punctuation, a digit or the end of a line.
CLAUSE = re.compile(rb"[A-Za-z \t]+")
WORD = re.compile(rb"[A-Za-z]+")
_SETS = (b"aeiou", b"bcdfghjklmnpqrstvwxyz")


def _table(steps: int) -> bytes:
    """Returns a byte table that shifts each vowel within the vowels, and each consonant within the consonants, by
    `steps`."""
    lower = {
        a: letters[(i + steps) % len(letters)]
        for letters in _SETS
        for i, a in enumerate(letters)
    }
    # In ASCII a capital stands 32 before its small letter.
    upper = {a - 32: b - 32 for a, b in lower.items()}
    return bytes({**lower, **upper}.get(byte, byte) for byte in range(256))


# For words with an odd and an even number of letters.
_ODD, _EVEN = _table(1), _table(3)


def translated(text: bytes) -> bytes:
    """Translates a text into the second language; its length does not change.

    Vowels are replaced by vowels and consonants by consonants, with one table for words with an odd number of letters
    and another table for all other words. Spaces and tabs keep their order, and punctuation, digits, line ends and
    non-ASCII bytes keep their positions.

    >>> translated(b"The cat sat. Two dogs!")
    b'tev dev Vji. hekw Vxu!'
    """
    return CLAUSE.sub(lambda clause: _clause(clause.group()), text)


def _clause(clause: bytes) -> bytes:
    words = [
        word.translate(_ODD if len(word) % 2 else _EVEN)
        for word in WORD.findall(clause)
    ]
    gaps = WORD.split(clause)
    pieces = [gaps[0]]
    for word, gap in zip(reversed(words), gaps[1:], strict=True):
        pieces += [word, gap]
    return b"".join(pieces)
