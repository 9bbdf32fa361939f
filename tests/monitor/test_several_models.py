"""Several models watched as one: an encoder and a decoder apart, or all stages of a pipeline that a process has."""

import numpy as np
import pytest
import torch
from tests.contract.watch.small import batch, small
from tests.training import adamw, sgd
from torch import nn

import qkeel
from qkeel.errors import (
    AlreadyAppliedError,
    InvalidTypeError,
    InvalidValueError,
    RefusedError,
)
from qkeel.report import write


class Run:
    """Two models in a row, one optimizer, three steps."""

    def __init__(self):
        self.models = {"encoder": small(0), "decoder": small(1)}
        self.optimizer = adamw(nn.ModuleDict(self.models), 0.01)
        self.losses = []

    def step(self):
        x = batch(len(self.losses))
        for model in self.models.values():
            x = model(x)
        loss = x.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))

    def watched(self, *monitors):
        found = []
        for _ in range(3):
            self.step()
            found.append(
                [monitor.sample for monitor in monitors if monitor.sample is not None]
            )
        return [[*of] for of in zip(*found)]


def test_one_monitor_records_what_one_of_each_model_does(tmp_path):
    plain, apart, joined = Run(), Run(), Run()
    plain.watched()
    one_each = apart.watched(
        *(qkeel.watch(model, apart.optimizer) for model in apart.models.values())
    )
    monitor = qkeel.watch(joined.models, joined.optimizer, sinks=tmp_path / "run")
    (samples,) = joined.watched(monitor)
    assert joined.losses == plain.losses
    weights = [
        torch.cat([p.flatten() for m in run.models.values() for p in m.parameters()])
        for run in (plain, joined)
    ]
    assert torch.equal(*weights)
    names = [f"{model}.blocks.{i}" for model in joined.models for i in (0, 1)]
    assert [site.name for site in monitor.sites] == names
    assert all(
        monitor.model.get_submodule(site.name) is site.module for site in monitor.sites
    )
    assert all(
        monitor.model.get_parameter(s.parameter) is not None
        for site in monitor.sites
        for s in site.query
    )
    for sample, first, second in zip(samples, *one_each, strict=True):
        assert sample.layers == tuple(names)
        assert sample.heads.keys() == first.heads.keys()
        for field, found in sample.heads.items():
            np.testing.assert_array_equal(
                found, np.concatenate([first.heads[field], second.heads[field]])
            )
    assert [*monitor.read()] == names
    monitor.close()
    page = write(tmp_path / "run", tmp_path / "page.html").read_text(encoding="utf-8")
    places = [page.index(f'<th scope="row">{name}<') for name in names]
    assert places == sorted(places)
    assert [len(model._forward_hooks) for model in joined.models.values()] == [0, 0]


def test_without_an_optimizer_a_step_is_a_pass_of_each(
    recwarn,
):
    models = [small(0), small(1), nn.Linear(8, 8)]
    with qkeel.watch(nn.ModuleList(models), every=2) as monitor:
        for training in (True, False):
            for i in range(4):
                for model in models[:: 1 if i else -1]:  # in any order
                    model.train(training)(batch(i))
        assert monitor.history.steps.tolist() == [0, 2]
        assert (
            [*monitor.read("train")]
            == [*monitor.read("eval")]
            == [f"{i}.blocks.{j}" for i in (0, 1) for j in (0, 1)]
        )
    said = [str(w.message) for w in recwarn if "are unknown" in str(w.message)]
    assert [text.partition(" in a ")[0] for text in said] == [
        "the weights behind the heads are unknown, so they are not watched: 2: saw no attention"
    ]


def test_what_cannot_be_watched_as_one_is_said_and_nothing_is_left():
    model, other = small(0), small(1)
    cases = [
        ([], {}, InvalidValueError, "at least one model"),
        ([model, model], {}, InvalidValueError, "'0' inside '1'"),
        ([model, model.blocks], {}, InvalidValueError, "'1' inside '0'"),
        ([model, 3], {}, InvalidTypeError, "Module to watch as '1', got int"),
        (
            {"a": other, "a.b": model},
            {},
            InvalidValueError,
            "model names made of letters",
        ),
        (
            {"a": other, "keys": model},
            {},
            InvalidValueError,
            "and not the name of a method",
        ),
        ([model, other], {"probe_batch": batch(0)}, RefusedError, "of one model"),
        (
            [model, other],
            {"sites": [qkeel.find_sites(model, batch(0))]},
            InvalidTypeError,
            "of each of the models",
        ),
        (
            [model, other],
            {"optimizer": sgd(small(2), lr=1e-3)},
            InvalidValueError,
            "does not contain any",
        ),
    ]
    for given, options, error, words in cases:
        with pytest.raises(error, match=words):
            qkeel.watch(given, **options)
    with qkeel.watch(other), pytest.raises(AlreadyAppliedError):
        qkeel.watch([model, other])
    assert not model._forward_hooks
