"""What a step adds to a product of weights, against dense singular value decompositions in float64."""

import math

import pytest
import torch

from qkeel.functional.bounds import product_spectrum, spectrum, step_products


def step_spectra(*factors):
    second, third = step_products(*factors)
    return spectrum(second), spectrum(third)


def dense(matrix):
    """Spectral norm, stable rank and entropy of one matrix, by the definitions."""
    sigma = torch.linalg.svdvals(matrix.double()).tolist()
    total = math.fsum(s * s for s in sigma)
    shares = [s * s / total for s in sigma]
    return (
        max(sigma),
        total / max(sigma) ** 2,
        -math.fsum(p * math.log(p) for p in shares if p > 0),
    )


@pytest.mark.parametrize("size", [1e-2, 1e-7])  # of the step; the weights are of size 1
@pytest.mark.parametrize(
    "widths", [(30, 30), (30, 17), (5, 30)]
)  # inputs of q and k; 5 < 2 d_head
def test_the_spectra_are_those_of_the_dense_matrices(size, widths):
    torch.manual_seed(0)
    q, dq = (x * torch.randn(3, 4, widths[0], dtype=torch.float64) for x in (1, size))
    k, dk = (x * torch.randn(3, 4, widths[1], dtype=torch.float64) for x in (1, size))
    found = step_spectra(q, dq, k, dk)
    for h in range(3):
        second = dq[h].mT @ k[h] + q[h].mT @ dk[h]
        for own, matrix in zip(found, (second, dq[h].mT @ dk[h])):
            assert [float(x[h]) for x in own] == pytest.approx(dense(matrix), rel=1e-9)


def test_no_step_has_no_direction_and_broken_weights_spoil_only_their_head():
    x = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    a = x.clone()
    a[0], a[1, 0, 0] = 0.0, torch.nan
    found = product_spectrum(a, x)
    assert float(found.spectral_norm[0]) == 0
    assert found.stable_rank[:2].isnan().all()
    assert found.singular_entropy[:2].isnan().all()
    assert float(found.spectral_norm[1]) != float(found.spectral_norm[1])
    assert float(found.spectral_norm[2]) == pytest.approx(
        dense(x[2].mT @ x[2])[0], rel=1e-6
    )
