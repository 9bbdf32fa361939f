"""Training through a part of a model is told: its calls are in no pass of the model."""

import pytest
import torch
from tests.attention import Joint
from tests.drawing import randn
from tests.training import sgd, step
from torch import nn
from torch.utils.checkpoint import checkpoint

import qkeel
from qkeel.errors import QkeelWarning


class Model(nn.Module):
    def __init__(self, *, reentrant=None):
        super().__init__()
        self.encoder, self.head, self.reentrant = Joint(), nn.Linear(8, 8), reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.head(self.encoder(x))
        return self.head(checkpoint(self.encoder, x, use_reentrant=self.reentrant))


X = randn(2, 6, 8, seed=0)


def steps(model, loss, n=2):
    optimizer = sgd(model, 0.01)
    with qkeel.watch(model, optimizer, every=1) as monitor:
        for _ in range(n):
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor


def whole_and_part(model):
    return model(X).square().mean() + model.encoder(10 * X).square().mean()


def test_training_through_a_part_is_told_once():
    with pytest.warns(QkeelWarning, match="encoder was trained by a call") as said:
        steps(Model(), whole_and_part)
    assert len(said) == 1


def test_a_clip_tells_too():
    model = Model()
    optimizer = sgd(model, 0.01)
    qkeel.apply(model, "qk_clip:threshold=1", optimizer, batch=X)
    step(model, optimizer, X)
    with pytest.warns(QkeelWarning, match="no remedy's limit counts such calls"):
        whole_and_part(model).backward()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_calls_through_the_model_and_calls_that_train_nothing_are_not_told(
    reentrant, recwarn
):
    def loss(model):
        x = X.clone().requires_grad_()
        first = model(x).square().mean()
        model.encoder(x)  # features that somebody logs
        with torch.no_grad():
            model.encoder(x)
        return first + model(x).square().mean()

    model = Model(reentrant=reentrant)
    steps(model, loss, n=12)
    assert not recwarn.list
    assert not model.encoder._forward_hooks


def test_the_hooks_go_after_a_few_passes():
    model = Model()
    optimizer = sgd(model, 0.01)
    with qkeel.watch(model, optimizer):
        model(X)
        assert model.encoder._forward_hooks
        for _ in range(8):
            model(X)
        assert not model.encoder._forward_hooks
