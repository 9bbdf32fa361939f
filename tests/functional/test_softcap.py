"""Properties of the soft cap."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkeel.errors import InvalidValueError, QkeelError
from qkeel.functional.logits import softcap

from .properties import few

caps = st.floats(0.1, 1e3)
line = torch.linspace(-2000, 2000, 4001, dtype=torch.float64)


@few
@given(cap=caps)
def test_softcap_is_monotone_odd_and_within_the_cap(cap: float) -> None:
    y = softcap(line, cap)
    assert (y.diff() >= 0).all()
    assert torch.equal(y.flip(0), -y)
    assert (y.abs() <= cap).all()
    assert (y.abs() <= line.abs()).all()


def test_an_infinite_cap_is_the_identity_with_gradient_one():
    z = line.clone().requires_grad_()
    y = softcap(z, math.inf)
    assert torch.equal(y, line)
    y.sum().backward()
    assert torch.equal(z.grad, torch.ones_like(line))


@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan, -math.inf])
def test_a_cap_that_is_not_above_zero_is_refused(cap):
    with pytest.raises(InvalidValueError, match="expected a cap above 0") as caught:
        softcap(line, cap)
    assert isinstance(caught.value, QkeelError)
    assert isinstance(caught.value, ValueError)
