"""Needles: tokens that hold a key and a value, inserted in text, and questions that name a key and want its value.

To answer one hop by content suffices: the token that asks for a key attends to the one needle with that key, whatever
its value. The other needles and the text are what the attention has to distinguish it from.
"""

from __future__ import annotations

import dataclasses
from typing import final

import numpy as np

from qkeel.errors import InvalidValueError

VALUES = 8
_TIMES = 3  # that a needle of a training text is asked for


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Needles:
    """Token ids behind the text's own: a needle for each key and value, a question for each key, and the values."""

    first: int
    """The vocabulary size of the text."""
    keys: int
    """Each is in a text once."""

    @property
    def vocab_size(self) -> int:
        """Of text, needles, questions and values."""
        return int(self.value(VALUES))

    def needle(self, key: np.ndarray | int, value: np.ndarray | int) -> np.ndarray | int:
        """The token that holds a value under a key."""
        return self.first + key * VALUES + value

    def question(self, key: np.ndarray | int) -> np.ndarray | int:
        """The token that asks for the value under a key."""
        return self.needle(self.keys, 0) + key

    def value(self, value: np.ndarray | int) -> np.ndarray | int:
        """The token that comes after a question."""
        return self.question(self.keys) + value

    def check(self, context: int) -> None:
        """Raises unless the needles of a training text and their questions fit into it."""
        least = 2 * self.keys * (1 + _TIMES) - 1
        if context < least:
            raise InvalidValueError(
                f"{self.keys} needles, each asked for {_TIMES} times, need a context of at least {least} tokens, got "
                f"{context}; give a longer context, fewer needle_keys, or needle 0"
            )


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Windows [n, context + 1] that end in questions, one for each needle, each with the value behind it.

    Needle i, counted from the beginning, stands at places[i] in all of them; questions[n, i] is where it is asked for.
    """

    windows: np.ndarray
    places: np.ndarray
    questions: np.ndarray


def insert_needles(windows: np.ndarray, needles: Needles, rng: np.random.Generator) -> np.ndarray:
    """Returns windows [n, context + 1] with needles over their text, each followed by several questions for it."""
    changed = windows.copy()
    for text in changed:
        drawn = rng.choice(windows.shape[1] // 2, (needles.keys, 1 + _TIMES), replace=False)
        values = rng.integers(VALUES, size=needles.keys)
        for key, (place, *asked) in enumerate(2 * np.sort(drawn, axis=1)):
            text[place] = needles.needle(key, values[key])
            for at in asked:
                text[at : at + 2] = needles.question(key), needles.value(values[key])
    return changed


def ask(windows: np.ndarray, needles: Needles, rng: np.random.Generator) -> Asked:
    """Returns windows [n, context + 1] with one needle for each key, spread evenly, and all questions at the end.

    Chance is 1/VALUES for a model that knows what an answer is.
    """
    asked, keys = windows.copy(), needles.keys
    end = windows.shape[1] - 2 * keys
    places = ((np.arange(keys) + 0.5) / keys * end).astype(np.int64)
    questions = np.empty((len(windows), keys), dtype=np.int64)
    for text, at in zip(asked, questions, strict=True):
        named, values = rng.permutation(keys), rng.integers(VALUES, size=keys)
        at[:] = end + 2 * rng.permutation(keys)
        text[places] = needles.needle(named, values)
        text[at], text[at + 1] = needles.question(named), needles.value(values)
    return Asked(asked, places, questions)
