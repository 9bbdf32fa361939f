"""Image data: handwritten digits, and folders of classes.

Shapes: [n height width channels].
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import lzma
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from qkeel.errors import DataError, needed
from qkeel.lab.text import HELD_OUT, read_bytes, stamp

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".webp")
_WORDS = [
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
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pictures:
    """Images of one size: pixels [n height width channels] float32 in [0, 1], each with a caption and a class.

    `held` marks the held-out images, which are chosen by content so that copies of an image are in the same part.
    """

    name: str
    pixels: np.ndarray
    captions: Sequence[str]
    labels: np.ndarray
    classes: Sequence[str]
    held: np.ndarray

    @property
    def sha256(self) -> str:
        """The SHA-256 of the pixels, captions, classes and the split."""
        names = json.dumps([list(self.captions), list(self.classes)])
        digest = hashlib.sha256(names.encode())
        for array in (self.pixels, self.labels, self.held):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def load_pictures(source: str, size: int) -> Pictures:
    """Loads the digits, or a folder with one subfolder of images per class.

    Raises:
        DataError: an image cannot be read, or has a different size or mode.
    """
    return _load(source, size, () if source == "digits" else stamp(source))


# The stamp is part of the cache key, so a changed folder is read again.
@functools.lru_cache(maxsize=4)
def _load(source: str, size: int, stamp: object) -> Pictures:
    path = Path(source).expanduser()
    if source == "digits":
        pixels, captions = _digits()
        if size != pixels.shape[1]:
            raise DataError(
                f"the images of digits are 8 × 8 pixels; expected image_size 8, got {size}"
            )
        classes = tuple(_WORDS)
    elif path.is_dir():
        pixels, captions = _class_folders(path, size)
        classes = tuple(dict.fromkeys(captions))
    else:
        raise DataError(
            f"cannot find images {source!r}: there is no such folder. Expected digits, or a folder with one subfolder "
            "per class."
        )
    labels = np.array([classes.index(caption) for caption in captions])
    return Pictures(
        name=path.name,
        pixels=pixels,
        captions=captions,
        labels=labels,
        classes=classes,
        held=_held_out(pixels, labels, classes),
    )


def _held_out(
    pixels: np.ndarray, labels: np.ndarray, classes: Sequence[str]
) -> np.ndarray:
    """Holds out a tenth of each class (at least one image), chosen by the order of the images' hashes."""
    digests = np.array(
        [hashlib.sha256(image.tobytes()).hexdigest() for image in pixels]
    )
    held: list[str] = []
    for label, name in enumerate(classes):
        of_class = np.unique(digests[labels == label])
        if len(of_class) < 2:
            raise DataError(
                f"class {name!r} has {len(of_class)} different images; expected at least 2: one to train on and one "
                "to hold out"
            )
        held.extend(of_class[: max(1, round(HELD_OUT * len(of_class)))])
    return np.isin(digests, held)


def _digits() -> tuple[np.ndarray, list[str]]:
    file = files("qkeel.lab").joinpath("pictures", "digits.xz")
    stored = np.frombuffer(lzma.decompress(file.read_bytes()), np.uint8)
    # A row is one scanned digit: 8×8 grey values from 0 to 16, then the digit itself. Stored by column, which takes less.
    rows = stored.reshape(65, -1).T.astype(np.float32, order="C")
    pixels = (rows[:, :64] / 16).reshape(-1, 8, 8, 1)
    return pixels, [_WORDS[int(label)] for label in rows[:, 64]]


def _class_folders(path: Path, size: int) -> tuple[np.ndarray, list[str]]:
    folders = sorted(p for p in path.iterdir() if p.is_dir() and p.name[0] != ".")
    if not folders:
        raise DataError(
            f"{path} has no subfolders; expected one subfolder per class, with the images of that class"
        )
    images, captions = [], []
    for folder in folders:
        paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES)
        if not paths:
            raise DataError(
                f"class {folder.name!r} has no image: {folder} has no file that ends in {', '.join(SUFFIXES)}"
            )
        images += [_read(file, size) for file in paths]
        captions += [folder.name] * len(paths)
    if len({image.shape for image in images}) > 1:
        raise DataError(
            f"{path} mixes grey and RGB images; expected one mode. Convert all images to the same mode"
        )
    return np.stack(images), captions


def _read(path: Path, size: int) -> np.ndarray:
    with needed("reading images", "pillow"):
        from PIL import Image  # type: ignore[import-not-found]
    try:
        # An image that Pillow does not know is an OSError too.
        with Image.open(io.BytesIO(read_bytes(path))) as image:
            mode, (width, height) = image.mode, image.size
            pixels = np.asarray(image, dtype=np.float32) / 255
    except OSError as error:
        raise DataError(f"cannot read {path} as an image: {error}") from error
    if mode not in ("L", "RGB"):
        raise DataError(
            f"{path} has mode {mode}; expected 8-bit grey (L) or RGB. Convert it: Image.open(...).convert('RGB')"
        )
    if (width, height) != (size, size):
        raise DataError(
            f"{path} is {width} × {height} pixels; expected {size} × {size}. Resize the images, or give their size "
            "with --image-size"
        )
    # Pillow gives grey images without a dimension for their channel.
    return pixels.reshape(size, size, -1)


def patches(pixels: np.ndarray, size: int) -> np.ndarray:
    """Cuts images [n height width channels] into square patches, row by row: [n rows columns size²·channels].

    >>> patches(np.arange(16.0).reshape(1, 4, 4, 1), 2)[0, 0].tolist()
    [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]
    """
    n, height, width, channels = pixels.shape
    rows, columns = height // size, width // size
    cut = pixels.reshape(n, rows, size, columns, size, channels).swapaxes(2, 3)
    return cut.reshape(n, rows, columns, -1)


def grey(pixels: np.ndarray) -> np.ndarray:
    """Converts RGB images to grey by their luma (ITU-R BT.601): [n height width 1]."""
    if pixels.shape[-1] == 1:
        return pixels
    return (pixels @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]
