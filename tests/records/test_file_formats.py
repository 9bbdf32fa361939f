"""heads.f32: what is appended is read; a torn record is dropped; cutting back keeps the steps before."""

import json
import os

import numpy as np
import pytest

from qkeel.errors import ShapeError
from qkeel.records import HeadRecorder, fold_heads, read_heads

FIELDS = ("max_logit", "entropy")


def recorded(directory, steps):
    recorder = HeadRecorder(directory, FIELDS, n_layers=2, n_heads=3)
    values = (
        np.random.default_rng(0).normal(size=(len(steps), 2, 2, 3)).astype(np.float32)
    )
    for step, row in zip(steps, values):
        recorder.append(step, dict(zip(FIELDS, row)))
    return values


def test_values_come_back_by_name_layer_and_head(tmp_path):
    values = recorded(tmp_path, [0, 10, 20])
    heads = read_heads(tmp_path)
    assert heads.steps.tolist() == [0, 10, 20]
    for i, name in enumerate(FIELDS):
        assert np.array_equal(heads.values[name], values[:, i])
        assert heads.values[name].shape == (3, 2, 3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max_logit", [0.5, 0.2, np.nan]),
        ("min_logit", [0.1, 0.2, np.nan]),
        ("entropy", [0.3, 0.2, np.nan]),
        ("block_output_rms", [0.5, 0.2, np.nan]),
        ("class_mass/a->b", [0.3, 0.2, np.nan]),
    ],
)
def test_heads_are_folded_by_the_worst_or_by_the_mean_of_those_that_were_measured(
    name, expected
):
    values = np.array(
        [[0.1, 0.5, np.nan, 0.3, 0.3], [np.nan] * 4 + [0.2], [np.nan] * 5]
    )
    folded = fold_heads(name, values).tolist()
    assert folded == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("cut", [1, 3, 4, 51])
def test_a_torn_record_is_dropped(tmp_path, cut):
    recorded(tmp_path, [0, 10, 20])
    path = tmp_path / "heads.f32"
    os.truncate(path, path.stat().st_size - cut)
    assert read_heads(tmp_path).steps.tolist() == [0, 10]


def test_before_the_first_record_there_are_none(tmp_path):
    HeadRecorder(tmp_path, FIELDS, 2, 3)
    assert read_heads(tmp_path).steps.tolist() == []


def test_records_of_an_earlier_version_are_read_and_gone_on_with(
    tmp_path,
):
    values = recorded(tmp_path, [0, 10])
    about = json.loads((tmp_path / "heads.json").read_text())
    (tmp_path / "heads.json").write_text(
        json.dumps({**about, "checksums": "heads.crc32", "crc32": "00000000"})
    )
    (tmp_path / "heads.crc32").write_bytes(bytes(8))
    HeadRecorder(tmp_path, FIELDS, 2, 3).append(20, dict(zip(FIELDS, values[0])))
    assert read_heads(tmp_path).steps.tolist() == [0, 10, 20]


def test_values_of_another_shape_are_refused(tmp_path):
    recorder = HeadRecorder(tmp_path, FIELDS, 2, 3)
    for shape in ((3, 3), (2, 4)):
        with pytest.raises(ShapeError, match=r"entropy of shape \(2, 3\), got"):
            recorder.append(0, {"entropy": np.zeros(shape)})
    recorder.append(1, {"entropy": np.ones((2, 1)), "of no record": np.ones((2, 3))})
    heads = read_heads(tmp_path)
    assert heads.steps.tolist() == [1]
    np.testing.assert_array_equal(heads.values["entropy"][0], [[1, np.nan, np.nan]] * 2)
    assert np.isnan(heads.values["max_logit"]).all()
    assert not len(read_heads(tmp_path / "none").steps)
