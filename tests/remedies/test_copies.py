"""A copy of a model that is trained without the model's remedy on steps is told of; copies that are not trained are silent."""

import copy
import pickle

import pytest
import torch
from tests.drawing import randn
from tests.training import sgd, step, warned
from torch import nn
from torch.optim.swa_utils import AveragedModel

import qkeel
from qkeel.errors import QkeelWarning

from .models import D_MODEL, attention

REMEDIES = ["qk_clip", "lalr", "qk_lr:factor=0.5", "frozen_qk", "spectral_cap:cap=9"]
X = randn(2, 5, D_MODEL, seed=0)


def _trained(model, remedy):
    copied = copy.deepcopy(model)
    return copied, sgd(copied, 0.01)


def _trained_in_backward(model, remedy):
    copied, optimizer = _trained(model, remedy)

    def update(p):
        with torch.no_grad():
            p.sub_(0.01 * p.grad)
        p.grad = None

    for p in copied.parameters():
        p.register_post_accumulate_grad_hook(update)
    return copied, optimizer


def _remedied(model, remedy):
    copied, optimizer = _trained(model, remedy)
    qkeel.apply(copied, remedy, optimizer, batch=X)
    return copied, optimizer


def _plain_pickle(model, remedy):
    return _trained(pickle.loads(pickle.dumps(copy.deepcopy(model))), remedy)


TRAINED = [_trained, _trained_in_backward]


@pytest.mark.parametrize("remedy", REMEDIES)
@pytest.mark.parametrize("made", [*TRAINED, _remedied, _plain_pickle])
def test_a_copy_that_is_trained_without_the_remedy_is_told_of_once(remedy, made):
    model = nn.Sequential(attention(torch.float32), attention(torch.float32))
    optimizer = sgd(model, 0.01)
    qkeel.apply(model, remedy, optimizer, batch=X)
    step(model, optimizer, X)
    copied = made(model, remedy)
    with warned(QkeelWarning) as said:
        for _ in range(5):
            step(*copied, X)
            step(model, optimizer, X)
    about = [text for text in said if "is a copy of the model" in text]
    assert len(about) == (made in TRAINED)
    assert len(said) == len(about)


def _detached(model, target):
    return target(X).detach()


def _without_gradients(model, target):
    with torch.no_grad():
        return target(X)


def _through_the_input(model, target):
    """As a frozen critic, through which gradients reach what comes before it."""
    x = X.clone().requires_grad_()
    return torch.autograd.grad(target(x).sum(), x)[0]


@pytest.mark.parametrize("asked", [_detached, _without_gradients, _through_the_input])
@pytest.mark.parametrize("update", ["average", "every third step", "never"])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_averages_and_target_networks_are_not_told_of(asked, update, is_frozen):
    model = nn.Sequential(attention(torch.float32), attention(torch.float32))
    optimizer = sgd(model, 0.01)
    qkeel.apply(model, "qk_clip", optimizer, batch=X)
    averaged = AveragedModel(model) if update == "average" else None
    target = copy.deepcopy(model) if averaged is None else averaged.module
    target.requires_grad_(not is_frozen)
    with warned(QkeelWarning) as said:
        for number in range(9):
            loss = (model(X) - asked(model, target)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if averaged is not None:
                averaged.update_parameters(model)
            elif update == "every third step" and number % 3 == 2:
                target.load_state_dict(model.state_dict())
    assert said == []
