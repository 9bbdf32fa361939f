"""Configurations: what names a run, what is refused, and what a run gets from them."""

import json
import math

import pytest
from tests.each_row import each_row

from qkeel.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from qkeel.lab import ModelConfig, RunConfig, find_study
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
    digits = find_study("multimodal").plan(None, None).runs[-1].config
    assert digits.run_id == "4d9fc201a08a"


# What a configuration may not say, and by which error; a name that is nearly one is answered with it.
REFUSED = {
    UnknownNameError: [
        {"stepss": 3},
        {"optim": {"lrr": 3}},
        {"optim": {"schedule": "cosin"}},
    ],
    InvalidTypeError: [
        {"steps": 1.5},
        {"steps": True},
        {"compile": 1},
        {"data": 3},
        {"optim": {"lr": "fast"}},
    ],
    InvalidValueError: [
        *({"optim": {"lr": lr}} for lr in (0, -1.0, math.nan, math.inf)),
        {"steps": 0},
        {"log_every": 10, "eval_every": 15},
        {"accumulate": 3},
        {"device": "gpu"},
        {"seed": -1},
        {"seed": 2**64},
        {"model": {"n_kv_heads": 3}},
        {"model": {"n_heads": 5}},
        {"model": {"block": "gau"}},
        {"model": {"deepnorm": True}},
        {"model": {"mlp_ratio": 0.0}},
        {"model": {"parametrisation": "mup"}},
        {"data": {"context": 0}},
        {"data": {"source": ""}},
        {"data": {"tokens": "bpe"}},
        {"optim": {"beta2": 1.0}},
        {"optim": {"warmup": 1.5}},
        {"optim": {"grad_clip": -1.0}},
        {"optim": {"name": "sgd", "decay": "independent"}},
        {"images": {"image_share": 1.5}},
        {"images": {"patch": 3}},
        {"images": {"image_variance": 0.0}},
        {"images": {"levels": 1}},
        {"images": {"images": "photos"}},
    ],
}


def test_a_setting_that_is_gone_is_ignored_where_it_said_what_is_done_now():
    old = RunConfig().to_dict()
    old["data"] |= {"tokens": "bytes", "needle": 0.0}
    old["images"] |= {"images": "digits", "image_size": 8}
    assert RunConfig.from_dict(old) == RunConfig()


@each_row("kind", REFUSED)
def test_what_a_run_cannot_be_is_refused_by_an_error_that_names_it(kind):
    for values in REFUSED[kind]:
        with pytest.raises(kind) as error:
            RunConfig.from_dict(values)
        sections = [
            x if isinstance(x, dict) else {name: x} for name, x in values.items()
        ]
        words = [
            str(x) for section in sections for pair in section.items() for x in pair
        ]
        assert any(word in str(error.value) for word in words), values
    if kind is InvalidTypeError:
        with pytest.raises(kind):
            RunConfig(optim={"lr": 0.1})
