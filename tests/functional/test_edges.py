"""What lies just inside of what formulas accept, and shapes that only some callers use."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from qkeel.errors import InvalidValueError
from qkeel.functional.bounds import (
    dilution_bound,
    entropy_floor,
    expected_squared_norm,
    gram_interaction_norms,
    gram_spectral_norm,
    interaction_norm,
    logit_frobenius,
    logit_std,
    newton_schulz,
    rms_logit_bound,
    softmax_jacobian_norm,
    spectral_norm,
    squared_eigenvalue,
)
from qkeel.functional.class_statistics import norm_ratio
from qkeel.functional.logits import (
    cosine_scale,
    deepnorm,
    entropy,
    floor_log_temperature,
    gradient_scale,
    log_n,
    qk_norm_init,
    softmax,
    softpick,
    squared_relu,
    z_loss,
)
from qkeel.functional.norms import (
    inverse_l2,
    inverse_rms,
    l2_norm,
    layer_norm,
    rms_norm,
    unrounded,
    widest,
)
from qkeel.functional.position_biases import alibi_slopes
from qkeel.functional.rope import ntk, rotate


def test_cosines_of_two_numbers_have_a_scale_and_of_one_have_none():
    # On a circle M is the Bessel function I₀, M(2λ)/M(λ)² ≈ √(πλ): λ (1 - √(πλ)/n) is largest at (2n/3)²/π.
    assert gradient_scale(16, 2) == pytest.approx((2 * 16 / 3) ** 2 / math.pi, rel=0.01)
    with pytest.raises(InvalidValueError, match="head_dim of at least 2"):
        gradient_scale(16, 1)


def test_autocast_rounds_no_product_inside():
    x = torch.randn(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with unrounded(x):
            assert (x @ x).dtype is torch.float32


def test_the_competition_index_takes_classes_last_whatever_comes_before():
    norms = torch.tensor([[[2.0, 6.0], [1.0, 5.0], [4.0, 4.0]]])
    counts = torch.tensor([[[1, 1], [1, 0], [2, 3]]])
    torch.testing.assert_close(
        norm_ratio(norms, counts), torch.tensor([[3.0, math.nan, 1.0]]), equal_nan=True
    )


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script`:DeprecationWarning"
)  # of torch's decompositions for dual numbers
@pytest.mark.parametrize(
    "formula",
    [
        l2_norm,
        rms_norm,
        inverse_l2,
        inverse_rms,
        "half",
        "interleaved",
        "half_reversed",
    ],
)
def test_a_forward_mode_derivative_is_that_of_the_backward_pass(
    formula: Callable[[Tensor], Tensor] | str,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 6, generator=generator, dtype=torch.float64).unbind()
    # The last two numbers do not turn.
    angles = torch.randn(2, generator=generator, dtype=torch.float64)
    of = (
        formula
        if callable(formula)
        else partial(rotate, cos=angles.cos(), sin=angles.sin(), pairing=formula)
    )
    with forward_ad.dual_level():
        value, change = forward_ad.unpack_dual(of(forward_ad.make_dual(x, v)))
    torch.testing.assert_close(value, of(x))
    torch.testing.assert_close(change, torch.autograd.functional.jacobian(of, x) @ v)


@pytest.mark.parametrize("spoiled", [0, 1])
def test_one_number_that_is_none_makes_the_norm_of_its_head_none_and_of_no_other(
    spoiled,
):
    weights = torch.randn(2, 3, 4, 7, generator=torch.Generator().manual_seed(0))
    grams = weights @ weights.mT
    grams[spoiled, 1, 2, 3] = torch.nan
    found = interaction_norm(*grams)
    expected = torch.linalg.matrix_norm(weights[0].mT @ weights[1], ord=2)
    assert found.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]])


def test_what_a_formula_takes_where_nothing_is_said():
    # RMS 1e-3, L2 norm 2e-3.
    small = torch.tensor([1e-3, -1e-3, 1e-3, -1e-3], dtype=torch.float64)
    for of, expected in (
        (l2_norm, 0.5),
        (rms_norm, 1e-3 / math.sqrt(1e-6 + 1e-6)),
        (layer_norm, 1e-3 / math.sqrt(1e-6 + 1e-5)),
        (lambda x: x * inverse_l2(x), 0.5),
        (lambda x: x * inverse_rms(x), 1e-3 / math.sqrt(2e-6)),
        (lambda x: l2_norm(1e-10 * x), 1e-13 / 1e-12),
        (lambda x: x * inverse_l2(1e-10 * x), 1e-3 / 1e-12),
    ):
        assert float(of(small)[0]) == pytest.approx(expected, rel=1e-9)
    weight = torch.ones(2, 3, 4, dtype=torch.float64)
    assert expected_squared_norm(weight).tolist() == [12.0, 12.0]
    assert logit_std(2.0, 3.0, 64) == 6.0
    assert (rms_logit_bound(64), rms_logit_bound(64, 3.0)) == (8.0, 24.0)
    assert float(z_loss(torch.zeros(3, 4))) == pytest.approx(1e-4 * math.log(4) ** 2)
    assert log_n(torch.tensor([1]), 2).tolist() == [0.0]
    crowded = torch.diag(torch.linspace(1.0, 0.999, 64))
    assert torch.equal(
        squared_eigenvalue(crowded), squared_eigenvalue(crowded, squarings=11)
    )
    assert squared_eigenvalue(crowded) < squared_eigenvalue(crowded, squarings=12)


def test_the_smallest_number_of_keys_heads_layers_and_tokens_that_a_formula_takes():
    one = torch.tensor(1.5, dtype=torch.float64)
    assert float(dilution_bound(one, 2)) == pytest.approx(1 / (1 + math.exp(0.5 - 1.5)))
    # Two logits ±σ/√2: the entropy of a coin with log odds σ√2.
    p = 1 / (1 + math.exp(-0.7 * math.sqrt(2)))
    assert entropy_floor(0.7, 2) == pytest.approx(
        -p * math.log(p) - (1 - p) * math.log(1 - p)
    )
    assert gradient_scale(2.0) < gradient_scale(3.0)
    assert cosine_scale(2.5) == pytest.approx(4 * math.log(1.25))
    assert qk_norm_init(1.5) == pytest.approx(math.log2(0.75))
    assert deepnorm(1) == pytest.approx((1.0, 4**-0.25))
    assert deepnorm(48) == pytest.approx(
        ((2 * 24) ** 0.25, (8 * 24) ** -0.25), rel=1e-15
    )
    # As published for 24 layers of two sublayers.
    assert deepnorm(48) == pytest.approx((2.632, 0.2686), abs=5e-4)
    assert floor_log_temperature(
        torch.tensor([-5, -1, 0]), 1.0, 1, torch.float64
    ).tolist() == pytest.approx([1.0, 1.0, 1 + math.log(2)])
    for make, says in (
        (lambda: deepnorm(0), "at least one sublayer, got 0"),
        (lambda: alibi_slopes(0), "at least one head, got 0"),
        (lambda: ntk(torch.ones(1), 2.0, exact=True), "at least 4 rotated dimensions"),
        (lambda: gradient_scale(16, 1), "head_dim of at least 2"),
    ):
        with pytest.raises(InvalidValueError, match=says):
            make()


def test_the_loss_on_output_logits_is_the_mean_square_of_their_logsumexp_in_float32_or_wider():
    z = 80 * torch.randn(
        5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    rows = [math.log(math.fsum(math.exp(x) for x in row)) for row in z.tolist()]
    found = z_loss(z, 0.5)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(0.5 * sum(x * x for x in rows) / 5, rel=1e-12)
    half = (4 * z).half()  # squares beyond 65,504
    assert z_loss(half).dtype == torch.float32
    torch.testing.assert_close(z_loss(half).double(), z_loss(half.double()))


def test_grams_that_are_small_zero_or_not_finite_have_norms_that_are():
    w = (
        torch.randn(
            4, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        * 1e-3
    )
    w[1, 2] = 0.0  # singular
    w[2] = 0.0
    a, b = w @ w.mT, w.flip(-1) @ w.flip(-1).mT
    dense = w.mT @ w.flip(-1)
    for found, expected in zip(
        gram_interaction_norms(a, b),
        (dense.norm(dim=(1, 2)), torch.linalg.matrix_norm(dense, 2)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-20)
    torch.testing.assert_close(
        gram_spectral_norm(a), torch.linalg.matrix_norm(w, 2), rtol=1e-9, atol=1e-12
    )
    torch.testing.assert_close(
        logit_frobenius(w, w.flip(-1)), torch.linalg.matrix_norm(w @ w.flip(-1).mT)
    )
    for spoiled, wrong in itertools.product((0, 1), (math.nan, math.inf)):
        grams = [a.clone(), b.clone()]
        grams[spoiled][3, 1, 2] = wrong
        for found in (*gram_interaction_norms(*grams), interaction_norm(*grams)):
            assert found.isnan().tolist() == [False, False, False, True], (
                spoiled,
                wrong,
            )


def test_what_a_device_without_float64_and_other_devices_compute_in():
    assert (widest(torch.device("mps")), widest(torch.device("cpu"))) == (
        torch.float32,
        torch.float64,
    )


def test_axes_in_front_are_as_many_as_the_caller_has():
    rng = torch.Generator().manual_seed(2)
    w, v = torch.randn(2, 2, 3, 4, 5, generator=rng, dtype=torch.float64)
    a, b = w @ w.mT, v @ v.mT
    a[1, 2, 3, 3] = math.nan  # of one head of six
    weights = w.softmax(-1)
    for of, given in (
        (interaction_norm, (a, b)),
        (lambda *grams: torch.stack(gram_interaction_norms(*grams)), (a, b)),
        (squared_eigenvalue, (b, w @ w.mT)),
        (squared_eigenvalue, (b,)),
        (gram_spectral_norm, (b,)),
        (spectral_norm, (w,)),
        (spectral_norm, (w.mT,)),
        (logit_frobenius, (w, v)),
        (expected_squared_norm, (w,)),
        (newton_schulz, (w,)),
        (softmax_jacobian_norm, (weights,)),
        (entropy, (weights,)),
        (softmax, (w,)),
        (squared_relu, (w,)),
        (softpick, (w,)),
        (layer_norm, (w,)),
        (rms_norm, (w,)),
        (inverse_l2, (w,)),
    ):
        whole = of(*given)  # type: ignore[operator]
        for i, j in itertools.product(range(2), range(3)):
            alone = of(*(x[i, j] for x in given))  # type: ignore[operator]
            both = (
                whole[:, i, j]
                if len(whole) == 2 and whole.ndim == 3 and whole.shape[1:] == (2, 3)
                else whole[i, j]
            )
            torch.testing.assert_close(
                both, alone, rtol=1e-9, atol=1e-12, equal_nan=True
            )
            assert bool(alone.isnan().any()) == (given[0] is a and (i, j) == (1, 2))


@pytest.mark.parametrize("scale", [1e5, 1e9, 1e12])
def test_products_of_weights_that_overflow_float32_have_their_norm_all_the_same(
    scale,
):
    weights = scale * torch.randn(
        2, 3, 4, 7, generator=torch.Generator().manual_seed(0)
    )
    grams = weights @ weights.mT
    expected = torch.linalg.matrix_norm(
        weights[0].double().mT @ weights[1].double(), ord=2
    )
    torch.testing.assert_close(
        interaction_norm(*grams).double(), expected, rtol=1e-4, atol=0
    )
