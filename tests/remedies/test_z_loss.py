"""z_loss: the gradient is that of a loss with the term written out, however the loss weighs its tokens."""

from collections.abc import Callable

import pytest
import torch
from tests.drawing import rand, randint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import qkeel
from qkeel.errors import RefusedError
from qkeel.functional.logits import z_loss

from .models import VOCAB, decoder, tokens

C = 0.3
Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHTS = rand(16, seed=5, dtype=torch.float64) + 0.1
IGNORED = torch.arange(16) % 3 == 0


def targets():
    return randint(0, VOCAB, (16,), seed=9)


def square(z):
    return torch.logsumexp(z, -1).square()


# Per way of weighing tokens: the loss, and the z term a user would write beside it.
WAYS = {
    "mean": (cross_entropy, lambda z: z_loss(z, C)),
    "sum": (
        lambda z, y: cross_entropy(z, y, reduction="sum"),
        lambda z: C * square(z).sum(),
    ),
    "one of four micro-batches": (
        lambda z, y: cross_entropy(z, y) / 4,
        lambda z: z_loss(z, C) / 4,
    ),
    "scaled for low precision": (
        lambda z, y: 65536 * cross_entropy(z, y),
        lambda z: 65536 * z_loss(z, C),
    ),
    "masked": (
        lambda z, y: cross_entropy(z, y.masked_fill(IGNORED, -100)),
        lambda z: z_loss(z[~IGNORED], C),
    ),
    "weighed": (
        lambda z, y: (WEIGHTS * cross_entropy(z, y, reduction="none")).sum(),
        lambda z: C * (WEIGHTS * square(z)).sum(),
    ),
}


def gradients(model, total):
    model.zero_grad()
    total(model(tokens()).flatten(0, 1)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_that_of_the_loss_with_the_term_written_out(way):
    model, (loss, term) = decoder().double(), WAYS[way]
    want = gradients(model, lambda z: loss(z, targets()) + term(z))
    plain = gradients(model, lambda z: loss(z, targets()))
    with qkeel.apply(model, "z_loss", coefficient=C):
        got = gradients(model, lambda z: loss(z, targets()))
    scale = max(float(w.abs().max()) for w in want)
    assert all(
        (g - w).abs().max() <= 1e-12 * scale for g, w in zip(got, want, strict=True)
    )
    assert (
        max(float((g - p).abs().max()) for g, p in zip(got, plain, strict=True))
        > 1e-3 * scale
    )


def test_a_token_that_is_all_but_certain_counts_fully():
    # There g_y = c (p_y - 1) is rounding alone; the other logits still tell c.
    z, y = torch.zeros(2, 5), torch.zeros(2, dtype=torch.long)
    z[:, 0] = 40.0
    model = nn.ModuleDict({"a": decoder(), "head": nn.Identity()})
    qkeel.apply(model, "z_loss:module=head", coefficient=C)
    ours, theirs = (z.clone().requires_grad_() for _ in range(2))
    cross_entropy(model["head"](ours), y).backward()
    (cross_entropy(theirs, y) + z_loss(theirs, C)).backward()
    assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize("order", [("z_loss", "cap"), ("cap", "z_loss")])
def test_with_a_final_cap_the_term_is_of_the_capped_logits_in_either_order(order):
    model = decoder().double()
    with torch.no_grad():
        model.head.weight.mul_(30)

    def capped(z):
        z = 2 * (z / 2).tanh()
        return cross_entropy(z, targets()) + z_loss(z, C)

    want = gradients(model, capped)
    specs = {"z_loss": f"z_loss:coefficient={C}", "cap": "final_softcap:cap=2"}
    with qkeel.apply(model, "+".join(specs[name] for name in order)):
        got = gradients(model, lambda z: cross_entropy(z, targets()))
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, rtol=1e-9, atol=1e-13)


def test_evaluation_costs_nothing():
    model = decoder()
    with qkeel.apply(model, "z_loss", coefficient=C), torch.no_grad():
        assert model(tokens()).grad_fn is None


def test_a_loss_that_is_no_cross_entropy_is_refused_and_counted_by_the_mean_if_asked():
    def smooth(z):
        return cross_entropy(z, targets(), label_smoothing=0.3)

    model = decoder().double()
    with qkeel.apply(model, "z_loss"), pytest.raises(RefusedError):
        gradients(model, smooth)
    want = gradients(model, lambda z: smooth(z) + z_loss(z, C))
    with qkeel.apply(model, "z_loss:weight=mean", coefficient=C):
        got = gradients(model, smooth)
    assert all(
        torch.allclose(g, w, rtol=0, atol=1e-13) for g, w in zip(got, want, strict=True)
    )
