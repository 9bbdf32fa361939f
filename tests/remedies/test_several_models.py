"""Remedies on several models as one: as if applied to each, with one state."""

import pytest
import torch
from tests.contract.watch.small import batch, small
from tests.training import adamw
from torch import nn

import qkeel
from qkeel.errors import InvalidTypeError, InvalidValueError, RefusedError

REMEDIES = "lalr:tau=0.3+qk_weight_decay:decay=1+qk_clip:threshold=0.05"


def made():
    """Two models in a row, and the optimizer of both."""
    models = [small(0), small(1)]
    return models, adamw(nn.ModuleList(models), 0.01)


def marks(models):
    return [m for each in models for m in each.modules() if "_qkeel_applied" in vars(m)]


def weights(models):
    return torch.cat([p.detach().flatten() for m in models for p in m.parameters()])


def trained(how):
    """The weights after two steps under remedies that are applied to both by one call, or to each."""
    models, optimizer = made()
    examples = [batch(8), batch(9)]
    sites = [qkeel.find_sites(model, batch(8)) for model in models]
    applied = {
        "each": [(m, {"batch": x}) for m, x in zip(models, examples)],
        "examples": [(models, {"batch": examples})],
        "sites": [(models, {"sites": sites})],
        "by name": [(dict(zip("ab", models)), {"sites": dict(zip("ab", sites))})],
    }.get(how, [])
    handles = [qkeel.apply(one, REMEDIES, optimizer, **shown) for one, shown in applied]
    for number in range(2):
        models[1](models[0](batch(number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    assert not marks(models)
    return weights(models)


def test_one_call_does_what_one_of_each_model_does():
    each = trained("each")
    assert not torch.equal(trained(""), each)
    for how in ("examples", "sites", "by name"):
        assert torch.equal(trained(how), each), how


def test_what_cannot_be_applied_as_one_changes_nothing():
    models, optimizer = made()
    before = weights(models)
    for given, options, error, words in [
        ([], {}, InvalidValueError, "at least one model to apply remedies to"),
        ([models[0], models[0]], {}, InvalidValueError, "give each only once"),
        (
            models,
            {"batch": batch(0)},
            InvalidTypeError,
            "batches of each of the models",
        ),
        (
            models,
            {"sites": qkeel.find_sites(models[0], batch(0))[:0]},
            RefusedError,
            "no module with the name of any site",
        ),
        (
            [models[0], nn.Linear(8, 8)],
            {"batch": [batch(0), batch(0)]},
            RefusedError,
            "no attention",
        ),
    ]:
        with pytest.raises(error, match=words):
            qkeel.apply(given, REMEDIES, optimizer, **options)
    assert torch.equal(weights(models), before)
    assert not marks(models)
