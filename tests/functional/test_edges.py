"""What lies just inside of what formulas accept, and shapes that only some callers use."""

from __future__ import annotations

import math

import pytest
import torch

from qkeel.errors import InvalidValueError
from qkeel.functional.norms import unrounded
from qkeel.functional.scaling import gradient_scale
from qkeel.functional.statistics.class_stats import norm_ratio


def test_cosines_of_two_numbers_have_a_scale_and_of_one_have_none() -> None:
    # On a circle M is the Bessel function I₀, M(2λ)/M(λ)² ≈ √(πλ): λ (1 - √(πλ)/n) is largest at (2n/3)²/π.
    assert gradient_scale(16, 2) == pytest.approx((2 * 16 / 3) ** 2 / math.pi, rel=0.01)
    with pytest.raises(InvalidValueError, match="at least 2 numbers"):
        gradient_scale(16, 1)


def test_autocast_rounds_no_product_inside() -> None:
    x = torch.randn(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with unrounded(x):
            assert (x @ x).dtype is torch.float32


def test_the_competition_index_takes_classes_last_whatever_comes_before() -> None:
    norms = torch.tensor([[[2.0, 6.0], [1.0, 5.0], [4.0, 4.0]]])
    counts = torch.tensor([[[1, 1], [1, 0], [2, 3]]])
    torch.testing.assert_close(norm_ratio(norms, counts), torch.tensor([[3.0, math.nan, 1.0]]), equal_nan=True)
