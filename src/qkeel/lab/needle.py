"""A value hidden in a text and asked for at its end: what a model retrieves, apart from what it foretells."""

from __future__ import annotations

import numpy as np

from qkeel.errors import DataError

MARK = 0xFF  # asks; no UTF-8 text has this byte
VALUES = np.arange(0xF5, 0xFF)  # nor these
SHORTEST = 8
_ASKED = 2  # more questions in a text of training, so that more is learned from it


def check_needle(loss_unit: str, vocab_size: int, context: int) -> None:
    """Raise unless needles fit: bytes of text, and a context long enough."""
    if loss_unit != "byte" or vocab_size <= MARK:
        raise DataError("needles are bytes that no UTF-8 text has; give text as data source, not tokens, or needle 0")
    if context < SHORTEST:
        raise DataError(f"a needle needs a context of at least {SHORTEST} bytes, got {context}; or set needle 0")


def hide(windows: np.ndarray, depth: float | None, rng: np.random.Generator) -> np.ndarray:
    """The windows [n, context + 1], each with one of ten values over a byte, and the question for it as last bytes.

    To ask is to write the mark; the value is what comes next, the last byte of the window. Chance is 0.1.

    Args:
        depth: where the value stands, from 0 (the beginning) to 1 (right before the question); None, for training,
            draws a place for each window, and asks at places behind it too.
    """
    hidden = windows.copy()
    end = windows.shape[1] - 2  # of the text; then come mark and value
    for text in hidden:
        value = rng.choice(VALUES)
        if depth is None:
            place, *asked = np.sort(rng.choice(end // 2, 1 + _ASKED, replace=False)) * 2
        else:
            place, asked = round(depth * (end - 1)), []
        text[place] = value
        for at in (*asked, end):
            text[at : at + 2] = MARK, value
    return hidden
