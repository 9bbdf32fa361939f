"""Bounds and Gram identities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qkeel.functional.bounds import (
    change_factors,
    entropy_floor,
    gram_interaction_norms,
    logit_frobenius,
    rms_logit_bound,
    spectral_norm,
)
from qkeel.functional.logits import entropy
from qkeel.spec import AttentionSpec, RMSNorm

FLOORS = {
    16: {1: 2.716801, 2: 2.418708, 5: 0.490288, 10: 0.005555},
    64: {1: 4.143699, 2: 4.041087, 5: 1.802616, 10: 0.029206},
    512: {1: 6.236378, 5: 5.361735, 10: 0.247510},
}
CASES = [
    (n, float(sigma), value)
    for n, row in FLOORS.items()
    for sigma, value in row.items()
]


def tight(sigma: float, n: int) -> Tensor:
    """The row of L2 norm sigma with one entry up and the rest down, mean zero."""
    row = torch.full((n,), -sigma / math.sqrt(n * (n - 1)), dtype=torch.float64)
    row[0] = sigma * math.sqrt((n - 1) / n)
    return row


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize(("n", "sigma", "value"), CASES)
def test_entropy_floor_has_the_published_value(
    n: int, sigma: float, value: float
) -> None:
    assert entropy_floor(sigma, n) == pytest.approx(value, abs=5e-7)


@pytest.mark.parametrize(("n", "sigma", "value"), CASES)
def test_entropy_floor_is_reached_by_the_tight_row(
    n: int, sigma: float, value: float
) -> None:
    row = tight(sigma, n)
    assert row.norm().item() == pytest.approx(sigma, rel=1e-12)
    assert row.sum().item() == pytest.approx(0, abs=1e-10)
    assert entropy(row.softmax(-1)).item() == pytest.approx(
        entropy_floor(sigma, n), rel=1e-11
    )


@pytest.mark.parametrize(("n", "sigma", "value"), CASES)
def test_no_random_row_of_that_norm_is_under_the_entropy_floor(
    n: int, sigma: float, value: float
) -> None:
    # Directions of every kind: dense, one-hot and near the tight one.
    rows = torch.cat(
        [randn(300, n), randn(300, n) ** 5, tight(1.0, n) + 0.05 * randn(300, n)]
    )
    rows = rows - rows.mean(-1, keepdim=True)
    rows = rows * (sigma / rows.norm(dim=-1, keepdim=True))
    assert (entropy(rows.softmax(-1)) >= entropy_floor(sigma, n) - 1e-12).all()


@pytest.mark.parametrize(("n", "sigma"), [(16, 1.0), (16, 5.0), (64, 5.0)])
def test_gradient_search_ends_at_the_entropy_floor_and_not_below(
    n: int, sigma: float
) -> None:
    free = randn(8, n, seed=1).requires_grad_()
    optimizer = torch.optim.Adam([free], lr=0.1)
    for _ in range(300):
        row = free - free.mean(-1, keepdim=True)
        found = entropy((row * (sigma / row.norm(dim=-1, keepdim=True))).softmax(-1))
        optimizer.zero_grad()
        found.sum().backward()
        optimizer.step()
    assert found.min().item() == pytest.approx(entropy_floor(sigma, n), rel=1e-3)
    assert found.min().item() >= entropy_floor(sigma, n) - 1e-12


def test_entropy_floor_at_no_spread_is_that_of_the_uniform_row_and_of_one_key_zero() -> (
    None
):
    assert entropy_floor(0.0, 64) == pytest.approx(math.log(64), rel=1e-15)
    assert entropy_floor(3.0, 1) == 0.0


@pytest.mark.parametrize(
    ("head_dim", "bound"), [(64, 8.0), (128, 11.313708), (256, 16.0)]
)
def test_rms_normed_logits_reach_root_d_and_no_more(
    head_dim: int, bound: float
) -> None:
    assert rms_logit_bound(head_dim) == pytest.approx(bound, abs=5e-7)
    spec, pos = AttentionSpec(norm=RMSNorm(eps=0.0)), torch.arange(50)[None]
    q = randn(1, 1, 50, head_dim)
    logits = spec.logits(
        q, torch.cat([q[:, :, :1], -q[:, :, :49]], dim=2), pos, pos, {}
    )
    assert logits.abs().max().item() == pytest.approx(bound, abs=5e-7)
    assert logits.max().item() == logits[0, 0, 0, 0].item()


def test_norm_over_all_heads_bounds_one_head_at_root_d_times_heads_only() -> None:
    # All of a token's norm in one head: √(d·H·Hk) = 362 for d = 128, H = Hk = 32, where per head it is 11.3.
    x = torch.zeros(1, 32, 1, 128, dtype=torch.float64)
    x[0, 5] = randn(1, 128)
    pos = torch.zeros(1, 1, dtype=torch.int64)
    flat = AttentionSpec(norm=RMSNorm(over="layer", eps=0.0))
    worst = flat.logits(x, x, pos, pos, {})
    assert worst.max().item() == pytest.approx(math.sqrt(128 * 32 * 32), rel=1e-12)
    per_head = AttentionSpec(norm=RMSNorm(eps=0.0)).logits(
        x[:, 5:6], x[:, 5:6], pos, pos, {}
    )
    assert per_head.max().item() == pytest.approx(math.sqrt(128), rel=1e-12)


# O19: no T×T and no D×D matrix, the same number.


def test_logit_frobenius_is_that_of_the_dense_matrix() -> None:
    q, k = randn(2, 3, 17, 8), randn(2, 3, 11, 8, seed=1)
    dense = torch.linalg.matrix_norm(q @ k.mT)
    torch.testing.assert_close(logit_frobenius(q, k), dense, rtol=1e-12, atol=0)


def test_logit_frobenius_by_hand() -> None:
    # q kᵀ = [[1·3, 1·4], [2·3, 2·4]]: squares 9 + 16 + 36 + 64 = 125.
    q, k = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    assert logit_frobenius(q, k).item() == pytest.approx(math.sqrt(125), rel=1e-6)


@pytest.mark.parametrize("step", [1.0, 1e-3, 1e-6, 1e-9])
def test_logit_change_is_that_of_the_dense_difference_however_small_the_step(
    step: float,
) -> None:
    q, k = randn(2, 3, 17, 8), randn(2, 3, 11, 8, seed=1)
    dq, dk = step * randn(2, 3, 17, 8, seed=2), step * randn(2, 3, 11, 8, seed=3)
    q_new, k_new = q + dq, k + dk
    # The dense difference without its own cancellation, from the steps as float64 stored them.
    dq, dk = q_new - q, k_new - k
    dense = torch.linalg.matrix_norm(dq @ k_new.mT + q @ dk.mT)
    torch.testing.assert_close(
        logit_frobenius(*change_factors(q, k, q_new, k_new)), dense, rtol=1e-12, atol=0
    )


def test_logit_change_of_no_step_is_zero() -> None:
    q, k = randn(17, 8), randn(11, 8, seed=1)
    assert logit_frobenius(*change_factors(q, k, q.clone(), k.clone())).item() == 0.0


def test_logit_change_of_a_small_step_survives_float32() -> None:
    q, k, dq = randn(64, 16), randn(64, 16, seed=1), 1e-3 * randn(64, 16, seed=2)
    exact = torch.linalg.matrix_norm(dq @ k.mT)
    found = logit_frobenius(
        *change_factors(q.float(), k.float(), (q + dq).float(), k.float())
    )
    assert found.item() == pytest.approx(exact.item(), rel=1e-3)


def test_interaction_norms_are_those_of_the_dense_product() -> None:
    w_q, w_k = randn(4, 8, 40), randn(4, 8, 40, seed=1)
    frobenius, spectral = gram_interaction_norms(w_q @ w_q.mT, w_k @ w_k.mT)
    dense = w_q.mT @ w_k
    torch.testing.assert_close(
        frobenius, torch.linalg.matrix_norm(dense), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(
        spectral, torch.linalg.matrix_norm(dense, ord=2), rtol=1e-12, atol=0
    )


def test_interaction_norms_of_rank_deficient_weights_are_those_of_the_dense_product() -> (
    None
):
    w_q, w_k = randn(8, 40), randn(8, 40, seed=1)
    w_q[3:] = 0.0
    frobenius, spectral = gram_interaction_norms(w_q @ w_q.mT, w_k @ w_k.mT)
    dense = w_q.mT @ w_k
    assert frobenius.item() == pytest.approx(
        torch.linalg.matrix_norm(dense).item(), rel=1e-12
    )
    assert spectral.item() == pytest.approx(
        torch.linalg.matrix_norm(dense, ord=2).item(), rel=1e-12
    )


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (5, 5)])
def test_spectral_norm_is_the_largest_singular_value(shape: tuple[int, int]) -> None:
    w = randn(3, *shape)
    torch.testing.assert_close(
        spectral_norm(w), torch.linalg.svdvals(w)[:, 0], rtol=1e-12, atol=0
    )
