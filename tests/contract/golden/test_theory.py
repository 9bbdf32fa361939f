"""What experiments/notes/theory.md says, simulated."""

from __future__ import annotations

import math

import pytest
import torch
from tests.each_row import each_row
from torch import Tensor

from qkeel import AttentionSpec, presets
from qkeel.functional.bounds import (
    entropy_floor,
    expected_squared_norm,
    logit_frobenius,
    logit_std,
    rms_logit_bound,
    softmax_jacobian_norm,
)
from qkeel.functional.logits import entropy, sigmoid, softmax, squared_relu
from qkeel.spec import RMSNorm, preset


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_the_mean_squared_norm_of_queries_is_that_of_the_weight_times_the_variance(
    sigma: float,
) -> None:
    weight = randn(3, 16, 32, seed=1)
    x = sigma * randn(20_000, 32, seed=2)
    seen = torch.einsum("hdm,nm->hnd", weight, x).square().sum(-1).mean(-1)
    torch.testing.assert_close(
        seen, expected_squared_norm(weight, sigma), rtol=0.02, atol=0
    )


def test_behind_a_norm_the_variance_of_a_modality_no_longer_reaches_the_query() -> None:
    weight, x = randn(16, 32, seed=3), randn(4000, 32, seed=4)
    loud = 4 * x

    def squared(x: Tensor) -> float:
        return float((x @ weight.T).square().sum(-1).mean())

    assert squared(loud) / squared(x) == pytest.approx(16)
    normed = [y / y.square().mean(-1, keepdim=True).sqrt() for y in (x, loud)]
    assert squared(normed[1]) == pytest.approx(squared(normed[0]))


def test_a_softmax_does_not_see_a_shift_and_sends_no_gradient_along_it() -> None:
    z = randn(5, 9, seed=5).requires_grad_()
    torch.testing.assert_close(softmax(z + 123.0), softmax(z), rtol=1e-9, atol=1e-12)
    (softmax(z) * randn(5, 9, seed=6)).sum().backward()
    assert z.grad is not None
    assert z.grad.sum(-1).abs().max() < 1e-12


@pytest.mark.parametrize(
    "weigh", [lambda z: sigmoid(z, -2.0), squared_relu], ids=["sigmoid", "squared relu"]
)
def test_weights_that_do_not_compete_see_a_shift(weigh: object) -> None:
    z = randn(5, 9, seed=7).requires_grad_()
    assert callable(weigh)
    assert (weigh(z + 1.0) - weigh(z)).abs().max() > 0.01
    (weigh(z) * randn(5, 9, seed=8).abs()).sum().backward()
    assert z.grad is not None
    assert (z.grad.sum(-1) > 0.01).all()


@pytest.mark.parametrize("head_dim", [16, 64, 256])
def test_the_spread_of_logits_at_initialisation_is_scale_times_root_d(
    head_dim: int,
) -> None:
    q, k = randn(1000, head_dim, seed=9), randn(1000, head_dim, seed=10)
    for scale in (1.0, head_dim**-0.5, 1 / head_dim):
        assert float((scale * q @ k.T).std()) == pytest.approx(
            logit_std(1, 1, head_dim, scale), rel=0.02
        )
    unit = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]
    lengths = 22.18, 1 / math.sqrt(head_dim)
    seen = float((lengths[0] * unit[0] @ unit[1].T).std())
    assert seen == pytest.approx(
        logit_std(lengths[1], lengths[1], head_dim, lengths[0]), rel=0.02
    )


@each_row("name", presets())
def test_a_preset_starts_with_the_spread_that_its_norm_and_scale_say(name: str) -> None:
    spec, d, t = preset(name), 64, 256
    params = {n: p.double() for n, p in spec.init_params(4, 4, d).items()}
    # Entries that a projection at initialisation gives; positions all 0, so that only norm and scale act.
    q, k = randn(1, 4, t, d, seed=11), randn(1, 4, t, d, seed=12)
    place = torch.zeros(1, t, dtype=torch.long)
    q2, k2 = spec.encode(q, k, place, place, params)
    factor = spec.factor(place + t - 1, d, params, q2.dtype)
    factor = (
        float(factor)
        if isinstance(factor, (int, float))
        else float(factor.flatten()[0])
    )
    seen = float((factor * q2 @ k2.mT).std())
    rms = (float(x.square().mean().sqrt()) for x in (q2, k2))
    assert seen == pytest.approx(logit_std(*rms, d, factor), rel=0.05)


def test_the_jacobian_of_a_softmax_has_the_norm_that_its_weights_say() -> None:
    for z in (
        randn(6, 7, seed=13),
        20 * randn(6, 7, seed=14),
        torch.zeros(2, 7, dtype=torch.float64),
    ):
        p = z.softmax(-1)
        whole = torch.diag_embed(p) - p[..., None] * p[:, None]
        ours, theirs = (
            softmax_jacobian_norm(p).square(),
            torch.linalg.matrix_norm(whole).square(),
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-15)
        assert (ours <= 0.25).all()
    equal = torch.full((1, 16), 1 / 16, dtype=torch.float64)
    assert float(softmax_jacobian_norm(equal)) == pytest.approx(math.sqrt(15) / 16)
    assert float(softmax_jacobian_norm(torch.eye(3, dtype=torch.float64)[:1])) == 0
    assert float(
        softmax_jacobian_norm(torch.tensor([[0.5, 0.5, 0.0]]))
    ) == pytest.approx(0.5)


def test_without_the_root_wide_heads_start_saturated_and_with_one_over_d_they_start_flat() -> (
    None
):
    """Source 003's claim, and the other side of it."""
    for d in (16, 64, 256):
        q, k = randn(400, d, seed=15), randn(128, d, seed=16)
        rows = {
            name: (scale * q @ k.T).softmax(-1)
            for name, scale in (("1", 1), ("r", d**-0.5), ("d", 1 / d))
        }
        jacobian = {
            name: float(softmax_jacobian_norm(p).mean()) for name, p in rows.items()
        }
        bits = {name: float(entropy(p).mean()) for name, p in rows.items()}
        assert bits["1"] < bits["r"] < bits["d"] < math.log(128)
        assert float(rows["1"].amax(-1).mean()) > {16: 0.4, 64: 0.7, 256: 0.8}[d]
        # Saturation is not yet a vanished gradient on average: rows with two rivals have the largest Jacobian of all.
        assert jacobian["1"] > jacobian["d"]
    one_hot = (16 * randn(400, 64, seed=17) @ randn(128, 64, seed=18).T).softmax(-1)
    assert float(softmax_jacobian_norm(one_hot).median()) < 1e-6


def test_a_bound_on_logits_is_a_floor_under_the_entropy() -> None:
    d, n = 64, 128
    q, k = 3 * randn(200, d, seed=19), 3 * randn(n, d, seed=20)
    spec = AttentionSpec(norm=RMSNorm())
    place = [torch.zeros(1, length, dtype=torch.long) for length in (200, n)]
    q2, k2 = spec.encode(q[None, None], k[None, None], *place, {})
    z = (q2 @ k2.mT / 8)[0, 0]
    assert float(z.abs().max()) <= rms_logit_bound(d)
    sigma = float((z - z.mean(-1, keepdim=True)).norm(dim=-1).max())
    assert float(entropy(z.softmax(-1)).min()) >= entropy_floor(sigma, n)


def test_the_frobenius_norm_of_all_logits_comes_from_two_small_gram_matrices() -> None:
    q, k = randn(300, 16, seed=21), randn(200, 16, seed=22)
    assert float(logit_frobenius(q, k)) == pytest.approx(
        float((q @ k.T).norm()), rel=1e-12
    )
