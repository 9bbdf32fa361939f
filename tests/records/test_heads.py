"""heads.f32: what is appended is read; a torn record is dropped; cutting back keeps the steps before."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from qkeel.errors import DamagedFileError, RunDirectoryError, ShapeError
from qkeel.records import HeadRecorder, read_heads
from qkeel.records.file_formats import cut_heads

FIELDS = ("max_logit", "entropy")


def recorded(directory: Path, steps: list[int]) -> np.ndarray:
    recorder = HeadRecorder(directory, FIELDS, n_layers=2, n_heads=3)
    values = np.random.default_rng(0).normal(size=(len(steps), 2, 2, 3)).astype(np.float32)
    for step, row in zip(steps, values):
        recorder.append(step, row)
    return values


def test_values_come_back_by_name_layer_and_head(tmp_path: Path) -> None:
    values = recorded(tmp_path, [0, 10, 20])
    heads = read_heads(tmp_path)
    assert heads.steps.tolist() == [0, 10, 20]
    for i, name in enumerate(FIELDS):
        assert np.array_equal(heads.values[name], values[:, i])
        assert heads.values[name].shape == (3, 2, 3)


@pytest.mark.parametrize("cut", [1, 3, 4, 51])
def test_a_torn_record_is_dropped(tmp_path: Path, cut: int) -> None:
    recorded(tmp_path, [0, 10, 20])
    path = tmp_path / "heads.f32"
    os.truncate(path, path.stat().st_size - cut)
    assert read_heads(tmp_path).steps.tolist() == [0, 10]


@pytest.mark.parametrize(("last", "kept"), [(-1, []), (0, [0]), (10, [0, 10]), (15, [0, 10]), (99, [0, 10, 20])])
def test_cutting_back_keeps_what_is_not_later(tmp_path: Path, last: int, kept: list[int]) -> None:
    values = recorded(tmp_path, [0, 10, 20])
    with open(tmp_path / "heads.f32", "ab") as file:
        file.write(b"torn")
    cut_heads(tmp_path, last)
    heads = read_heads(tmp_path)
    assert heads.steps.tolist() == kept
    assert np.array_equal(heads.values["entropy"], values[: len(kept), 1])
    assert (tmp_path / "heads.f32").stat().st_size == len(kept) * 13 * 4
    HeadRecorder(tmp_path, FIELDS, 2, 3).append(50, values[0])
    assert read_heads(tmp_path).steps.tolist() == [*kept, 50]


def test_before_the_first_record_there_are_none(tmp_path: Path) -> None:
    HeadRecorder(tmp_path, FIELDS, 2, 3)
    assert read_heads(tmp_path).steps.tolist() == []
    cut_heads(tmp_path, 5)
    cut_heads(tmp_path / "nowhere", 5)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    recorded(tmp_path, [0, 10, 20])
    path, sums = tmp_path / "heads.f32", tmp_path / "heads.crc32"
    size = path.stat().st_size
    for file, at in ((path, 52 + 9), (sums, 4)):
        whole = file.read_bytes()
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedFileError, match=r"heads\.f32, record 2 does not match its checksum in heads\.crc32"):
            read_heads(tmp_path)
        file.write_bytes(whole)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert read_heads(tmp_path).steps.tolist() == [0, 10]  # the last may be torn
    with pytest.raises(DamagedFileError, match="record 3"):
        read_heads(tmp_path, sure=size)
    sums.unlink()
    with pytest.raises(DamagedFileError, match="0 checksums for 3 records"):
        read_heads(tmp_path)


def test_values_of_another_shape_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"\(2, 2, 3\), got \(2, 3, 2\)"):
        HeadRecorder(tmp_path, FIELDS, 2, 3).append(0, np.zeros((2, 3, 2)))
    with pytest.raises(RunDirectoryError, match=r"heads\.json is missing"):
        read_heads(tmp_path / "nowhere")
