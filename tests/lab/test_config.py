"""Configurations: what names a run, what is refused, and what a run gets from them."""

import dataclasses
import json
import math

import pytest

from qkeel.errors import (
    InvalidTypeError,
    InvalidValueError,
    UnknownNameError,
)
from qkeel.lab import ImagesConfig, ModelConfig, OptimConfig, RunConfig
from qkeel.lab.config import with_values


def test_a_configuration_survives_json():
    config = with_values(RunConfig(), model={"n_kv_heads": 2}, optim={"name": "muon"})
    assert RunConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_what_makes_another_run_and_what_does_not():
    config = RunConfig(device="cuda")
    for same in (
        {"checkpoint_every": 7},
        {"device": "cuda:1"},
        # Of which a run on text sees nothing.
        {"images": {"canvas": 2}},
        {"data": {"pairs": 3}},
        {"model": {"base_width": 32}},
    ):
        assert with_values(config, **same).run_id == config.run_id, same
    others = [
        {"seed": 1},
        {"device": "cpu"},
        {"accumulate": 2},
        {"model": {"position": "nope"}},
        {"data": {"task": "multimodal"}},
    ]
    ids = {with_values(config, **other).run_id for other in others}
    assert len(ids - {config.run_id}) == len(others)
    assert with_values(config, optim={"lr": 1}).run_id == (
        with_values(config, optim={"lr": 1.0}).run_id
    )
    assert RunConfig().run_id == "cf422ce207c8", "runs of earlier versions keep names"
    gau = RunConfig(model=ModelConfig(block="gau", n_heads=1), steps=7)
    assert gau.run_id == "a4415ee675be"


REFUSED = [
    ({"stepss": 3}, UnknownNameError, "Did you mean 'steps'"),
    ({"optim": {"lrr": 3}}, UnknownNameError, "Did you mean 'lr'"),
    ({"optim": {"schedule": "cosin"}}, UnknownNameError, "Did you mean 'cosine'"),
    *(
        ({"optim": {"lr": lr}}, InvalidValueError, "above 0 for lr")
        for lr in (0, -1.0, math.nan, math.inf)
    ),
    ({"steps": 1.5}, InvalidTypeError, "a whole number for steps"),
    ({"steps": True}, InvalidTypeError, "a whole number for steps"),
    ({"compile": 1}, InvalidTypeError, "true or false for compile"),
    ({"data": 3}, InvalidTypeError, "a table of data"),
    ({"optim": {"lr": "fast"}}, InvalidTypeError, "a number for lr"),
    ({"steps": 0}, InvalidValueError, "at least 1 for steps"),
    ({"log_every": 10, "eval_every": 15}, InvalidValueError, "multiple of log_every"),
    ({"accumulate": 3}, InvalidValueError, "multiple of accumulate"),
    ({"device": "gpu"}, InvalidValueError, "device auto, cpu"),
    ({"seed": -1}, InvalidValueError, "at least 0 for seed"),
    ({"model": {"n_kv_heads": 3}}, InvalidValueError, "multiple of n_kv_heads"),
    ({"model": {"n_heads": 5}}, InvalidValueError, "multiple of n_heads"),
    ({"model": {"block": "gau"}}, InvalidValueError, "n_heads=1 for block=gau"),
    ({"model": {"deepnorm": True}}, InvalidValueError, "deepnorm needs"),
    ({"model": {"mlp_ratio": 0.0}}, InvalidValueError, "at least one unit"),
    ({"model": {"base_width": 0}}, InvalidValueError, "base_width"),
    ({"data": {"context": 0}}, InvalidValueError, "at least 1 for context"),
    ({"data": {"source": ""}}, InvalidValueError, "name or path of a corpus"),
    ({"data": {"tokens": "bpe"}}, InvalidValueError, "data.tokens=bpe is gone"),
    ({"optim": {"beta2": 1.0}}, InvalidValueError, "below 1, got 1.0"),
    ({"optim": {"warmup": 1.5}}, InvalidValueError, "at most 1 for warmup"),
    ({"optim": {"grad_clip": -1.0}}, InvalidValueError, "at least 0 for grad_clip"),
    ({"images": {"image_share": 1.5}}, InvalidValueError, "at most 1 for image_share"),
    ({"images": {"patch": 3}}, InvalidValueError, "multiple of patch"),
    ({"images": {"image_variance": 0.0}}, InvalidValueError, "above 0"),
    ({"images": {"levels": 1}}, InvalidValueError, "at least 2 for levels"),
    ({"images": {"images": ""}}, InvalidValueError, "name or path of images"),
    (
        {"optim": {"name": "sgd", "decay": "independent"}},
        InvalidValueError,
        "independent",
    ),
    (
        {"model": {"n_heads": 1, "block": "mla", "parametrisation": "mup"}},
        InvalidValueError,
        "mup",
    ),
    *(
        ({"model": {"parametrisation": "mup"}, **more}, InvalidValueError, "mup")
        for more in (
            {"optim": {"name": "muon"}},
            {"data": {"task": "vision"}},
            {"images": {"image_input": "patches"}},
        )
    ),
]


@pytest.mark.parametrize(("values", "kind", "words"), REFUSED)
def test_what_a_run_cannot_be_is_refused(values, kind, words):
    with pytest.raises(kind) as error:
        RunConfig.from_dict(values)
    assert words in str(error.value)


def test_a_setting_that_is_gone_is_ignored_where_it_said_what_is_done_now():
    old = RunConfig().to_dict()
    old["data"] |= {"tokens": "bytes", "needle": 0.0}
    assert RunConfig.from_dict(old) == RunConfig()


def test_sections_must_be_the_dataclasses():
    assert dataclasses.replace(RunConfig(), images=ImagesConfig(), optim=OptimConfig())
    with pytest.raises(InvalidTypeError):
        RunConfig(optim={"lr": 0.1})  # type: ignore[arg-type]
