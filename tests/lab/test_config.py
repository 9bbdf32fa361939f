from __future__ import annotations

import dataclasses
import json
import math

import pytest

from qkeel.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from qkeel.lab import DataConfig, ModelConfig, OptimConfig, RunConfig


def test_a_configuration_survives_json() -> None:
    config = RunConfig(model=ModelConfig(n_kv_heads=2), optim=OptimConfig(lr=3e-4, name="muon"), remedy="softcap")
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_run_id_is_the_same_for_every_spelling_of_a_number_and_another_for_another_seed() -> None:
    assert RunConfig(optim=OptimConfig(lr=1)).run_id == RunConfig(optim=OptimConfig(lr=1.0)).run_id
    assert RunConfig(seed=1).run_id != RunConfig(seed=0).run_id


def test_checkpoint_cadence_and_device_number_do_not_make_another_run() -> None:
    run = RunConfig(device="cuda")
    assert dataclasses.replace(run, checkpoint_every=7, device="cuda:1").run_id == run.run_id
    assert dataclasses.replace(run, device="cpu").run_id != run.run_id


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepss": 3}, "'stepss'. Did you mean 'steps'"),
        ({"optim": {"lrr": 3}}, "unknown key in [optim] 'lrr'. Did you mean 'lr'"),
        ({"optim": {"schedule": "cosin"}}, "Did you mean 'cosine'"),
    ],
)
def test_an_unknown_key_or_word_names_the_nearest(values: dict[str, object], message: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        RunConfig.from_dict(values)
    assert message in str(error.value)


@pytest.mark.parametrize("lr", [0, -1.0, math.nan, math.inf])
def test_a_rate_that_is_not_a_positive_number_is_refused(lr: float) -> None:
    with pytest.raises(InvalidValueError, match="expected a learning rate above 0"):
        OptimConfig(lr=lr)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RunConfig(steps=0),
        lambda: RunConfig(log_every=10, eval_every=15),
        lambda: RunConfig(device="gpu"),
        lambda: RunConfig(seed=-1),
        lambda: ModelConfig(n_heads=4, n_kv_heads=3),
        lambda: ModelConfig(d_model=64, n_heads=5),
        lambda: DataConfig(context=0),
        lambda: DataConfig(source=""),
        lambda: OptimConfig(beta2=1.0),
        lambda: OptimConfig(warmup=1.5),
        lambda: OptimConfig(grad_clip=-1.0),
    ],
)
def test_values_outside_their_range_are_refused(make: object) -> None:
    with pytest.raises(InvalidValueError, match="expected"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    "values", [{"steps": 1.5}, {"steps": True}, {"compile": 1}, {"data": 3}, {"optim": {"lr": "fast"}}]
)
def test_values_of_the_wrong_type_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(InvalidTypeError, match="expected"):
        RunConfig.from_dict(values)


def test_parts_must_be_the_dataclasses() -> None:
    with pytest.raises(InvalidTypeError, match="expected a OptimConfig as optim"):
        RunConfig(optim={"lr": 0.1})  # type: ignore[arg-type]
