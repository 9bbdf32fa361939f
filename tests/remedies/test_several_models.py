"""Remedies on several models as one: as if applied to each, with one state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.contract.watch.small import batch, small
from torch import nn

import qkeel
from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError

REMEDIES = "lalr:tau=0.3+qk_weight_decay:decay=1+qk_clip:threshold=0.05"


class Run:
    """Two models in a row under remedies that are applied to both by one call, or to each."""

    def __init__(self, how=""):
        self.models = [small(0), small(1)]
        self.optimizer = torch.optim.AdamW(
            nn.ModuleList(self.models).parameters(), lr=1e-2
        )
        examples, sites = (
            [batch(8), batch(9)],
            [qkeel.find_sites(m, batch(8)) for m in self.models],
        )
        self.monitor = qkeel.watch(self.models, self.optimizer, sites=sites)
        if how == "each":
            for model, example in zip(self.models, examples):
                qkeel.apply(model, REMEDIES, self.optimizer, batch=example)
        elif how:
            given: Any = (
                dict(zip("ab", self.models)) if how == "by name" else self.models
            )
            shown: dict[str, Any] = (
                {"batch": examples} if how == "examples" else {"sites": sites}
            )
            shown = {"sites": dict(zip("ab", sites))} if how == "by name" else shown
            self.handle = qkeel.apply(given, REMEDIES, self.optimizer, **shown)

    def train(self, first, last):
        for number in range(first, last):
            self.models[1](self.models[0](batch(number))).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def weights(self):
        return torch.cat(
            [p.detach().flatten() for model in self.models for p in model.parameters()]
        )


def test_one_call_does_what_one_of_each_model_does():
    runs = {how: Run(how) for how in ("", "each", "examples", "sites", "by name")}
    for run in runs.values():
        run.train(0, 2)
    assert not torch.equal(runs[""].weights, runs["each"].weights)
    for how in ("examples", "sites", "by name"):
        assert torch.equal(runs[how].weights, runs["each"].weights), how
    runs["sites"].handle.remove()
    assert not any(
        "_qkeel_applied" in vars(m)
        for model in runs["sites"].models
        for m in model.modules()
    )


def test_what_cannot_be_applied_as_one_changes_nothing():
    run = Run()
    before = run.weights
    for given, options, error, words in [
        ([], {}, InvalidValueError, "at least one model to apply remedies to"),
        ([run.models[0], run.models[0]], {}, InvalidValueError, "give each only once"),
        (
            run.models,
            {"batch": batch(0)},
            InvalidTypeError,
            "batches of each of the models",
        ),
        (
            run.models,
            {"sites": qkeel.find_sites(run.models[0], batch(0))[:0]},
            RefusedError,
            "no module with the name of any site",
        ),
        (
            [run.models[0], nn.Linear(8, 8)],
            {"batch": [batch(0), batch(0)]},
            RefusedError,
            "no attention",
        ),
    ]:
        with pytest.raises(error, match=words):
            qkeel.apply(given, REMEDIES, run.optimizer, **options)  # type: ignore[arg-type]
    assert torch.equal(run.weights, before)
    assert not any(
        "_qkeel_applied" in vars(m) for model in run.models for m in model.modules()
    )
