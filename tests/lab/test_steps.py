"""What one step takes, the names of older runs, tokens of one byte, and positions that know the training length."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from qkeel.errors import DataError, InvalidValueError, UnknownNameError
from qkeel.lab import DataConfig, ModelConfig, RunConfig
from qkeel.lab.checkpoint import RunState
from qkeel.lab.text import load
from qkeel.lab.train import train_step


def test_a_batch_in_parts_has_the_gradient_of_the_whole() -> None:
    config = RunConfig(
        model=ModelConfig(d_model=16, n_heads=2),
        data=DataConfig(source="topics", context=8, batch=6),
        device="cpu",
        dtype="fp32",
    )
    both = [RunState(dataclasses.replace(config, accumulate=n)) for n in (1, 3)]
    for step in range(2):
        (loss, norm), (other, other_norm) = (train_step(state, step) for state in both)
        assert float(other) == pytest.approx(float(loss), rel=1e-5)
        assert float(other_norm) == pytest.approx(float(norm), rel=1e-4)
    with pytest.raises(InvalidValueError, match="multiple of accumulate, got 6 and 4"):
        dataclasses.replace(config, accumulate=4)


def test_settings_that_say_nothing_leave_the_names_of_older_runs_alone() -> None:
    assert RunConfig().run_id == "cf422ce207c8"
    assert (
        RunConfig(model=ModelConfig(block="gau", n_heads=1), steps=7).run_id
        == "a4415ee675be"
    )
    for younger in ({"position": "nope"}, {"mlp_ratio": 3.0}):
        assert RunConfig(model=ModelConfig(**younger)).run_id != "cf422ce207c8"  # type: ignore[arg-type]
    assert RunConfig(accumulate=2).run_id != "cf422ce207c8"


def test_tokens_of_one_byte_are_read_where_they_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bytes.bin"
    np.arange(200, dtype="u1").tofile(path)
    corpus = load(DataConfig(source=f"{path}#uint8", context=8))
    assert corpus.train.tolist() == list(range(180))
    assert corpus.vocab_size == 200
    with pytest.raises(UnknownNameError, match=r"Did you mean .*'uint16'"):
        load(DataConfig(source=f"{path}#uint32", context=8))
    np.arange(201, dtype="u1").tofile(path)
    with pytest.raises(DataError, match=r"bytes\.bin#uint8"):
        load(DataConfig(source=str(path), context=8))


def test_the_position_of_a_run_gets_its_training_length() -> None:
    config = RunConfig(
        model=ModelConfig(d_model=16, n_heads=2, n_layers=3, position="hwfa"),
        data=DataConfig(source="topics", context=8, batch=2),
        device="cpu",
    )
    model = RunState(config).model
    assert [block.attention.spec.position.reach for block in model.blocks] == [
        3,
        3,
        None,
    ]  # type: ignore[union-attr]
