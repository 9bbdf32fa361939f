"""Properties of scales and gains."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkeel.functional.logits import floor_log_temperature, log_n
from qkeel.functional.norms import apply_gain

from .properties import few, randn


@few
@given(train_length=st.integers(2, 10_000))
def test_log_n_is_one_at_the_training_length_and_grows_with_n(
    train_length: int,
) -> None:
    n = torch.arange(1, 12_000)
    factor = log_n(n, train_length, dtype=torch.float64)
    assert factor[train_length - 1].item() == pytest.approx(1.0, abs=1e-14)
    assert (factor.diff() > 0).all()
    clipped = log_n(n, train_length, clip=True, dtype=torch.float64)
    assert torch.equal(clipped, factor.clamp_min(1.0))


def test_log_n_of_no_keys_is_zero_not_minus_infinity():
    assert log_n(torch.tensor([0, -3]), 512).tolist() == [0.0, 0.0]


@few
@given(alpha=st.floats(0, 2), floor=st.integers(1, 100))
def test_the_floor_temperature_is_one_below_the_floor_and_never_falls(
    alpha: float, floor: int
) -> None:
    factor = floor_log_temperature(torch.arange(-20, 500), alpha, floor, torch.float64)
    assert (factor[: 20 + floor - 1] == 1).all()
    assert (factor.diff() >= 0).all()


@pytest.mark.parametrize("shape", [(), (4,), (2, 4), (2, 1)])
def test_a_gain_reaches_the_numbers_its_shape_names(shape):
    x, gain = randn(0, 3, 2, 5, 4), randn(1, 8)[: math.prod(shape)].reshape(shape)
    whole = gain.expand(2, 4)
    expected = torch.stack([x[:, h] * whole[h] for h in range(2)], dim=1)
    torch.testing.assert_close(apply_gain(x, gain), expected, rtol=0, atol=0)
