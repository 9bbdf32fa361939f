"""Properties of the three norms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.each_row import each_row

from qkeel.errors import InvalidTypeError
from qkeel.functional.norms import (
    _Resize,
    _widened,
    l2_norm,
    layer_norm,
    rms_norm,
    wide,
)

from .properties import few, randn, seeds

NORMS = [l2_norm, rms_norm, layer_norm]
every_norm = pytest.mark.parametrize("norm", NORMS)


@few
@given(seed=seeds, d=st.integers(2, 64))
def test_the_result_has_norm_one_or_root_d(seed: int, d: int) -> None:
    x = randn(seed, 3, d)
    for norm, size in (
        (l2_norm, 1.0),
        (rms_norm, math.sqrt(d)),
        (layer_norm, math.sqrt(d)),
    ):
        found = norm(x, eps=0.0).norm(dim=-1)
        torch.testing.assert_close(
            found, torch.full_like(found, size), rtol=1e-12, atol=0
        )


@every_norm
def test_a_zero_vector_stays_zero_with_a_finite_gradient(norm):
    x = torch.zeros(2, 4, requires_grad=True)
    y = norm(x)
    assert torch.equal(y, torch.zeros(2, 4))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@every_norm
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_the_callers_dtype_comes_back_and_the_work_is_done_in_float32_or_wider(
    norm, dtype
):
    x = (300 * randn(0, 3, 64)).to(dtype)  # squares overflow float16
    y = norm(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, norm(x.to(wide(dtype))).to(dtype), rtol=0, atol=0)
    assert y.isfinite().all()


@every_norm
@pytest.mark.parametrize(
    "eps", [0.0, 1e-6, 10.0], ids=["no eps", "small eps", "eps larger than the vector"]
)
def test_the_gradient_is_right(norm, eps):
    torch.autograd.gradcheck(
        lambda x: norm(x, eps=eps), randn(0, 2, 5).requires_grad_()
    )


@each_row("mean", [False, True])
def test_norms_have_second_derivatives_and_the_factor_has_derivatives_of_its_own(
    mean,
):
    x = randn(0, 2, 5).requires_grad_()
    # Larger than the vectors.
    for eps in (1e-6, 10.0):

        def parts(x, eps=eps):
            return _Resize.apply(x, eps, mean)  # type: ignore[no-any-return]

        torch.autograd.gradgradcheck(lambda x, parts=parts: parts(x)[0], x)
        torch.autograd.gradcheck(lambda x, parts=parts: parts(x)[1], x)
        torch.autograd.gradcheck(lambda x, parts=parts: parts(x)[:2], x)
        assert not parts(x)[2].requires_grad


@each_row("norm", NORMS)
def test_each_of_many_vectors_is_normalised_alike_under_vmap(norm):
    x = randn(0, 4, 3, 5)
    assert torch.equal(torch.func.vmap(norm, in_dims=1, out_dims=1)(x), norm(x))


def test_what_is_no_number_of_16_bits_or_more_is_refused():
    for wrong in (
        torch.ones(2, 4, dtype=torch.int64),
        torch.ones(2, 4).to(torch.float8_e4m3fn),
    ):
        with pytest.raises(
            InvalidTypeError, match=f"16 bits or more to normalise, got {wrong.dtype}"
        ):
            _widened(wrong)
