"""Properties of the maps from logits to weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkeel.functional import logits as F

from .properties import few, randn, seeds, some_visible

WEIGHS = {
    "softmax": F.softmax,
    "sink": lambda z, visible: F.sink_softmax(
        z, torch.tensor(0.5, dtype=z.dtype), visible
    ),
    "sigmoid": lambda z, visible: F.sigmoid(z, -1.0, visible),
    "squared_relu": F.squared_relu,
    "softpick": F.softpick,
}
every_map = pytest.mark.parametrize("weigh", WEIGHS.values(), ids=list(WEIGHS))
names = st.sampled_from(sorted(WEIGHS))


@few
@given(seed=seeds, size=st.floats(0.1, 1e4), name=names)
def test_hidden_keys_weigh_nothing_whatever_stands_there_and_the_others_as_if_alone(
    seed: int, size: float, name: str
) -> None:
    z, visible, weigh = size * randn(seed, 6, 5), some_visible(seed, 6, 5), WEIGHS[name]
    weights = weigh(z, visible)
    assert (weights >= 0).all()
    for junk in (1e9, -torch.inf, torch.nan):
        assert torch.equal(weigh(z.masked_fill(~visible, junk), visible), weights)
    for row, shown, found in zip(z, visible, weights):
        assert not found[~shown].any()
        torch.testing.assert_close(
            found[shown], weigh(row[None, shown], None)[0], rtol=1e-12, atol=1e-15
        )
    if name == "softmax":
        total = visible.any(-1).double()
        torch.testing.assert_close(weights.sum(-1), total, rtol=0, atol=1e-12)


@every_map
def test_an_empty_row_has_finite_gradients(weigh):
    z = (50 * randn(0, 6, 5)).requires_grad_()
    visible = some_visible(0, 6, 5)
    # Squares, so that the upstream gradient differs between entries.
    (weigh(z, visible) * randn(1, 6, 5)).sum().backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()
    assert (z.grad[~visible] == 0).all()


@every_map
def test_the_gradient_is_right(weigh):
    visible = some_visible(3, 4, 5)
    torch.autograd.gradcheck(
        lambda z: weigh(z, visible), randn(0, 4, 5).requires_grad_()
    )


@few
@given(seed=seeds, factor=st.floats(1e-6, 1e6))
def test_entropy_is_that_of_the_row_made_to_sum_to_one(
    seed: int, factor: float
) -> None:
    p = randn(seed, 9).abs()
    assert F.entropy(factor * p).item() == pytest.approx(F.entropy(p).item(), rel=1e-10)


def test_without_keys_there_are_no_weights_and_eps_is_added_behind_the_maximum():
    assert all(weigh(randn(0, 3, 0), None).shape == (3, 0) for weigh in WEIGHS.values())
    for z in ([0.5, -1.0, 0.25], [-0.5, -1.0, -2.0], [2.0, 1.0, 0.0]):
        m = max(*z, 0.0)
        rises = [math.exp(x - m) - math.exp(-m) for x in z]
        expected = [max(x, 0.0) / (sum(map(abs, rises)) + 0.5) for x in rises]
        found = F.softpick(torch.tensor([z], dtype=torch.float64), None, eps=0.5)[
            0
        ].tolist()
        assert found == pytest.approx(expected, rel=1e-12), z
