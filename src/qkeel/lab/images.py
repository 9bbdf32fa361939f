"""Image data: handwritten digits, and folders of classes.

Shapes: [n height width channels].
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import io
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from qkeel.errors import DataError, needed
from qkeel.lab.text import HELD_OUT, read_bytes, stamp

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".pgm", ".webp")
_MODES = ("L", "RGB")
_WORDS = (
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
class Pictures:
    """Images of one size: pixels [n height width channels] float32 in [0, 1], each with a caption and a class.

    `held` marks the held-out images, which are chosen by content so that copies of an image are in the same part.
    `classes` is () if there are no classes.
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
        digest = hashlib.sha256(
            json.dumps([list(self.captions), list(self.classes)]).encode()
        )
        for array in (self.pixels, self.labels, self.held):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def load_pictures(source: str, size: int) -> Pictures:
    """Loads the images of a source; see ImagesConfig.images.

    Raises:
        DataError: an image cannot be read, has a different size or mode, or has no caption.
    """
    return _load(source, size, stamp(source) if source not in BUILT_IN else ())


@functools.lru_cache(maxsize=4)
def _load(source: str, size: int, stamped: object) -> Pictures:
    path = Path(source).expanduser()
    if source in BUILT_IN:
        name, pixels, captions, classes = BUILT_IN[source]()
        if size != pixels.shape[1]:
            raise DataError(
                f"the images of {source} are 8 × 8 pixels; expected image_size 8, got {size}"
            )
    elif path.is_dir():
        name, (pixels, captions) = path.name, _class_folders(path, size)
        classes = tuple(dict.fromkeys(captions))
    else:
        raise DataError(
            f"cannot find images {source!r}: there is no such folder. Expected {', '.join(BUILT_IN)}, or a folder with "
            "one subfolder per class."
        )
    index_of_class = {name: i for i, name in enumerate(classes)}
    labels = np.array([index_of_class.get(caption, 0) for caption in captions])
    held = _held_out(pixels, labels, classes)
    return Pictures(
        name=name,
        pixels=pixels,
        captions=captions,
        labels=labels,
        classes=classes,
        held=held,
    )


def _held_out(
    pixels: np.ndarray, labels: np.ndarray, classes: Sequence[str]
) -> np.ndarray:
    """Holds out a tenth of each class (at least one image), chosen by the order of the images' hashes."""
    digests = [
        hashlib.sha256(np.ascontiguousarray(image).tobytes()).digest()
        for image in pixels
    ]
    held: set[bytes] = set()
    for label in range(len(classes) or 1):
        mine = sorted(
            {
                digest
                for digest, label_of_digest in zip(digests, labels)
                if label_of_digest == label
            }
        )
        if len(mine) < 2:
            subject = f"class {classes[label]!r} has" if classes else "there are"
            raise DataError(
                f"{subject} {len(mine)} different images; expected at least 2: one to train on and one to hold out"
            )
        held.update(mine[: max(1, round(HELD_OUT * len(mine)))])
    return np.array([digest in held for digest in digests])


ImageTable = tuple[str, np.ndarray, Sequence[str], Sequence[str]]


def _digits() -> ImageTable:
    text = gzip.decompress(
        files("qkeel.lab").joinpath("pictures", "digits.csv.gz").read_bytes()
    ).decode()
    rows = np.loadtxt(io.StringIO(text), delimiter=",", dtype=np.float32)
    pixels = (rows[:, :64] / 16).reshape(
        -1,
        8,
        8,
        1,
    )
    return "digits", pixels, [_WORDS[int(label)] for label in rows[:, 64]], _WORDS


BUILT_IN: dict[str, Callable[[], ImageTable]] = {"digits": _digits}


def _class_folders(path: Path, size: int) -> tuple[np.ndarray, list[str]]:
    folders = sorted(
        folder
        for folder in path.iterdir()
        if folder.is_dir() and not folder.name.startswith(".")
    )
    if not folders:
        raise DataError(
            f"{path} has no subfolders; expected one subfolder per class, with the images of that class"
        )
    images, captions = [], []
    for folder in folders:
        paths = sorted(
            file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES
        )
        if not paths:
            raise DataError(
                f"class {folder.name!r} has no image: {folder} has no file that ends in {', '.join(SUFFIXES)}"
            )
        images += [_read(file, size) for file in paths]
        captions += [folder.name] * len(paths)
    return _stack(images, str(path)), captions


def _read(path: Path, size: int) -> np.ndarray:
    with needed("reading images", "'qkeel[data]'"):
        from PIL import Image, UnidentifiedImageError  # type: ignore[import-not-found]
    try:
        with Image.open(io.BytesIO(read_bytes(path))) as image:
            mode, shape = image.mode, image.size
            _check(path, mode, shape, size)
            pixels = np.asarray(image, dtype=np.float32) / 255
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError(f"cannot read {path} as an image: {error}") from error
    except OSError as error:
        raise DataError(
            f"cannot read {path} as an image: {error.strerror or error}"
        ) from error
    return pixels.reshape(size, size, -1)


def _check(path: Path, mode: str, shape: tuple[int, int], size: int) -> None:
    if mode not in _MODES:
        raise DataError(
            f"{path} has mode {mode}; expected 8-bit grey (L) or RGB. Convert it: Image.open(...).convert('RGB')"
        )
    if tuple(shape) != (size, size):
        raise DataError(
            f"{path} is {shape[0]} × {shape[1]} pixels; expected {size} × {size}. Resize the images, or give their "
            "size with --image-size"
        )


def _stack(images: Sequence[np.ndarray], what: str) -> np.ndarray:
    if not images:
        raise DataError(f"{what} lists no images; expected at least two")
    channels = {image.shape[2] for image in images}
    if len(channels) > 1:
        raise DataError(
            f"{what} mixes grey and RGB images; expected one mode. Convert all images to the same mode"
        )
    return np.stack(images)


def patches(pixels: np.ndarray, size: int) -> np.ndarray:
    """Cuts images [n height width channels] into square patches, row by row: [n rows columns size²·channels].

    >>> patches(np.arange(16.0).reshape(1, 4, 4, 1), 2)[0, 0].tolist()
    [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]
    """
    n, height, width, channels = pixels.shape
    cut = pixels.reshape(
        n, height // size, size, width // size, size, channels
    ).transpose(
        0,
        1,
        3,
        2,
        4,
        5,
    )
    return cut.reshape(n, height // size, width // size, -1)


def grey(pixels: np.ndarray) -> np.ndarray:
    """Converts RGB images to grey by their luma (ITU-R BT.601): [n height width 1]."""
    if pixels.shape[-1] == 1:
        return pixels
    return (pixels @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]
