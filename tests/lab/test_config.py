from __future__ import annotations

import dataclasses
import json
import math

import pytest

from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    QkeelError,
    UnknownNameError,
)
from qkeel.lab import ModelConfig, OptimConfig, RunConfig


def test_a_configuration_survives_json() -> None:
    config = RunConfig(
        model=ModelConfig(n_kv_heads=2),
        optim=OptimConfig(lr=3e-4, name="muon"),
        remedy="softcap",
    )
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_run_id_is_the_same_for_every_spelling_of_a_number_and_another_for_another_seed() -> (
    None
):
    assert (
        RunConfig(optim=OptimConfig(lr=1)).run_id
        == RunConfig(optim=OptimConfig(lr=1.0)).run_id
    )
    assert RunConfig(seed=1).run_id != RunConfig(seed=0).run_id


def test_checkpoint_cadence_and_device_number_do_not_make_another_run() -> None:
    run = RunConfig(device="cuda")
    assert (
        dataclasses.replace(run, checkpoint_every=7, device="cuda:1").run_id
        == run.run_id
    )
    assert dataclasses.replace(run, device="cpu").run_id != run.run_id


REFUSED: list[tuple[dict[str, object], type[QkeelError], str]] = [
    ({"stepss": 3}, UnknownNameError, "'stepss'. Did you mean 'steps'"),
    (
        {"optim": {"lrr": 3}},
        UnknownNameError,
        "unknown key in [optim] 'lrr'. Did you mean 'lr'",
    ),
    ({"optim": {"schedule": "cosin"}}, UnknownNameError, "Did you mean 'cosine'"),
    *(
        ({"optim": {"lr": lr}}, InvalidValueError, "above 0 for lr")
        for lr in (0, -1.0, math.nan, math.inf)
    ),
    *(
        ({"steps": steps}, InvalidTypeError, "expected a whole number for steps")
        for steps in (1.5, True)
    ),
    ({"compile": 1}, InvalidTypeError, "expected true or false for compile"),
    ({"data": 3}, InvalidTypeError, "expected a table of data"),
    ({"optim": {"lr": "fast"}}, InvalidTypeError, "expected a number for lr"),
    ({"steps": 0}, InvalidValueError, "of at least 1 for steps, got 0"),
    (
        {"log_every": 10, "eval_every": 15},
        InvalidValueError,
        "expected eval_every to be a multiple of log_every",
    ),
    ({"device": "gpu"}, InvalidValueError, "expected device auto, cpu"),
    ({"seed": -1}, InvalidValueError, "of at least 0 for seed"),
    (
        {"model": {"n_heads": 4, "n_kv_heads": 3}},
        InvalidValueError,
        "n_heads to be a multiple of n_kv_heads",
    ),
    (
        {"model": {"d_model": 64, "n_heads": 5}},
        InvalidValueError,
        "d_model to be a multiple of n_heads",
    ),
    ({"data": {"context": 0}}, InvalidValueError, "of at least 1 for context"),
    (
        {"data": {"source": ""}},
        InvalidValueError,
        "expected the name or path of a corpus",
    ),
    (
        {"optim": {"beta2": 1.0}},
        InvalidValueError,
        "beta1, beta2 and momentum below 1, got 1.0",
    ),
    (
        {"optim": {"warmup": 1.5}},
        InvalidValueError,
        "of at least 0 and at most 1 for warmup, got 1.5",
    ),
    (
        {"data": {"tokens": "bpe"}},
        InvalidValueError,
        "data.tokens=bpe is gone; write the tokens",
    ),
    ({"optim": {"grad_clip": -1.0}}, InvalidValueError, "of at least 0 for grad_clip"),
]


@pytest.mark.parametrize(("values", "kind", "message"), REFUSED)
def test_what_a_run_cannot_be_is_refused(
    values: dict[str, object], kind: type[QkeelError], message: str
) -> None:
    with pytest.raises(kind) as error:
        RunConfig.from_dict(values)
    assert message in str(error.value)


def test_a_setting_that_is_gone_is_ignored_where_it_said_what_is_done_now() -> None:
    old = RunConfig().to_dict()
    old["data"]["tokens"] = "bytes"
    assert RunConfig.from_dict(old) == RunConfig()
    assert RunConfig.from_dict(old).run_id == "cf422ce207c8", (
        "as of the version that had the setting"
    )


def test_parts_must_be_the_dataclasses() -> None:
    with pytest.raises(InvalidTypeError, match="expected a OptimConfig as optim"):
        RunConfig(optim={"lr": 0.1})  # type: ignore[arg-type]
