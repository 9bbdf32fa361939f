"""What lies just inside of what formulas accept, and shapes that only some callers use."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from qkeel.errors import InvalidValueError
from qkeel.functional.bounds import interaction_norm
from qkeel.functional.norms import inverse_l2, inverse_rms, l2_norm, rms_norm, unrounded
from qkeel.functional.rope import rotate
from qkeel.functional.scaling import gradient_scale
from qkeel.functional.statistics import head_formulas
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


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script`:DeprecationWarning"
)  # of torch's decompositions for dual numbers
@pytest.mark.parametrize(
    "formula", [l2_norm, rms_norm, inverse_l2, inverse_rms, "half", "interleaved", "half_reversed"]
)
def test_a_forward_mode_derivative_is_that_of_the_backward_pass(formula: Callable[[Tensor], Tensor] | str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 6, generator=generator, dtype=torch.float64).unbind()
    angles = torch.randn(2, generator=generator, dtype=torch.float64)  # the last two numbers do not turn
    of = formula if callable(formula) else partial(rotate, cos=angles.cos(), sin=angles.sin(), pairing=formula)
    with forward_ad.dual_level():
        value, change = forward_ad.unpack_dual(of(forward_ad.make_dual(x, v)))
    torch.testing.assert_close(value, of(x))
    torch.testing.assert_close(change, torch.autograd.functional.jacobian(of, x) @ v)


def test_values_of_two_data_sets_merge_by_their_query_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, 10.0, 4.0])
    counts = torch.tensor([3, 0, 0]), torch.tensor([1, 2, 0])  # of a head without rows any number will do, but no NaN
    for merge, expected in {"mean": [2.0, 10.0], "max": [5.0, 10.0], "min": [1.0, 2.0]}.items():
        monkeypatch.setitem(head_formulas.HEAD_FORMULAS, "mine", head_formulas.HeadFormula(None, merge))  # type: ignore[arg-type]
        merged = head_formulas.merge_formulas({"mine": a}, {"mine": b}, *counts)["mine"]
        assert merged[:2].tolist() == expected
        assert merged.isfinite().all()


@pytest.mark.parametrize("spoiled", [0, 1])
def test_one_number_that_is_none_makes_the_norm_of_its_head_none_and_of_no_other(spoiled: int) -> None:
    weights = torch.randn(2, 3, 4, 7, generator=torch.Generator().manual_seed(0))
    grams = weights @ weights.mT
    grams[spoiled, 1, 2, 3] = torch.nan
    found = interaction_norm(*grams)
    expected = torch.linalg.matrix_norm(weights[0].mT @ weights[1], ord=2)
    assert found.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]])
