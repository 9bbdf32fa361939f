"""The three norms: at zero, under autocast, with a gain, of what is no number, and derivatives of their factor."""

import math

import pytest
import torch
from tests.each_row import each_row

from qkeel.errors import InvalidTypeError
from qkeel.functional.norms import (
    _Resize,
    _widened,
    apply_gain,
    l2_norm,
    layer_norm,
    rms_norm,
    unrounded,
    widest,
)

from .properties import randn

every_norm = each_row("norm", [l2_norm, rms_norm, layer_norm])


@every_norm
def test_a_zero_vector_stays_zero_with_a_finite_gradient(norm):
    x = torch.zeros(2, 4, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 4))
    assert x.grad.isfinite().all()


def test_what_is_no_number_of_16_bits_or_more_is_refused():
    for wrong in (torch.ones(4).long(), torch.ones(4).to(torch.float8_e4m3fn)):
        with pytest.raises(InvalidTypeError, match=f"got {wrong.dtype}"):
            _widened(wrong)


# An eps of 10 is larger than the vectors.
@each_row("mean, eps", [(False, 1e-6), (False, 10.0), (True, 1e-6), (True, 10.0)])
def test_norms_have_second_derivatives_and_the_factor_has_derivatives_of_its_own(
    mean, eps
):
    def parts(x):
        return _Resize.apply(x, eps, mean)

    x = randn(0, 2, 5).requires_grad_()
    torch.autograd.gradgradcheck(lambda x: parts(x)[0], x)
    torch.autograd.gradcheck(lambda x: parts(x)[:2], x)
    assert not parts(x)[2].requires_grad


@each_row("shape", [(), (4,), (2, 4), (2, 1)])
def test_a_gain_reaches_the_numbers_its_shape_names(shape):
    x, gain = randn(0, 3, 2, 5, 4), randn(1, 8)[: math.prod(shape)].reshape(shape)
    by_head = gain.expand(2, 4)
    expected = torch.stack([x[:, h] * by_head[h] for h in range(2)], dim=1)
    assert torch.equal(apply_gain(x, gain), expected)


def test_autocast_rounds_no_product_inside():
    x = torch.randn(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with unrounded(x):
            assert (x @ x).dtype is torch.float32


def test_what_a_device_without_float64_and_other_devices_compute_in():
    assert widest(torch.device("mps")) == torch.float32
    assert widest(torch.device("cpu")) == torch.float64
