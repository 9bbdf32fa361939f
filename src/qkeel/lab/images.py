"""Handwritten digits as images.

Shapes: [n height width].
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import lzma
from importlib.resources import files

import numpy as np

from qkeel.lab.config import IMAGE_SIZE
from qkeel.lab.text import HELD_OUT

WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Digits:
    """Scanned digits: pixels [n 8 8] float32 in [0, 1] and labels [n], which are indices into WORDS.

    `held` [n] marks the held-out images, which are chosen by content so that copies of an image are on one side.
    `sha256` covers all of it.
    """

    pixels: np.ndarray
    labels: np.ndarray
    held: np.ndarray
    sha256: str


@functools.cache
def load_digits() -> Digits:
    """Loads the 1,797 digits that come with qkeel.

    >>> load_digits().pixels.shape
    (1797, 8, 8)
    """
    file = files("qkeel.lab").joinpath("pictures", "digits.xz")
    stored = np.frombuffer(lzma.decompress(file.read_bytes()), np.uint8)
    # A row is one digit: 8 × 8 grey values from 0 to 16, then the digit itself. Stored by column, which takes less.
    rows = stored.reshape(65, -1).T.astype(np.float32, order="C")
    pixels, labels = (
        (rows[:, :64] / 16).reshape(-1, IMAGE_SIZE, IMAGE_SIZE),
        rows[:, 64].astype(int),
    )
    held = _held_out(pixels, labels)
    captions = [WORDS[label] for label in labels]
    digest = hashlib.sha256(json.dumps([captions, list(WORDS)]).encode())
    for array in (pixels, labels, held):
        digest.update(np.ascontiguousarray(array).tobytes())
    return Digits(pixels=pixels, labels=labels, held=held, sha256=digest.hexdigest())


def _held_out(pixels: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Holds out a tenth of each digit, chosen by the order of the images' hashes."""
    digests = np.array(
        [hashlib.sha256(image.tobytes()).hexdigest() for image in pixels]
    )
    held: list[str] = []
    for label in range(len(WORDS)):
        of_digit = np.unique(digests[labels == label])
        held.extend(of_digit[: round(HELD_OUT * len(of_digit))])
    return np.isin(digests, held)


def patches(pixels: np.ndarray, size: int) -> np.ndarray:
    """Cuts images into square patches, row by row: [n rows columns size²].

    >>> patches(np.arange(16.0).reshape(1, 4, 4), 2)[0, 0].tolist()
    [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]
    """
    n, height, width = pixels.shape
    rows, columns = height // size, width // size
    cut = pixels.reshape(n, rows, size, columns, size).swapaxes(2, 3)
    return cut.reshape(n, rows, columns, -1)
