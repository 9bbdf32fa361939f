"""Images: what is shipped, what users give, how they are split, and one clear error each for what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qkeel.errors import DataError
from qkeel.lab.images import grey, load_pictures, patches

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    image = pytest.importorskip("PIL.Image")

    def make(
        name: str, seed: int = 0, size: tuple[int, int] = (8, 8), mode: str = "L"
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        channels = {"L": (), "RGB": (3,), "RGBA": (4,), "CMYK": (4,)}[mode]
        pixels = np.random.default_rng(seed).integers(
            0, 256, (*size[::-1], *channels), dtype=np.uint8
        )
        image.fromarray(pixels, mode).save(path)
        return path

    return make


def test_the_digits_are_the_1797_of_the_set() -> None:
    digits = load_pictures("digits", 8)
    assert digits.pixels.shape == (1797, 8, 8, 1)
    assert set(np.unique(digits.pixels * 16)) == set(range(17))
    assert np.bincount(digits.labels).tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]
    assert digits.captions[:3] == ["zero", "one", "two"]


def test_a_tenth_of_each_class_is_held_out_and_no_image_stands_on_both_sides() -> None:
    digits = load_pictures("digits", 8)
    for label in range(10):
        mine = digits.held[digits.labels == label]
        assert 0.09 < mine.mean() < 0.12
    sides = [
        {image.tobytes() for image in digits.pixels[side]}
        for side in (digits.held, ~digits.held)
    ]
    assert not sides[0] & sides[1]


def test_patches_are_cut_row_by_row() -> None:
    image = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)
    assert patches(image, 2)[0].tolist() == [
        [[0, 1, 4, 5], [2, 3, 6, 7]],
        [[8, 9, 12, 13], [10, 11, 14, 15]],
    ]


def test_grey_is_the_luma_of_colour() -> None:
    assert grey(np.ones((1, 1, 1, 3), np.float32))[0, 0, 0] == pytest.approx(1.0)
    assert grey(np.array([[[[0, 1, 0]]]], np.float32)).item() == pytest.approx(0.587)


def test_folders_are_classes(save: Save, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for i in range(3):
            save(f"{name}/{i}.png", hash((name, i)) % 1000, mode="RGB")
    found = load_pictures(str(tmp_path), 8)
    assert found.classes == ("cat", "dog")
    assert found.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.pixels.shape == (6, 8, 8, 3)
    assert found.held.sum() == 2


# What is in a folder of classes -> what is said of it.
WRONG: dict[str, tuple[Callable[[Save], object], str]] = {
    "another size": (
        lambda save: save("cat/0.png", size=(9, 8)),
        r"0\.png is 9 × 8 pixels; expected 8 × 8",
    ),
    "transparency": (
        lambda save: save("cat/1.png", mode="RGBA"),
        "has mode RGBA; expected 8-bit grey",
    ),
    "inks": (
        lambda save: (made := save("cat/1.tiff", mode="CMYK")).rename(
            made.with_suffix(".png")
        ),
        "has mode CMYK; expected 8-bit grey",
    ),
    "grey and colour": (
        lambda save: (save("cat/0.png"), save("cat/1.png", mode="RGB")),
        "mixes grey and RGB",
    ),
    "no image": (
        lambda save: save("cat/0.png").write_bytes(b"no image"),
        r"cannot read .*0\.png as an image",
    ),
    "an empty class": (
        lambda save: (
            save("cat/0.png", 0),
            save("cat/1.png", 1).parent.with_name("dog").mkdir(),
        ),
        "class 'dog' has no image",
    ),
    "a class of copies": (
        lambda save: [
            save(f"{name}/{i}.png", seed)
            for i in range(2)
            for name, seed in (("cat", i), ("dog", 7))
        ],
        "class 'dog' has 1 different images; expected at least 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(
    name: str, save: Save, tmp_path: Path
) -> None:
    make, message = WRONG[name]
    make(save)
    with pytest.raises(DataError, match=message):
        load_pictures(str(tmp_path), 8)


@pytest.mark.parametrize(
    ("source", "size", "message"),
    [
        ("digits", 16, "the images of digits are 8 × 8"),
        ("nowhere", 8, "cannot find images 'nowhere'"),
        (".", 8, "has no subfolder|has no image"),
    ],
)
def test_a_source_that_is_none_is_refused(
    source: str, size: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        load_pictures(str(tmp_path) if source == "." else source, size)
