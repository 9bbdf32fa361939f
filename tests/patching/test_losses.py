"""A scalar that a pass returned counts as the loss only if backward() began in it."""

import threading

import pytest
import torch
from tests.training import sgd
from torch import nn

import qkeel
from qkeel.patching.losses import ReturnedScalar, backward_roots
from qkeel.patching.roles import PassRole

LOSSES = {
    "itself": (lambda scalar, logits: scalar, True),
    "accumulated": (lambda scalar, logits: scalar / 4, True),
    "scaled": (lambda scalar, logits: torch.tensor(65536.0) * (scalar / 2), True),
    "another": (lambda scalar, logits: logits.sum(), False),
    "auxiliary": (lambda scalar, logits: logits.sum() + 0.01 * scalar, False),
    "weighted": (lambda scalar, logits: scalar * logits.sum(), False),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_scalar_is_the_loss_if_backward_began_in_it(name, compiled):
    def returned(x):
        return (x * 2).square().mean(), x * 2

    if compiled:
        returned = torch.compile(returned, backend="aot_eager")
    scalar, logits = returned(torch.ones(3, requires_grad=True))
    returned_scalar = ReturnedScalar(scalar)
    make_loss, is_loss = LOSSES[name]
    loss = make_loss(scalar, logits)
    assert not returned_scalar.is_loss
    loss.backward()
    assert returned_scalar.is_loss == is_loss


def test_the_roots_of_a_backward_pass_are_seen_from_other_threads():
    """As from the hooks of a GPU, which run in a thread of the engine."""
    roots = []

    def hook(gradient):
        thread = threading.Thread(target=lambda: roots.extend(backward_roots()))
        thread.start()
        thread.join()

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    loss = y.sum()
    loss.backward()
    assert loss.grad_fn in roots


class Preferring(nn.Module):
    """Returns logits, and a loss of its labels that a preference loss does not use."""

    def __init__(self):
        super().__init__()
        self.attention = qkeel.nn.Attention(d_model=8, n_heads=2)

    def forward(self, x):
        logits = self.attention(x)
        return logits.square().mean() + 6, logits


@pytest.mark.parametrize("uses_own", [False, True])
def test_a_loss_that_nobody_trains_is_not_recorded(uses_own):
    model = Preferring()
    optimizer = sgd(model)
    with qkeel.watch(model, optimizer) as monitor:
        scalar, logits = model(torch.randn(2, 5, 8))
        (scalar if uses_own else logits.sigmoid().mean()).backward()
        optimizer.step()
        recorded = monitor.sample.values.get("train_loss")
    assert recorded == (pytest.approx(scalar.item()) if uses_own else None)


@pytest.mark.parametrize("name", ["loss", "_loss", "_losses"])
def test_a_pass_that_returns_nothing_is_trained_by_the_loss_that_its_model_keeps(name):
    class Keeping(nn.Linear):
        def forward(self, x):
            loss = super().forward(x).square().mean()
            setattr(self, name, [loss] if name == "_losses" else loss)

    model, x = Keeping(3, 3), torch.ones(1, 3)
    output = model(x)
    role = PassRole.of_output(model, x, output)
    kept = getattr(model, name)
    (kept[0] if name == "_losses" else kept).backward()
    assert role.is_reached
