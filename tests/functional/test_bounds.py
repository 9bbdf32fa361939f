"""Bounds, norms of products of weights, largest eigenvalues by squarings and the spectra of a step, against dense float64."""

import itertools
import math

import pytest
import torch
from tests.each_row import each_row
from torch.testing import assert_close

from qkeel.functional.bounds import (
    entropy_floor,
    gram_interaction_norms,
    gram_spectral_norm,
    interaction_norm,
    logit_frobenius,
    small_product,
    spectrum,
    squared_eigenvalue,
    step_products,
)

from .properties import randn


def test_the_entropy_floor_of_two_keys_is_that_of_a_coin():
    # Two logits ±σ/√2: log odds σ√2.
    p = 1 / (1 + math.exp(-0.7 * math.sqrt(2)))
    coin = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert entropy_floor(0.7, 2) == pytest.approx(coin)


def test_grams_that_are_small_zero_or_not_finite_have_norms_that_are():
    w = 1e-3 * randn(1, 4, 3, 6)
    w[1, 2] = 0.0  # singular
    w[2] = 0.0
    v = w.flip(-1)
    a, b, dense = w @ w.mT, v @ v.mT, w.mT @ v
    for norms, expected in zip(
        (*gram_interaction_norms(a, b), gram_spectral_norm(a), logit_frobenius(w, v)),
        (
            dense.norm(dim=(1, 2)),
            torch.linalg.matrix_norm(dense, 2),
            torch.linalg.matrix_norm(w, 2),
            torch.linalg.matrix_norm(w @ v.mT),
        ),
        strict=True,
    ):
        assert_close(norms, expected, rtol=1e-9, atol=1e-12)
    for spoiled, wrong in itertools.product((0, 1), (math.nan, math.inf)):
        grams = [a.clone(), b.clone()]
        grams[spoiled][3, 1, 2] = wrong
        for norms in (*gram_interaction_norms(*grams), interaction_norm(*grams)):
            assert norms.isnan().tolist() == [False, False, False, True]


@each_row("scale", [1e5, 1e9, 1e12])
def test_products_of_weights_that_overflow_float32_have_their_norm_all_the_same(scale):
    q, k = scale * randn(0, 2, 3, 4, 7)
    expected = torch.linalg.matrix_norm(q.mT @ k, ord=2)
    q, k = q.float(), k.float()
    norms = interaction_norm(q @ q.mT, k @ k.mT).double()
    assert_close(norms, expected, rtol=1e-4, atol=0)


# Largest eigenvalues by squarings

POWER = 2**11
N = 6
CROWDS = {f"crowd {below}": below for below in (0.5, 2.0, 5.0, 10.0)}


def weights_of(kind, r):
    """Weights [n r m] of query and key in float64, of a spectrum."""
    q, k = randn(r, 2, N, r, 2 * r)
    if kind in CROWDS:  # all but one eigenvalue so much under the largest
        below = torch.full((r,), CROWDS[kind] / POWER).double()
        below[0] = 0.0
        q = torch.linalg.qr(q.mT)[0].mT * (1 - below).sqrt()[:, None]
        turned = torch.linalg.qr(randn(r + 1, N, r, r))[0] @ q
        return turned, turned
    fall = torch.logspace(0, -6, r, dtype=torch.float64)[:, None]
    return {
        "random": (q, k),
        "small against large": (fall * q, fall.flip(0) * k),
        "low rank": (q[..., :2] @ randn(0, N, 2, 2 * r), k),
        "huge": (1e8 * q, 1e6 * k),
        "tiny": (1e-9 * q, 1e-7 * k),
    }[kind]


@each_row(
    "kind", ["random", "small against large", "low rank", "huge", "tiny", *CROWDS]
)
def test_squarings_give_the_solvers_eigenvalue_within_the_stated_bound(kind):
    for r in (2, 16, 64):
        a, b = (x @ x.mT for x in weights_of(kind, r))
        values, vectors = torch.linalg.eigh(a)
        root = vectors * values.clamp_min(0).sqrt()[..., None, :]
        pair = torch.linalg.eigvalsh(root.mT @ b @ root)[..., -1]
        size_a, size_b = (x.diagonal(dim1=-2, dim2=-1).sum(-1) for x in (a, b))
        rounding = 4 * r * torch.finfo(torch.float32).eps
        for grams, true, size in (
            ((a, b), pair, size_a * size_b),
            ((a,), values[..., -1], size_a),
        ):
            eigenvalue = squared_eigenvalue(*(x.float() for x in grams))
            below = true * math.log(r) / POWER
            assert (eigenvalue <= true + rounding * size).all(), r
            assert (eigenvalue >= true - below - rounding * size).all(), r
            if kind not in CROWDS:
                assert (eigenvalue / true - 1).abs().max() <= 5e-6, r
        if kind in CROWDS and r > 2:  # a bound that binds
            few = squared_eigenvalue(a.float(), squarings=4)
            assert (few < values[..., -1] * (1 - 1e-7)).any()


def test_the_eigenvalue_of_nothing_is_zero_and_of_what_is_not_finite_nan():
    a, b = torch.eye(3).repeat(2, 4, 1, 1)
    a[1], a[2, 0, 0], a[3, 1, 2] = 0.0, torch.nan, torch.inf
    for grams in ((a,), (a, b), (b, a)):
        eigenvalue = squared_eigenvalue(*grams)
        assert eigenvalue[:2].tolist() == pytest.approx([1.0, 0.0])
        assert eigenvalue[2:].isnan().all()


# What a step adds to a product of weights


def dense(matrix):
    """Spectral norm, stable rank and entropy of one matrix, by the definitions."""
    sigma = torch.linalg.svdvals(matrix.double()).tolist()
    total = math.fsum(s * s for s in sigma)
    shares = [s * s / total for s in sigma]
    entropy = -math.fsum(p * math.log(p) for p in shares if p > 0)
    return max(sigma), total / max(sigma) ** 2, entropy


@pytest.mark.parametrize("size", [1e-2, 1e-7])  # of the step; the weights are of size 1
@each_row("inputs", [(30, 30), (30, 17), (5, 30)])  # of q and k; 5 < 2 d_head
def test_the_spectra_of_a_step_are_those_of_the_dense_matrices(size, inputs):
    (q, dq), (k, dk) = (randn(i, 2, 3, 4, width) for i, width in enumerate(inputs))
    dq, dk = size * dq, size * dk
    spectra = [spectrum(product) for product in step_products(q, dq, k, dk)]
    for h in range(3):
        second, third = dq[h].mT @ k[h] + q[h].mT @ dk[h], dq[h].mT @ dk[h]
        for ours, matrix in zip(spectra, (second, third), strict=True):
            numbers = [float(x[h]) for x in ours]
            assert numbers == pytest.approx(dense(matrix), rel=1e-9)


def test_no_step_has_no_direction_and_broken_weights_spoil_only_their_head():
    x = randn(0, 3, 2, 5).float()
    a = x.clone()
    a[0], a[1, 0, 0] = 0.0, torch.nan
    norm, rank, entropy = spectrum(small_product(a, x))
    right = dense(x[2].mT @ x[2])[0]
    assert norm.tolist() == pytest.approx([0.0, math.nan, right], rel=1e-6, nan_ok=True)
    assert rank[:2].isnan().all()
    assert entropy[:2].isnan().all()
