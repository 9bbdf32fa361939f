"""Largest eigenvalues by squarings are those of the eigenvalue solver in float64, within the bound that is stated."""

import math

import pytest
import torch

from qkeel.functional.bounds import squared_eigenvalue

P = 2**11
N = 6


def rows(kind, r):
    """Weights [n r m] of query and key in float64, of a spectrum."""
    q, k = (torch.randn(N, r, 2 * r, dtype=torch.float64) for _ in range(2))
    small, grow = (
        torch.logspace(*ends, r, dtype=torch.float64) for ends in ((0, -6), (-6, 0))
    )
    if kind.startswith("crowd"):  # all but one eigenvalue so much under the largest
        below = float(kind.removeprefix("crowd ")) / P
        q = (
            torch.linalg.qr(q.mT)[0].mT
            * torch.cat([torch.ones(1), (1 - below * torch.ones(r - 1)).sqrt()])[
                :, None
            ]
        )
        turn = torch.linalg.qr(torch.randn(N, r, r, dtype=torch.float64))[0]
        q = turn @ q
        return q, turn @ torch.linalg.qr(k.mT)[0].mT if kind.endswith(
            "apart"
        ) else q.clone()
    return {
        "random": (q, k),
        "small against large": (small[:, None] * q, grow[:, None] * k),
        "low rank": (q[..., :2] @ torch.randn(N, 2, 2 * r, dtype=torch.float64), k),
        "huge": (1e8 * q, 1e6 * k),
        "tiny": (1e-9 * q, 1e-7 * k),
    }[kind]


SPECTRA = [
    "random",
    "small against large",
    "low rank",
    "huge",
]
SPECTRA += ["tiny", *(f"crowd {x}" for x in (0.5, 2.0, 5.0, 10.0))]


@pytest.mark.parametrize("kind", SPECTRA)
def test_it_is_the_solvers_within_the_stated_bound(kind):
    for r in (2, 16, 64):
        q, k = rows(kind, r)
        a, b = (x @ x.mT for x in (q, k))
        values, vectors = torch.linalg.eigh(a)
        root = vectors * values.clamp_min(0).sqrt()[..., None, :]
        pair, single = (
            torch.linalg.eigvalsh(root.mT @ b @ root)[..., -1],
            values[..., -1],
        )
        sizes = [x.diagonal(dim1=-2, dim2=-1).sum(-1) for x in (a, b)]
        below = (sizes[0] * sizes[1] / pair).log() / P
        rounding = 4 * r * torch.finfo(torch.float32).eps
        crowded = kind.startswith("crowd")
        for found, true, room, size in (
            (
                squared_eigenvalue(a.float(), b.float()),
                pair,
                below,
                sizes[0] * sizes[1],
            ),
            (
                squared_eigenvalue(a.float()),
                single,
                torch.full((N,), math.log(r) / P),
                sizes[0],
            ),
        ):
            assert (found <= true + rounding * size).all(), r
            assert (found >= true * (1 - room) - rounding * size).all(), r
            if not crowded:
                assert (found / true - 1).abs().max() <= 5e-6, r
        if not crowded:
            continue
        # A bound that binds.
        assert (
            squared_eigenvalue(a.float(), squarings=4) < single * (1 - 1e-7)
        ).any() or r == 2


def test_nothing_is_zero_and_what_is_not_finite_is_nan():
    a = torch.eye(3).repeat(4, 1, 1)
    a[1], a[2, 0, 0], a[3, 1, 2] = 0.0, torch.nan, torch.inf
    b = torch.eye(3).repeat(4, 1, 1)
    for found in (
        squared_eigenvalue(a),
        squared_eigenvalue(a, b),
        squared_eigenvalue(b, a),
    ):
        assert found[:2].tolist() == pytest.approx([1.0, 0.0])
        assert found[2:].isnan().all()
