"""Points on the curves of caps and normalizers, worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qkeel.functional import logits as F
from qkeel.functional.logits import softcap


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def weights(kind: Callable[..., Tensor], z: Tensor, *args: Any) -> list[float]:
    """One row of weights; a mask among the arguments is a row too."""
    rows = [a[None] if isinstance(a, Tensor) and a.ndim == 1 else a for a in args]
    return kind(z[None], *rows)[0].tolist()


def test_softcap_at_fifty() -> None:
    z = f64(1, 10, 25, 50, 100, 500, -25, 0)
    expected = [0.9999, 9.8688, 23.1059, 38.0797, 48.2014, 50.0000, -23.1059, 0.0]
    assert softcap(z, 50.0).tolist() == pytest.approx(expected, abs=5e-5)


def test_softcap_at_infinity_leaves_logits_alone() -> None:
    z = f64(-1e6, 0, 3, 1e6)
    assert torch.equal(softcap(z, math.inf), z)


def test_softcap_of_infinite_logits_is_the_cap() -> None:
    assert softcap(f64(math.inf, -math.inf), 30.0).tolist() == [30.0, -30.0]


def test_softpick_of_two_one_zero_minus_one() -> None:
    # e² - 1 = 6.389, e - 1 = 1.718, 0, |1/e - 1| = 0.632: 6.389/8.739 and 1.718/8.739.
    assert weights(F.softpick, f64(2, 1, 0, -1)) == pytest.approx(
        [0.7311, 0.1966, 0, 0], abs=5e-5
    )


def test_softpick_of_non_positive_logits_is_zero_without_a_sink() -> None:
    assert weights(F.softpick, f64(0, -1, -2)) == [0.0, 0.0, 0.0]
    assert weights(F.softpick, f64(-1e4, -2e4)) == [0.0, 0.0]


def test_softpick_of_huge_logits_is_finite() -> None:
    assert weights(F.softpick, f64(1e4, 1e4, 0)) == pytest.approx(
        [0.5, 0.5, 0.0], abs=1e-7
    )


def test_softmax_by_hand() -> None:
    # Weights in the ratio 1 : 2 : 3.
    z = f64(0, math.log(2), math.log(3))
    assert weights(F.softmax, z) == pytest.approx([1 / 6, 2 / 6, 3 / 6], rel=1e-14)
    visible = torch.tensor([True, False, True])
    assert weights(F.softmax, z, visible) == pytest.approx([1 / 4, 0, 3 / 4], rel=1e-14)


def test_sink_of_zero_adds_one_to_the_denominator() -> None:
    z = f64(0, math.log(2), math.log(3))
    assert weights(F.sink_softmax, z, torch.tensor(0.0)) == pytest.approx(
        [1 / 7, 2 / 7, 3 / 7], rel=1e-14
    )


def test_sink_is_softmax_with_one_more_logit_dropped_and_softmax_times_a_sigmoid() -> (
    None
):
    z = torch.randn(
        3, 5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    sink = torch.tensor([-2.0, 0.3, 4.0], dtype=torch.float64).view(3, 1, 1)
    found = F.sink_softmax(z, sink)
    dropped = torch.cat([z, sink.expand(3, 5, 1)], dim=-1).softmax(-1)[..., :-1]
    rescaled = z.softmax(-1) * torch.sigmoid(z.logsumexp(-1, keepdim=True) - sink)
    torch.testing.assert_close(found, dropped, rtol=0, atol=4e-16)
    torch.testing.assert_close(found, rescaled, rtol=0, atol=4e-16)


def test_sigmoid_weights_by_hand() -> None:
    # σ(ln 3) = 3/4, and with a bias of -ln 3 a zero logit weighs 1/4.
    assert weights(F.sigmoid, f64(math.log(3), 0), 0.0) == pytest.approx(
        [0.75, 0.5], rel=1e-14
    )
    assert weights(F.sigmoid, f64(math.log(3), 0), -math.log(3)) == pytest.approx(
        [0.5, 0.25], rel=1e-14
    )


def test_squared_relu_divides_by_the_number_of_visible_keys_after_squaring() -> None:
    z = f64(2, -3, 4, 6)
    assert weights(F.squared_relu, z) == [1.0, 0.0, 4.0, 9.0]
    visible = torch.tensor([True, True, True, False])
    assert weights(F.squared_relu, z, visible) == pytest.approx(
        [4 / 3, 0.0, 16 / 3, 0.0], rel=1e-15
    )


@pytest.mark.parametrize("n", [1, 2, 7, 512])
def test_entropy_of_a_uniform_row_is_ln_n(n: int) -> None:
    assert F.entropy(
        torch.full((n,), 1 / n, dtype=torch.float64)
    ).item() == pytest.approx(math.log(n), abs=1e-13)


def test_entropy_by_hand() -> None:
    # 1/2, 1/4, 1/4: ln 2 · (1/2 + 2/4 + 2/4) = 1.5 ln 2; a one-hot and an empty row have none.
    assert F.entropy(f64(0.5, 0.25, 0.25)).item() == pytest.approx(
        1.5 * math.log(2), rel=1e-15
    )
    assert F.entropy(f64(0, 1, 0)).item() == 0.0
    assert F.entropy(f64(0, 0, 0)).item() == 0.0


def test_entropy_does_not_see_how_much_went_to_a_sink() -> None:
    assert F.entropy(f64(0.05, 0.025, 0.025)).item() == pytest.approx(
        1.5 * math.log(2), rel=1e-14
    )


def test_entropy_has_a_finite_gradient_where_a_weight_is_zero() -> None:
    p = f64(0.5, 0.5, 0.0).requires_grad_()
    F.entropy(p).backward()
    assert p.grad.isfinite().all()
    empty = f64(0, 0, 0).requires_grad_()
    F.entropy(empty).backward()
    assert empty.grad.isfinite().all()


def test_streaming_entropy_is_logsumexp_minus_the_mean_logit() -> None:
    # O25: attention run with v := k gives Σ_j p_ij z_ij = scale · q_i·o_i, so no T×T matrix is needed.
    g = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(2, 3, 9, 16, dtype=torch.float64, generator=g) for _ in range(2)
    )
    scale, visible = 16**-0.5, torch.ones(9, 9, dtype=torch.bool).tril()
    z = scale * q @ k.mT
    p = F.softmax(z, visible)
    lse = z.masked_fill(~visible, -math.inf).logsumexp(-1)
    streamed = lse - scale * (q * (p @ k)).sum(-1)
    torch.testing.assert_close(streamed, F.entropy(p), rtol=0, atol=3e-15)
    assert F.entropy(p)[..., 0].abs().max() == 0  # the first causal row has one key
